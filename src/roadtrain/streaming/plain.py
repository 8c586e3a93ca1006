r"""The state of a job as plain bytes and back: nested values and tensors of known types, nothing
else (Rule 8).

    b"RTstate\\1" | length of the header (u64) | header: msgpack | the tensors' bytes, one after the
    other

The header is one value. None, bool, int, float, str and bytes stand for themselves; all else is
[tag, ...]: containers hold their items, a tensor its dtype and shape. So reading runs no code, and
every length is checked before it is used.

Tensors come back on the host and contiguous; that several shared memory is forgotten. Does NOT know
what the values mean.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from roadtrain.errors import ConfigError, DamagedError, ForeignError

MAGIC = b"RTstate\1"
LENGTH = struct.Struct("<Q")
# the types of numbers by their own names; not aliases such as `half`, nor types that pack several
_FIXED = re.compile(r"bool|bfloat16|(u?int|float)(8|16|32|64)(_.*)?|complex(64|128)")
DTYPES = {
    name: kind
    for name, kind in vars(torch).items()
    if isinstance(kind, torch.dtype) and _FIXED.fullmatch(name)
}
MAX_DEPTH = 100  # a value that holds itself ends here, with a sentence
PLAIN = (type(None), bool, float, str, bytes)
SEQUENCES: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "size": torch.Size}
MAPPINGS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
TAGS: dict[type[Any], str] = {kind: tag for tag, kind in (SEQUENCES | MAPPINGS).items()}
METADATA = "_metadata"  # the one attribute that an OrderedDict may have
ARRAYS = "biufc"  # kinds of numpy arrays that are nothing but numbers
# what a value of another form raises where it is put together
_OTHER_FORMS = (msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError)
HINT = (
    "numbers, text, bytes, None, tensors and arrays of numbers; dicts, lists, tuples and sets of"
    " them"
)


def encode(value: Any, what: str = "the state") -> bytes:
    """`value` as bytes. ConfigError names the place in `what` whose type has no plain form."""
    pieces: list[memoryview] = []
    header = msgspec.msgpack.encode(_told(value, pieces, what, 0))
    return b"".join([MAGIC, LENGTH.pack(len(header)), header, *pieces])


def decode(raw: bytes | memoryview) -> Any:
    """The value that `encode` was given. Raises DamagedError for bytes that are not whole or hold
    unknown types, ForeignError for bytes that `encode` did not make."""
    view = memoryview(raw)
    if view[: len(MAGIC)] != MAGIC:
        raise ForeignError(
            f"the state of a job begins with {bytes(view[:8])!r}, not with {MAGIC!r}",
            hint="another version of roadtrain wrote it: 0.2.0 still reads states of 0.1.0",
        )
    at = len(MAGIC) + LENGTH.size
    if len(view) < at:
        raise DamagedError(f"the state of a job has {len(view)} bytes, its beginning alone is {at}")
    (length,) = LENGTH.unpack(view[len(MAGIC) : at])
    if length > len(view) - at:
        raise DamagedError(
            f"the header of a job's state is {length} bytes, {len(view) - at} are there"
        )
    rest = _Rest(view[at + length :])
    try:
        value = _made(msgspec.msgpack.decode(view[at : at + length]), rest)
    except _OTHER_FORMS as error:
        raise DamagedError(f"the state of a job is of another form: {error}") from error
    if rest.nbytes:
        raise DamagedError(f"{rest.nbytes} bytes stand behind the state of a job")
    return value


def _told(value: Any, pieces: list[memoryview], where: str, depth: int) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else ["int", hex(value)]
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where} is nested more than {MAX_DEPTH} deep, or holds itself")
    if isinstance(value, np.generic):
        return _told(value.item(), pieces, where, depth + 1)
    if kind in SEQUENCES.values():
        return [
            TAGS[kind],
            *(_told(one, pieces, f"{where}[{i}]", depth + 1) for i, one in enumerate(value)),
        ]
    if kind in MAPPINGS.values():
        # a module's state_dict says the versions of its modules so
        if kind is OrderedDict and vars(value):
            if list(vars(value)) != [METADATA]:
                raise ConfigError(
                    f"{where} is an OrderedDict with attributes: {', '.join(vars(value))}",
                    hint=HINT,
                )
            bare = _told(OrderedDict(value), pieces, where, depth)
            metadata = vars(value)[METADATA]
            return [METADATA, bare, _told(metadata, pieces, f"{where}.{METADATA}", depth + 1)]
        told = [TAGS[kind]]
        for key, one in value.items():
            told.append(_told(key, pieces, where, depth + 1))
            told.append(_told(one, pieces, f"{where}[{key!r}]", depth + 1))
        return told
    return _told_leaf(value, pieces, where)


def _told_leaf(value: Any, pieces: list[memoryview], where: str) -> list[Any]:
    if type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        if value.layout is not torch.strided or value.is_meta or value.dtype not in DTYPES.values():
            what = f"a tensor of {value.dtype} that is {value.layout} on {value.device}"
            raise ConfigError(f"{where} is {what}, which has no plain form", hint=HINT)
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        # one element of another stride is contiguous to torch, and cannot be seen as bytes
        if flat.stride() != (1,):
            flat = flat.new_empty(flat.shape).copy_(flat)
        pieces.append(flat.view(torch.uint8).numpy().data)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if type(value) is np.ndarray and value.dtype.kind in ARRAYS:
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        pieces.append(little.reshape(-1).view(np.uint8).data)
        return ["array", little.dtype.str, list(value.shape)]
    if type(value) is complex:
        return ["complex", value.real, value.imag]
    if type(value) is torch.dtype and value in DTYPES.values():
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) is torch.device:
        return ["device", str(value)]
    raise ConfigError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which has no plain"
        " form",
        hint=HINT,
    )


class _Rest:
    """The tensors' bytes that have not been taken."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    @property
    def nbytes(self) -> int:
        return len(self._view)

    def take(self, shape: list[int], itemsize: int) -> bytearray:
        """Bytes of the next tensor. ValueError where there are too few; nothing is allocated
        then."""
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{shape!r} is no shape")
        nbytes = itemsize
        for n in shape:
            nbytes *= n
        if nbytes > len(self._view):
            raise ValueError(f"a tensor of {nbytes} bytes, {len(self._view)} are there")
        taken, self._view = bytearray(self._view[:nbytes]), self._view[nbytes:]
        return taken


