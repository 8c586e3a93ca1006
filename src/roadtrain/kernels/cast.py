"""Conversions between fp32 and the two 16-bit formats, for arrays and inside other kernels.

Arrays are flat and contiguous. Callers pass 16-bit values as uint16. Inside kernels, the type of an
array encodes its format: float32 is fp32, uint16 is bf16, and int16 is fp16 (`typed`). Rounding is
to nearest even, overflow gives infinity, subnormals are exact, and a NaN stays a NaN without its
payload.

The machine must be little-endian. Starts no threads and does not hold the GIL. After a change of
`widen` or `put`, remove `__pycache__`. Otherwise numba continues to use cached kernels of other
files, which contain the old code of `widen` or `put`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import event
from numba.extending import intrinsic, overload

from roadtrain.chunks import ITEMSIZE, SEGMENT
from roadtrain.errors import RuleError

NUMPY_OF = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.uint16}


class _SayCompiling(event.Listener):
    """Prints a line when the first kernel of this process is not in numba's cache."""

    is_silent = False

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if not self.is_silent and function.__module__.startswith("roadtrain"):
            self.is_silent = True
            print(
                "roadtrain: compiling kernels for this processor; later starts load them from a"
                " cache",
                file=sys.stderr,
            )

    def on_end(self, event: Any) -> None: ...


event.register("numba:compile", _SayCompiling())  # type: ignore[no-untyped-call]


def kernel(function: Any) -> Any:
    """Compile a function for the CPU, without the GIL, with IEEE arithmetic (no fast math, no
    contraction, x/0 = inf). The compiled code is cached on disk."""
    return njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)


def typed(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return the array as a view in the numpy type that stands for the format `dtype` in kernels
    (see the top of this file)."""
    if dtype not in NUMPY_OF or array.dtype != NUMPY_OF[dtype]:
        raise RuleError(
            f"an array of {array.dtype} cannot hold {dtype}",
            hint="pass float32 for fp32, uint16 for bf16 and fp16",
        )
    return array.view(np.int16) if dtype == "fp16" else array


def uncached(array: np.ndarray) -> np.ndarray:
    """Return a 16-bit array [N] as a view [N, 1], for which `put` uses stores that bypass the
    cache. Returns the array unchanged if its alignment forbids this. Call `fence` after writing the
    whole array."""
    return array.reshape(-1, 1) if array.ctypes.data % 32 == 0 and array.itemsize == 2 else array


@intrinsic
def _store_uncached(typing: Any, out: Any, i: Any, x: Any) -> Any:
    """Emit a 16-bit store that bypasses the cache. The array must be aligned to 32 bytes, as
    `uncached` checks."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        store = builder.store(args[2], builder.gep(array.data, [args[1]]), align=32)
        mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(out, types.intp, out.dtype), generate


@intrinsic
def _fence(typing: Any) -> Any:
    return types.void(), lambda context, builder, signature, args: builder.fence("seq_cst")


@kernel
def fence() -> Any:
    """Make this thread's stores that bypass the cache visible to other threads."""
    _fence()  # type: ignore[call-arg]


@kernel
def _f32(bits: Any) -> Any:  # uint32 -> the float32 with the same bits
    return np.uint32(bits).view(np.float32)


@kernel
def _bits(x: Any) -> Any:  # float32 -> its bits
    return np.float32(x).view(np.uint32)


@kernel
def _from_bf16(h: Any) -> Any:
    return _f32(np.uint32(np.uint32(h) << np.uint32(16)))


@kernel
def _to_bf16(x: Any) -> Any:
    u = _bits(x)
    odd = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(u + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))
    return np.uint16(rounded if x == x else np.uint32(0x7FC0))


