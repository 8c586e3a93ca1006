"""Select exactly the k elements of largest magnitude (`top_k`), and write them back to an array of
zeros (`scatter`).

Among equal magnitudes, the lowest indices are selected. NaNs are equal to each other and larger
than infinity. A sample gives a threshold slightly below the k-th magnitude, one pass collects the
candidates above it, and histograms find the exact k-th magnitude.

Arrays are contiguous, with N < 2^32 elements. Does NOT choose k or start threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from roadtrain.errors import RuleError
from roadtrain.kernels.cast import kernel, typed

STRIP = 4096  # number of elements between two checks whether the output has space left
LOW = 16  # number of low bits of a 32-bit magnitude, which the second histogram resolves


def magnitude(x: Any) -> Any:
    """Return the bits of a float without the sign bit, which sort like magnitudes. All NaNs give
    the same bits. For use inside kernels only."""
    raise NotImplementedError


@overload(magnitude, inline="never")
def _magnitude(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: min(
            np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF)), np.uint32(0x7F800001)
        )
    if x == types.uint16:
        return lambda x: min(np.uint32(np.uint32(x) & np.uint32(0x7FFF)), np.uint32(0x7F81))
    return lambda x: min(np.uint32(np.uint32(np.uint16(x)) & np.uint32(0x7FFF)), np.uint32(0x7C01))


@kernel
def _sample(x: Any, keys: Any) -> Any:
    stride = x.size // keys.size
    hashed = np.uint32(1)
    # one element per stride, at a hashed position, so that periodic data does not bias the sample
    for i in range(keys.size):
        hashed = np.uint32(hashed * np.uint32(1664525) + np.uint32(1013904223))
        keys[i] = magnitude(x[i * stride + np.int64(hashed >> np.uint32(8)) % stride])


@kernel
def _collect(x: Any, threshold: Any, index: Any, value: Any) -> Any:
    """Collect the elements that reach the threshold, in order. Returns the number of collected
    elements, and the number of elements that did not fit into `index`."""
    kept = np.uint64(0)
    missed = 0
    for at in range(0, x.size, STRIP):
        strip = x[at : min(at + STRIP, x.size)]
        if kept + np.uint64(STRIP) <= np.uint64(index.size):
            # always store, advance only on a hit: no branch to mispredict
            for i in range(strip.size):
                index[kept] = np.uint32(at + i)
                value[kept] = strip[i]
                kept += np.uint64(magnitude(strip[i]) >= threshold)
        else:
            for i in range(strip.size):
                missed += magnitude(strip[i]) >= threshold
    return np.int64(kept), missed


@kernel
def _histogram(x: Any, shift: Any, only: Any, counts: Any) -> Any:
    """Count magnitudes in `counts` by all but their low `shift` bits. If `only` >= 0, count by the
    low `shift` bits instead, and skip magnitudes whose high bits differ from `only`."""
    for i in range(x.size):
        key = magnitude(x[i])
        if only < 0:
            counts[np.uint64(key >> np.uint32(shift))] += 1
        elif np.int64(key >> np.uint32(shift)) == only:
            counts[np.uint64(key & np.uint32((1 << shift) - 1))] += 1


@kernel
def _select(x: Any, candidates: Any, kth: Any, ties: Any, index: Any, value: Any) -> Any:
    """Write to `index` and `value` all elements above the k-th magnitude `kth`, and the first
    `ties` elements equal to it. `candidates` is None if x is the original array. If x holds only
    selected elements, `candidates` holds the index of each of them in the original array."""
    at = 0
    for i in range(x.size):
        key = magnitude(x[i])
        if key >= kth:
            if key == kth:
                if ties == 0:
                    continue
                ties -= 1
            index[at] = np.uint32(i) if candidates is None else candidates[i]
            value[at] = x[i]
            at += 1


@kernel
def _scatter(index: Any, value: Any, out: Any) -> Any:
    j = 0
    for at in range(0, out.size, STRIP):  # a strip stays in cache while it is zeroed and filled
        end = min(at + STRIP, out.size)
        out[at:end] = 0
        while j < index.size and np.int64(index[j]) < end:
            out[np.uint64(index[j])] = value[j]
            j += 1


def top_k(x: np.ndarray, dtype: str, k: int, idx_out: np.ndarray, val_out: np.ndarray) -> None:
    """Find the k elements of x [N] with the largest magnitudes. Writes their ascending indices to
    idx_out, uint32 [k], and their values to val_out, [k] in the dtype of x."""
    if not 0 <= k <= x.size or idx_out.size != k or val_out.size != k or idx_out.dtype != np.uint32:
        raise RuleError(
            f"cannot write the top {k} of {x.size} elements to {idx_out.size} indices of"
            f" {idx_out.dtype} and {val_out.size} values"
        )
    if k == 0:
        return
    flat = typed(x, dtype)
    index, among = _candidates(flat, k) or (None, flat)
    shift = LOW if dtype == "fp32" else 0
    kth, above = _bin(among, k, shift, -1)
    if shift:
        low, more = _bin(among, k - above, shift, kth)
        kth, above = kth << shift | low, above + more
    _select(among, index, np.uint32(kth), k - above, idx_out, typed(val_out, dtype))


def _candidates(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the indices and values of somewhat more than k elements, which include the k largest.
    Returns None if a sample gives no good threshold."""
    size = min(max(x.size // 64, 4096), 1 << 16)
    rank = int(k / x.size * size + 4 * (k / x.size * size) ** 0.5 + 4)
    if x.size < 4 * size or rank > size // 4:
        return None
    keys = np.empty(size, np.uint32)
    _sample(x, keys)
    threshold = np.partition(keys, size - rank)[size - rank]
    room = int(1.5 * rank / size * x.size) + 2 * STRIP
    while True:
        index, value = np.empty(room, np.uint32), np.empty(room, x.dtype)
        kept, missed = _collect(x, threshold, index, value)
        if kept + missed < k or kept + missed > x.size // 2:
            return None
        if not missed:
            return index[:kept], value[:kept]
        # there are more elements than the sample predicted; their exact number is known now
        room = kept + missed + STRIP


def _bin(x: np.ndarray, k: int, shift: int, only: int) -> tuple[int, int]:
    """Return the histogram's bin of the k-th largest magnitude, and the number of elements in
    higher bins (see `_histogram`)."""
    counts = np.zeros(1 << 16 if only >= 0 else 1 << 15, np.int64)
    _histogram(x, shift, only, counts)
    from_top = np.cumsum(counts[::-1])
    i = int(np.searchsorted(from_top, k))
    return counts.size - 1 - i, int(from_top[i - 1]) if i else 0


def scatter(idx: np.ndarray, val: np.ndarray, out: np.ndarray) -> None:
    """Set all of `out` to 0, then out[idx] to val. idx: uint32 [k], ascending. val and out have the
    same dtype."""
    if idx.size != val.size or val.dtype != out.dtype:
        raise RuleError(
            f"{val.size} {val.dtype} values do not fit {idx.size} indices of a {out.dtype} array"
        )
    if idx.size and int(idx[-1]) >= out.size:
        raise RuleError(f"index {int(idx[-1])} is outside {out.size} elements")
    _scatter(idx, val, out)


@kernel
def drop_not_finite(residual: Any) -> Any:
    """Set elements that are not finite to 0."""
    for i in range(residual.size):
        if not np.isfinite(residual[i]):
            residual[i] = np.float32(0)
