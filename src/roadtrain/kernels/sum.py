"""Sums: one gradient into an fp32 accumulator, k arriving buffers in one pass, the sum of squares for a norm.

Element-wise sums add in the order of their arguments, in float32. `sum_squares` adds in float64 into LANES interleaved
partial sums (element i goes to lane i mod LANES) that are combined in one fixed order: the same bits wherever it runs.
The caller fixes the ranges (`Chunk.segments`) and adds their results in flat order, so threads do not matter (Rule 1).

Assumes contiguous arrays of one length. Does NOT thread or allocate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roadtrain.errors import RuleError
from roadtrain.kernels.cast import kernel, put, typed, widen

LANES = 128
TILE = 4096  # elements of fp32 scratch that stay in the first cache while k buffers pass


@kernel
def _accumulate(acc, grad):
    for i in range(acc.size):
        acc[i] = acc[i] + widen(grad[i])


def accumulate(acc: np.ndarray, grad: np.ndarray, grad_dtype: str) -> None:
    """acc += grad. acc: float32 [N]; grad: [N] of `grad_dtype`."""
    _accumulate(acc, typed(grad, grad_dtype))


@kernel
def _sum_squares(grad, scale, lanes):
    whole = grad.size - grad.size % LANES
    for at in range(0, whole, LANES):
        part = grad[at : at + LANES]
        for lane in range(LANES):
            x = np.float64(widen(part[lane]) * scale)
            lanes[lane] += x * x
    for i in range(whole, grad.size):
        x = np.float64(widen(grad[i]) * scale)
        lanes[i - whole] += x * x


def _combined(lanes: np.ndarray) -> float:
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def sum_squares(grad: np.ndarray, grad_dtype: str, scale: float = 1.0) -> float:
    """Sum of (float32(grad) * scale)^2 in float64; inf or NaN when an element is."""
    lanes = np.zeros(LANES)
    _sum_squares(typed(grad, grad_dtype), np.float32(scale), lanes)
    return _combined(lanes)


@kernel
def _tile_set(scratch, part):
    for i in range(part.size):
        scratch[i] = widen(part[i])


@kernel
def _tile_add(scratch, part):
    for i in range(part.size):
        scratch[i] = scratch[i] + widen(part[i])


@kernel
def _tile_put(out, scratch):
    for i in range(out.size):
        put(out, i, scratch[i])


@kernel
def _sum_one(out, buffers, scratch):  # buffers: a tuple of arrays of one type
    for at in range(0, out.size, TILE):
        end = min(at + TILE, out.size)
        _tile_set(scratch, buffers[0][at:end])
        for k in range(1, len(buffers)):
            _tile_add(scratch, buffers[k][at:end])
        _tile_put(out[at:end], scratch)


def sum_k(out: np.ndarray, out_dtype: str, buffers: Sequence[np.ndarray], dtypes: Sequence[str]) -> None:
    """out = buffers[0] + buffers[1] + ..., left to right in float32, rounded once into `out_dtype`. All [N]. One pass
    over memory where the buffers have one dtype; mixed ones go tile by tile from here. `out` may be buffers[0]."""
    if not buffers or len(buffers) != len(dtypes) or any(b.size != out.size for b in buffers):
        raise RuleError(f"sum of {[b.size for b in buffers]} elements, {len(dtypes)} dtypes, into {out.size}")
    held = tuple(typed(b, d) for b, d in zip(buffers, dtypes))
    result, scratch = typed(out, out_dtype), np.empty(min(TILE, max(out.size, 1)), np.float32)
    if len(set(dtypes)) == 1:
        _sum_one(result, held, scratch)
        return
    for at in range(0, out.size, TILE):
        _tile_set(scratch, held[0][at : at + TILE])
        for b in held[1:]:
            _tile_add(scratch, b[at : at + TILE])
        _tile_put(result[at : at + TILE], scratch)
