"""Top-k by magnitude: exact count, deterministic, indices ascending; scatter back; selection with error feedback.

The bits of a float without its sign order as its magnitude does, so all is done on integers. A sample guesses a
threshold somewhat below the k-th magnitude; one pass keeps what reaches it (a few per cent more than k, "candidates");
the exact k-th magnitude is then found by two histograms over the candidates alone. Where the guess is bad (many ties,
k near N) the same histograms run over the whole array: never wrong, only slower.

Ties: lowest index first. NaNs are equal to each other and larger than infinity. The result depends neither on ranges
nor on threads: `pool`, where given, runs pieces of RANGE elements.

Assumes contiguous arrays of N < 2^32 elements. Does NOT choose k or average over workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from roadtrain.errors import RuleError
from roadtrain.kernels.cast import kernel, typed
from roadtrain.kernels.sum import accumulate

RANGE = 1 << 22  # elements a task
STRIP = 4096  # elements between two looks at the space left
LOW = 16  # bits of a 32-bit magnitude that the second histogram tells apart


def magnitude(x):
    """The bits of a typed element without its sign, all NaNs made equal (inside kernels only)."""
    raise NotImplementedError


@overload(magnitude, inline="never")
def _magnitude(x):
    if x == types.float32:
        return lambda x: min(np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF)), np.uint32(0x7F800001))
    if x == types.uint16:
        return lambda x: min(np.uint32(np.uint32(x) & np.uint32(0x7FFF)), np.uint32(0x7F81))
    return lambda x: min(np.uint32(np.uint32(np.uint16(x)) & np.uint32(0x7FFF)), np.uint32(0x7C01))


@kernel
def _sample(x, keys):
    stride = x.size // keys.size
    hashed = np.uint32(1)
    for i in range(keys.size):  # one element of each stretch, at a hashed place: no pattern in x can hide
        hashed = np.uint32(hashed * np.uint32(1664525) + np.uint32(1013904223))
        keys[i] = magnitude(x[i * stride + np.int64(hashed >> np.uint32(8)) % stride])


@kernel
def _collect(x, base, threshold, index, value):
    """Keep what reaches the threshold, in order. Returns how many do, also when fewer fit."""
    kept = np.uint64(0)
    missed = 0
    for at in range(0, x.size, STRIP):
        strip = x[at : min(at + STRIP, x.size)]
        if kept + np.uint64(STRIP) <= np.uint64(index.size):
            for i in range(strip.size):  # stores always, advances sometimes: no branch to mispredict
                index[kept] = np.uint32(base + at + i)
                value[kept] = strip[i]
                kept += np.uint64(magnitude(strip[i]) >= threshold)
        else:
            for i in range(strip.size):
                missed += magnitude(strip[i]) >= threshold
    return np.int64(kept), missed


@kernel
def _histogram(x, shift, only, counts):
    """Count magnitudes >> shift; with `only` >= 0 the low bits of those whose high bits are `only`."""
    for i in range(x.size):
        key = magnitude(x[i])
        if only < 0:
            counts[np.uint64(key >> np.uint32(shift))] += 1
        elif np.int64(key >> np.uint32(shift)) == only:
            counts[np.uint64(key & np.uint32((1 << shift) - 1))] += 1


@kernel
def _count(x, kth):
    above, equal = 0, 0
    for i in range(x.size):
        key = magnitude(x[i])
        above += key > kth
        equal += key == kth
    return above, equal


@kernel
def _select(x, base, candidates, kth, ties, index, value):
    """Write all above the k-th magnitude and the first `ties` equal to it. candidates: indices of x, or None."""
    at = 0
    for i in range(x.size):
        key = magnitude(x[i])
        if key >= kth:
            if key == kth:
                if ties == 0:
                    continue
                ties -= 1
            index[at] = np.uint32(base + i) if candidates is None else candidates[i]
            value[at] = x[i]
            at += 1


@kernel
def _scatter(index, value, out, base):
    j = 0
    for at in range(0, out.size, STRIP):  # zeroed and filled while in cache
        end = min(at + STRIP, out.size)
        out[at:end] = 0
        while j < index.size and np.int64(index[j]) - base < end:
            out[np.uint64(np.int64(index[j]) - base)] = value[j]
            j += 1


@dataclass(frozen=True)
class _Piece:
    """Elements [base, base + len(x)) of the whole, or candidates out of them."""

    x: np.ndarray
    base: int
    index: np.ndarray | None


def _each(pool: Executor | None, function: Callable, *columns: Iterable[Any]) -> list[Any]:
    return list((pool.map if pool is not None else map)(function, *columns))


def top_k(
    x: np.ndarray, dtype: str, k: int, idx_out: np.ndarray, val_out: np.ndarray, pool: Executor | None = None
) -> None:
    """The k largest magnitudes of x [N]. idx_out: uint32 [k], ascending; val_out: [k] in the dtype of x."""
    if not 0 <= k <= x.size or idx_out.size != k or val_out.size != k or idx_out.dtype != np.uint32:
        raise RuleError(f"top {k} of {x.size} elements into {idx_out.size} {idx_out.dtype} and {val_out.size} values")
    if k == 0:
        return
    flat, values = typed(x, dtype), typed(val_out, dtype)
    raw = [_Piece(flat[at : at + RANGE], at, None) for at in range(0, x.size, RANGE)]
    pieces = _candidates(flat, k, raw, pool) or raw
    shift = LOW if dtype == "fp32" else 0
    kth, above = _bin(pieces, k, shift, -1, pool)
    if shift:
        low, more = _bin(pieces, k - above, shift, kth, pool)
        kth, above = kth << shift | low, above + more
    counts = _each(pool, lambda p: _count(p.x, np.uint32(kth)), pieces)
    ties, at, tasks = k - above, 0, []
    for piece, (larger, equal) in zip(pieces, counts):
        taken = min(ties, equal)
        tasks.append((piece, taken, slice(at, at + larger + taken)))
        at, ties = at + larger + taken, ties - taken

    def select(task: tuple[_Piece, int, slice]) -> None:
        piece, taken, part = task
        _select(piece.x, piece.base, piece.index, np.uint32(kth), taken, idx_out[part], values[part])

    _each(pool, select, tasks)


def _candidates(x: np.ndarray, k: int, raw: list[_Piece], pool: Executor | None) -> list[_Piece] | None:
    """Pieces that hold all of the top k and not much else; None where a sample cannot tell."""
    size = min(max(x.size // 64, 4096), 1 << 16)
    rank = int(k / x.size * size + 4 * (k / x.size * size) ** 0.5 + 4)
    if x.size < 4 * size or rank > size // 4:
        return None
    keys = np.empty(size, np.uint32)
    _sample(x, keys)
    threshold = np.partition(keys, size - rank)[size - rank]
    room = int(1.5 * rank / size * min(RANGE, x.size)) + 2 * STRIP

    def collect(piece: _Piece) -> tuple[_Piece, int]:
        space = min(room, piece.x.size + STRIP)
        while True:
            index, value = np.empty(space, np.uint32), np.empty(space, x.dtype)
            kept, missed = _collect(piece.x, piece.base, threshold, index, value)
            if missed and kept + missed <= piece.x.size // 2:  # dense here: now it is known how much room it takes
                space = kept + missed + STRIP
                continue
            return _Piece(value[:kept], piece.base, index[:kept]), missed

    found = _each(pool, collect, raw)
    enough = sum(piece.x.size for piece, _ in found) >= k and not any(missed for _, missed in found)
    return [piece for piece, _ in found] if enough else None


def _bin(pieces: list[_Piece], k: int, shift: int, only: int, pool: Executor | None) -> tuple[int, int]:
    """The bin with the k-th largest, and how many are in the bins above it."""

    def histogram(piece: _Piece) -> np.ndarray:
        counts = np.zeros(1 << 16 if only >= 0 else 1 << 15, np.int64)
        _histogram(piece.x, shift, only, counts)
        return counts

    counts = sum(_each(pool, histogram, pieces))
    from_top = np.cumsum(counts[::-1])
    i = int(np.searchsorted(from_top, k))
    return counts.size - 1 - i, int(from_top[i - 1]) if i else 0


def scatter(idx: np.ndarray, val: np.ndarray, out: np.ndarray, pool: Executor | None = None) -> None:
    """out = 0, then out[idx] = val. idx: uint32 [k], ascending; val, out: one type."""
    if idx.size != val.size or val.dtype != out.dtype:
        raise RuleError(f"scatter of {val.size} {val.dtype} at {idx.size} indices into {out.dtype}")
    if idx.size and int(idx[-1]) >= out.size:
        raise RuleError(f"index {int(idx[-1])} is outside {out.size} elements")
    starts = list(range(0, max(out.size, 1), RANGE))
    cuts = [*np.searchsorted(idx, np.array(starts, np.uint32)).tolist(), idx.size]

    def fill(i: int) -> None:
        part = slice(cuts[i], cuts[i + 1])
        _scatter(idx[part], val[part], out[starts[i] : starts[i] + RANGE], starts[i])

    _each(pool, fill, range(len(starts)))


def select_with_residual(
    grad: np.ndarray, dtype: str, residual: np.ndarray, k: int, idx: np.ndarray, val: np.ndarray,
    pool: Executor | None = None,
) -> None:
    """Error feedback (Karimireddy et al. 2019): residual += grad; the top k of it go out in val (float32) and leave
    the residual, the rest stays for the next step. residual: float32 [N] in place."""
    accumulate(residual, grad, dtype)
    top_k(residual, "fp32", k, idx, val, pool)
    residual[idx] = 0