@kernel
def _from_fp16(h: Any) -> Any:
    u = np.uint32(np.uint16(h))
    sign = np.uint32(np.uint32(u & np.uint32(0x8000)) << np.uint32(16))
    body = np.uint32(np.uint32(u & np.uint32(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(body & np.uint32(0x0F800000))
    normal = np.uint32(body + np.uint32(112 << 23))
    special = np.uint32(body + np.uint32(224 << 23))  # infinity and NaN
    # subnormal, exact
    small = _bits(_f32(np.uint32(body + np.uint32(113 << 23))) - _f32(np.uint32(113 << 23)))
    finite = small if exponent == np.uint32(0) else normal
    magnitude = special if exponent == np.uint32(0x0F800000) else finite
    return _f32(np.uint32(magnitude | sign))


@kernel
def _to_fp16(x: Any) -> Any:
    bits = _bits(x)
    sign = np.uint32(np.uint32(bits & np.uint32(0x80000000)) >> np.uint32(16))
    u = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(u >> np.uint32(13)) & np.uint32(1))
    # round to nearest even
    normal = np.uint32(np.uint32(u + np.uint32(np.uint32(0xC8000FFF) + odd)) >> np.uint32(13))
    # subnormal: the floating-point addition does the rounding
    small = np.uint32(_bits(_f32(u) + _f32(np.uint32(126 << 23))) - np.uint32(126 << 23))
    special = np.uint32(0x7E00) if u > np.uint32(0x7F800000) else np.uint32(0x7C00)
    finite = small if u < np.uint32(113 << 23) else normal
    magnitude = special if u >= np.uint32(143 << 23) else finite
    return np.uint16(np.uint32(magnitude | sign))


def widen(x: Any) -> Any:
    """Convert an element of an array (see `typed`) to float32. For use inside kernels only."""
    raise NotImplementedError


@kernel
def _same(x: Any) -> Any:
    return x


@overload(widen, inline="never")
def _widen(x):  # type: ignore[no-untyped-def]
    wide = {types.float32: _same, types.uint16: _from_bf16, types.int16: _from_fp16}[x]
    return lambda x: wide(x)


def put(out: Any, i: Any, x: Any) -> Any:
    """Store float32 x in out[i], rounded to the format of `out` (see `typed`). For use inside
    kernels only."""
    raise NotImplementedError


@overload(put, inline="never")
def _put(out, i, x):  # type: ignore[no-untyped-def]
    narrow = {types.float32: _same, types.uint16: _to_bf16, types.int16: _to_fp16}[out.dtype]
    if out.ndim == 2:
        return lambda out, i, x: _store_uncached(out, i, narrow(x))  # type: ignore[call-arg]

    def store(out, i, x):  # type: ignore[no-untyped-def]
        out[i] = narrow(x)

    return store


@kernel
def _cast(src: Any, dst: Any) -> Any:
    for i in range(src.size):
        put(dst, i, widen(src[i]))


def cast(src: np.ndarray, src_dtype: str, dst: np.ndarray, dst_dtype: str) -> None:
    """Convert the elements of src [N] and write them to dst [N]. Raises RuleError if an array does
    not match its dtype name, or if the lengths differ."""
    if src.size != dst.size:
        raise RuleError(f"cannot cast {src.size} elements into {dst.size} elements")
    _cast(typed(src, src_dtype), typed(dst, dst_dtype))


def cast_in_place(view: memoryview, numel: int, old: str, new: str) -> np.ndarray:
    """Convert the first `numel` values of `view` from dtype `old` to `new` in place, and return
    them as an array. `view` must have room for the values in both dtypes."""
    src = np.frombuffer(view, NUMPY_OF[old], numel)
    dst = np.frombuffer(view, NUMPY_OF[new], numel)
    pieces = range(0, numel, SEGMENT)
    for at in pieces if ITEMSIZE[new] <= ITEMSIZE[old] else reversed(pieces):
        cast(src[at : at + SEGMENT].copy(), old, dst[at : at + SEGMENT], new)
    return dst


def reference_widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """Convert [N] of `dtype` to a new float32 [N] with numpy only."""
    if dtype == "fp32":
        return array.astype(np.float32)
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    wide = array.view(np.float16).astype(np.float32)
    bits = array.astype(np.uint32)
    quiet = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return np.where(np.isnan(wide), quiet.view(np.float32), wide)


def reference_downcast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Convert float32 [N] to a new array of `dtype` with numpy only."""
    if dtype == "fp32":
        return x.copy()
    bits = x.view(np.uint32)
    if dtype == "bf16":
        rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        half = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), (bits >> 16) & 0x8000 | 0x7E00, half).astype(np.uint16)
