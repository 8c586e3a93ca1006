"""Top-k by magnitude: exact count, deterministic, indices ascending; scatter back.

The bits of a float without its sign order as its magnitude does, so all is done on integers. A
sample guesses a threshold somewhat below the k-th magnitude; one pass keeps what reaches it (a few
per cent more than k, "candidates"); the exact k-th magnitude is then found by two histograms over
the candidates alone. Where the guess is bad (many ties, k near N) the same histograms run over the
whole array: never wrong, only slower.

Ties: lowest index first. NaNs are equal to each other and larger than infinity.

Assumes contiguous arrays of N < 2^32 elements. Does NOT choose k, thread or average over workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from roadtrain.errors import RuleError
from roadtrain.kernels.cast import kernel, typed

STRIP = 4096  # elements between two looks at the space left
LOW = 16  # bits of a 32-bit magnitude that the second histogram tells apart


def magnitude(x: Any) -> Any:
    """The bits of a typed element without its sign, all NaNs made equal (inside kernels only)."""
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
    # one element of each stretch, at a hashed place: no pattern in x can hide
    for i in range(keys.size):
        hashed = np.uint32(hashed * np.uint32(1664525) + np.uint32(1013904223))
        keys[i] = magnitude(x[i * stride + np.int64(hashed >> np.uint32(8)) % stride])


@kernel
def _collect(x: Any, threshold: Any, index: Any, value: Any) -> Any:
    """Keep what reaches the threshold, in order. Returns how many are kept, and how many came
    when it was full."""
    kept = np.uint64(0)
    missed = 0
    for at in range(0, x.size, STRIP):
        strip = x[at : min(at + STRIP, x.size)]
        if kept + np.uint64(STRIP) <= np.uint64(index.size):
            # stores always, advances sometimes: no branch to mispredict
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
    """Count magnitudes >> shift; with `only` >= 0 the low bits of those whose high bits are
    `only`."""
    for i in range(x.size):
        key = magnitude(x[i])
        if only < 0:
            counts[np.uint64(key >> np.uint32(shift))] += 1
        elif np.int64(key >> np.uint32(shift)) == only:
            counts[np.uint64(key & np.uint32((1 << shift) - 1))] += 1


@kernel
def _select(x: Any, candidates: Any, kth: Any, ties: Any, index: Any, value: Any) -> Any:
    """Write all above the k-th magnitude and the first `ties` equal to it. candidates: indices
    of x, or None."""
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
    for at in range(0, out.size, STRIP):  # zeroed and filled while in cache
        end = min(at + STRIP, out.size)
        out[at:end] = 0
        while j < index.size and np.int64(index[j]) < end:
            out[np.uint64(index[j])] = value[j]
            j += 1


def top_k(x: np.ndarray, dtype: str, k: int, idx_out: np.ndarray, val_out: np.ndarray) -> None:
    """The k largest magnitudes of x [N]. idx_out: uint32 [k], ascending; val_out: [k] in the
    dtype of x."""
    if not 0 <= k <= x.size or idx_out.size != k or val_out.size != k or idx_out.dtype != np.uint32:
        raise RuleError(
            f"top {k} of {x.size} elements into {idx_out.size} {idx_out.dtype} and {val_out.size}"
            " values"
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
    """Indices and values that hold all of the top k and not much else; None where a sample
    cannot tell."""
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
        # more than the sample said: now it is known how much room it takes
        room = kept + missed + STRIP


def _bin(x: np.ndarray, k: int, shift: int, only: int) -> tuple[int, int]:
    """The bin with the k-th largest, and how many are in the bins above it."""
    counts = np.zeros(1 << 16 if only >= 0 else 1 << 15, np.int64)
    _histogram(x, shift, only, counts)
    from_top = np.cumsum(counts[::-1])
    i = int(np.searchsorted(from_top, k))
    return counts.size - 1 - i, int(from_top[i - 1]) if i else 0


def scatter(idx: np.ndarray, val: np.ndarray, out: np.ndarray) -> None:
    """out = 0, then out[idx] = val. idx: uint32 [k], ascending; val, out: one type."""
    if idx.size != val.size or val.dtype != out.dtype:
        raise RuleError(f"scatter of {val.size} {val.dtype} at {idx.size} indices into {out.dtype}")
    if idx.size and int(idx[-1]) >= out.size:
        raise RuleError(f"index {int(idx[-1])} is outside {out.size} elements")
    _scatter(idx, val, out)


@kernel
def drop_not_finite(residual: Any) -> Any:
    """0 where an element is not finite."""
    for i in range(residual.size):
        if not np.isfinite(residual[i]):
            residual[i] = np.float32(0)
