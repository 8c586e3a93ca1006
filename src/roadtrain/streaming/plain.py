r"""The encoding of the job state as bytes. Only nested values and tensors of known types are
encoded, so decoding runs no code (Rule 8).

    b"RTstate\\1" | length of the header (u64) | header: msgpack | bytes of all tensors, in order

In the header, None, bool, int, float, str and bytes represent themselves. Any other value is a list
[tag, ...]: the tag of a container is followed by its items, and the tag of a tensor by its dtype
and shape. Every length is checked before it is used. Decoded tensors are on the host, contiguous,
and do not share memory.
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
# The dtypes whose elements are numbers, by their full names (not aliases such as `half`).
_FIXED = re.compile(r"bool|bfloat16|(u?int|float)(8|16|32|64)(_.*)?|complex(64|128)")
DTYPES = {
    name: kind
    for name, kind in vars(torch).items()
    if isinstance(kind, torch.dtype) and _FIXED.fullmatch(name)
}
MAX_DEPTH = 100  # nesting limit, which also stops values that contain themselves
PLAIN = (type(None), bool, float, str, bytes)
SEQUENCES: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "size": torch.Size}
MAPPINGS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
TAGS: dict[type[Any], str] = {kind: tag for tag, kind in (SEQUENCES | MAPPINGS).items()}
METADATA = "_metadata"  # the only attribute that an OrderedDict may have
ARRAYS = "biufc"  # kinds of numpy dtypes that are plain numbers
# exceptions raised while decoding an invalid header
_OTHER_FORMS = (msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError)
HINT = (
    "use numbers, text, bytes, None, tensors and arrays of numbers, and dicts, lists, tuples and"
    " sets of them"
)


def encode(value: Any, what: str = "the state") -> bytes:
    """Encode `value`.

    Raises ConfigError if `value` contains an object of an unsupported type. The error names the
    path to this object, such as `the state['loader'][2]`. `what` is the beginning of the path.
    """
    pieces: list[memoryview] = []
    header = msgspec.msgpack.encode(_to_header(value, pieces, what, 0))
    return b"".join([MAGIC, LENGTH.pack(len(header)), header, *pieces])


def decode(raw: bytes | memoryview) -> Any:
    """Decode the result of `encode`. Raises ForeignError if the bytes do not begin like such a
    result, and DamagedError if they are incomplete or contain unknown types."""
    view = memoryview(raw)
    if view[: len(MAGIC)] != MAGIC:
        raise ForeignError(
            f"the job state begins with {bytes(view[:8])!r} instead of {MAGIC!r}",
            hint="another version of roadtrain wrote it; 0.2.0 can read states of 0.1.0",
        )
    at = len(MAGIC) + LENGTH.size
    if len(view) < at:
        raise DamagedError(f"the job state must have {at} bytes or more, but has {len(view)}")
    (length,) = LENGTH.unpack(view[len(MAGIC) : at])
    if length > len(view) - at:
        raise DamagedError(
            f"the header of the job state needs {length} bytes, but only {len(view) - at} are left"
        )
    rest = _Unread(view[at + length :])
    try:
        value = _from_header(msgspec.msgpack.decode(view[at : at + length]), rest)
    except _OTHER_FORMS as error:
        raise DamagedError(f"the job state has an invalid header: {error}") from error
    if rest.nbytes:
        raise DamagedError(f"{rest.nbytes} unexpected bytes follow the job state")
    return value


def _to_header(value: Any, pieces: list[memoryview], where: str, depth: int) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else ["int", hex(value)]
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where} is nested more than {MAX_DEPTH} deep, or contains itself")
    if isinstance(value, np.generic):
        return _to_header(value.item(), pieces, where, depth + 1)
    if kind in SEQUENCES.values():
        return [
            TAGS[kind],
            *(_to_header(item, pieces, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)),
        ]
    if kind in MAPPINGS.values():
        # state_dict() of a module stores the versions of its modules in an attribute
        if kind is OrderedDict and vars(value):
            if list(vars(value)) != [METADATA]:
                raise ConfigError(
                    f"{where} has attributes {', '.join(vars(value))}, only {METADATA} is saved",
                    hint=HINT,
                )
            bare = _to_header(OrderedDict(value), pieces, where, depth)
            metadata = vars(value)[METADATA]
            return [METADATA, bare, _to_header(metadata, pieces, f"{where}.{METADATA}", depth + 1)]
        header = [TAGS[kind]]
        for key, item in value.items():
            header.append(_to_header(key, pieces, where, depth + 1))
            header.append(_to_header(item, pieces, f"{where}[{key!r}]", depth + 1))
        return header
    return _leaf_header(value, pieces, where)


def _leaf_header(value: Any, pieces: list[memoryview], where: str) -> list[Any]:
    if type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        if value.layout is not torch.strided or value.is_meta or value.dtype not in DTYPES.values():
            what = f"a tensor of {value.dtype} that is {value.layout} on {value.device}"
            raise ConfigError(f"{where} is {what}, which cannot be saved", hint=HINT)
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        # a tensor with one element is always contiguous, but with other strides it cannot be viewed
        # as bytes
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
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved",
        hint=HINT,
    )


class _Unread:
    """The bytes of all tensors that were not decoded yet."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    @property
    def nbytes(self) -> int:
        return len(self._view)

    def take(self, shape: list[int], itemsize: int) -> bytearray:
        """Return the bytes of the next tensor. Raises ValueError if too few bytes are left."""
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{shape!r} is not a shape")
        nbytes = itemsize
        for n in shape:
            nbytes *= n
        if nbytes > len(self._view):
            raise ValueError(f"a tensor needs {nbytes} bytes, but {len(self._view)} are left")
        raw, self._view = bytearray(self._view[:nbytes]), self._view[nbytes:]
        return raw


