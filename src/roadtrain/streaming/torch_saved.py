"""Reads what torch.save wrote, as data: for the states of jobs that the first edition committed.

A file of torch.save is a zip archive: a pickle that says how values are nested, and the bytes of
the tensors. A pickle is a program for a small machine. The one here knows only the instructions
that build dicts, lists, tuples, numbers and text, and the dozen names below; it imports nothing and
calls nothing that the bytes name. So it may read what came over a wire (Rule 8), where torch.load,
`weights_only` too, may not.

Assumes little-endian bytes, as torch.save writes here. Does NOT write, and does NOT read classes of
anybody's own.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from roadtrain.errors import DamagedError

NUMBERS = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in NUMBERS if hasattr(torch, name)
}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
MAX_STEPS = 20_000_000  # instructions of one pickle


class _Name:
    """A name that the pickle mentions: one of CALLS, a dtype or a storage's class."""

    def __init__(self, text: str) -> None:
        self.text = text


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """torch's _rebuild_tensor_v2; v3 says the dtype last."""
    if not isinstance(storage, torch.Tensor):
        raise ValueError("a tensor without a storage")
    if len(rest) > 2 and isinstance(rest[2], torch.dtype):
        storage = storage.view(rest[2])
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and not (0 <= offset <= last < storage.numel() and min([0, *stride]) >= 0):
        raise ValueError(f"a tensor of {tuple(size)} in a storage of {storage.numel()} elements")
    return storage.as_strided(tuple(size), tuple(stride), offset if 0 not in size else 0)


CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_tensor_v3": _tensor,
    "torch._utils _rebuild_parameter": lambda data, requires_grad, hooks: data,
    "torch Size": lambda values: torch.Size(values),
    "torch device": lambda *words: torch.device(*words),
    "collections OrderedDict": OrderedDict,
    "collections Counter": lambda counts=(): Counter(dict(counts)),
    "__builtin__ set": lambda values=(): set(values),
    "_codecs encode": lambda text, how: (
        text.encode("latin1") if how == "latin1" else _refuse(f"bytes in {how!r}")
    ),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINSTRING",
    "BINSTRING",
}


def _refuse(what: str) -> Any:
    raise ValueError(what)


def read_saved(raw: bytes | memoryview) -> Any:
    """The value that torch.save was given, with its tensors on the host. Raises DamagedError."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            (name,) = [one for one in archive.namelist() if one.endswith("/data.pkl")]
            return _Machine(archive, name.removesuffix("data.pkl")).run(_member(archive, name))
    except (
        zipfile.BadZipFile,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        EOFError,
        OverflowError,
        RuntimeError,
        NotImplementedError,
    ) as error:
        raise DamagedError(
            f"the state of a job, as torch.save wrote it, cannot be read: {error}"
        ) from error


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Stored as it is: what is packed could be any size."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    return archive.read(name)


class _Machine:
    """`stack`: values under construction; `marks`: how many there were at each mark; `memo`:
    values named by number."""

    def __init__(self, archive: zipfile.ZipFile, prefix: str) -> None:
        self._archive, self._prefix = archive, prefix
        self._storages: dict[str, torch.Tensor] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for count, (code, word, _) in enumerate(pickletools.genops(program)):
            if count > MAX_STEPS:
                raise ValueError(f"a pickle of more than {MAX_STEPS} instructions")
            if code.name == "STOP":
                (value,) = self._stack
                return value
            self._step(code.name, word)
        raise ValueError("a pickle without an end")

    def _step(self, name: str, word: Any) -> None:
        stack = self._stack
        if name in VALUES:
            stack.append(word)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in TUPLES:
            stack.append(tuple(reversed([stack.pop() for _ in range(TUPLES[name])])))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[word] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[word])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name == "GLOBAL":
            stack.append(self._named(word))
        elif name not in ("PROTO", "FRAME"):
            self._build(name)

    def _build(self, name: str) -> None:
        """Instructions that put values together."""
        stack = self._stack
        match name:
            case "TUPLE":
                items = self._since_mark()
                stack.append(tuple(items))
            case "APPENDS" | "APPEND":
                items = self._since_mark() if name == "APPENDS" else [stack.pop()]
                self._top(list).extend(items)
            case "SETITEMS" | "SETITEM":
                items = self._since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                self._top(dict).update(zip(items[::2], items[1::2], strict=True))
            case "REDUCE":
                words, called = stack.pop(), stack.pop()
                if (
                    not isinstance(called, _Name)
                    or called.text not in CALLS
                    or not isinstance(words, tuple)
                ):
                    raise ValueError(
                        f"a call of {called.text if isinstance(called, _Name) else called!r}"
                    )
                stack.append(CALLS[called.text](*words))
            case "BINPERSID":
                stack.append(self._storage(*stack.pop()))
            case "BUILD":
                attributes = stack.pop()
                if type(stack[-1]) is not OrderedDict or not {*attributes} <= {"_metadata"}:
                    raise ValueError(f"attributes of a {type(stack[-1]).__name__}")
                # a module's state_dict says the versions of its modules so
                vars(stack[-1]).update(attributes)
            case _:
                raise ValueError(f"an instruction {name}")

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items

    def _top(self, kind: type[Any]) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"items of a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _named(self, text: str) -> Any:
        module, _, name = text.partition(" ")
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        known = text in CALLS or (module in ("torch", "torch.storage") and name in STORAGES)
        return _Name(text) if known else _refuse(f"a name {text!r}")

    def _storage(self, kind: str, of: Any, key: str, where: str, numel: int) -> torch.Tensor:
        """1-d, the whole storage; tensors of one storage share it."""
        name = of.text.partition(" ")[2] if isinstance(of, _Name) else ""
        if kind != "storage" or name not in STORAGES:
            raise ValueError(f"a {kind} of {name!r}")
        if key not in self._storages:
            raw, dtype = (
                bytearray(_member(self._archive, f"{self._prefix}data/{key}")),
                STORAGES[name],
            )
            if len(raw) != numel * dtype.itemsize:
                raise ValueError(
                    f"a storage of {len(raw)} bytes, {numel} elements of {dtype} were said"
                )
            self._storages[key] = (
                torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            )
        return self._storages[key]