def _made(told: Any, rest: _Rest) -> Any:
    """Raises ValueError or TypeError for what `_told` does not say."""
    if not isinstance(told, list):
        if type(told) not in PLAIN and type(told) is not int:
            raise ValueError(f"a {type(told).__name__} in the header")
        return told
    tag, *items = told
    if tag in SEQUENCES:
        return SEQUENCES[tag]([_made(one, rest) for one in items])
    if tag in MAPPINGS:
        if len(items) % 2:
            raise ValueError(f"a {tag} of {len(items)} keys and values")
        pairs = [_made(one, rest) for one in items]
        made: Any = MAPPINGS[tag]()
        made.update(dict(zip(pairs[::2], pairs[1::2])))
        return made
    if tag == METADATA:
        bare, metadata = (_made(one, rest) for one in items)
        if type(bare) is not OrderedDict:
            raise ValueError(f"metadata of a {type(bare).__name__}")
        vars(bare)[METADATA] = metadata
        return bare
    if tag not in _LEAVES:
        raise ValueError(f"a value of the kind {tag!r}")
    return _LEAVES[tag](rest, *items)


def _tensor(rest: _Rest, dtype: str, shape: list[int]) -> torch.Tensor:
    raw, kind = rest.take(shape, DTYPES[dtype].itemsize), DTYPES[dtype]
    return (
        torch.frombuffer(raw, dtype=kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)
    )


def _array(rest: _Rest, dtype: str, shape: list[int]) -> np.ndarray:
    kind = np.dtype(str(dtype))
    if kind.kind not in ARRAYS:
        raise ValueError(f"an array of dtype {dtype!r}")
    return np.frombuffer(rest.take(shape, kind.itemsize), kind).reshape(shape)


_LEAVES: dict[str, Callable[..., Any]] = {
    "tensor": _tensor,
    "array": _array,
    "int": lambda rest, text: int(str(text), 16),
    "complex": lambda rest, real, imaginary: complex(real, imaginary),
    "dtype": lambda rest, name: DTYPES[name],
    "device": lambda rest, name: torch.device(str(name)),
}