def _from_header(header: Any, rest: _Unread) -> Any:
    """Decode a value of the header, or raise ValueError or TypeError."""
    if not isinstance(header, list):
        if type(header) not in PLAIN and type(header) is not int:
            raise ValueError(f"unexpected {type(header).__name__} in the header")
        return header
    tag, *items = header
    if tag in SEQUENCES:
        return SEQUENCES[tag]([_from_header(item, rest) for item in items])
    if tag in MAPPINGS:
        if len(items) % 2:
            raise ValueError(f"a {tag} has an odd number of keys and values, {len(items)}")
        pairs = [_from_header(item, rest) for item in items]
        made: Any = MAPPINGS[tag]()
        made.update(dict(zip(pairs[::2], pairs[1::2])))
        return made
    if tag == METADATA:
        bare, metadata = (_from_header(item, rest) for item in items)
        if type(bare) is not OrderedDict:
            raise ValueError(f"a {type(bare).__name__} cannot have metadata")
        vars(bare)[METADATA] = metadata
        return bare
    if tag not in _LEAVES:
        raise ValueError(f"a value has the unknown tag {tag!r}")
    return _LEAVES[tag](rest, *items)


def _tensor(rest: _Unread, dtype: str, shape: list[int]) -> torch.Tensor:
    raw, kind = rest.take(shape, DTYPES[dtype].itemsize), DTYPES[dtype]
    return (
        torch.frombuffer(raw, dtype=kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)
    )


def _array(rest: _Unread, dtype: str, shape: list[int]) -> np.ndarray:
    kind = np.dtype(str(dtype))
    if kind.kind not in ARRAYS:
        raise ValueError(f"an array has the unsupported dtype {dtype!r}")
    return np.frombuffer(rest.take(shape, kind.itemsize), kind).reshape(shape)


_LEAVES: dict[str, Callable[..., Any]] = {
    "tensor": _tensor,
    "array": _array,
    "int": lambda rest, text: int(str(text), 16),
    "complex": lambda rest, real, imaginary: complex(real, imaginary),
    "dtype": lambda rest, name: DTYPES[name],
    "device": lambda rest, name: torch.device(str(name)),
}
