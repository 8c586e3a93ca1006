"""Sums of gradients in a fixed order, and sums of squares for gradient norms.

Only `sum_in_order` adds gradients of several workers. Element-wise sums are in float32. Sums of
squares are in float64, over fixed ranges that the caller passes (`Chunk.segments`). So neither the
machine nor the number of threads changes the bits of a sum (Rule 1).

Arrays are contiguous and of one length. Starts no threads and allocates no large arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from roadtrain.errors import RuleError
from roadtrain.kernels.cast import _cast, cast, kernel, typed, widen

LANES = 128
TILE = 4096  # elements of the sum that stay in L1 cache while k buffers are added


@kernel
def _accumulate(acc: Any, grad: Any) -> Any:
    for i in range(acc.size):
        acc[i] = acc[i] + widen(grad[i])


def accumulate(acc: np.ndarray, grad: np.ndarray, grad_dtype: str) -> None:
    """Add grad to acc in place. acc: float32 [N]; grad: [N] of `grad_dtype`."""
    _accumulate(acc, typed(grad, grad_dtype))


@kernel
def _sum_squares(grad: Any, lanes: Any) -> Any:
    whole = grad.size - grad.size % LANES
    for at in range(0, whole, LANES):
        part = grad[at : at + LANES]
        for lane in range(LANES):
            x = np.float64(widen(part[lane]))
            lanes[lane] += x * x
    for i in range(whole, grad.size):
        x = np.float64(widen(grad[i]))
        lanes[i - whole] += x * x


def combined(lanes: np.ndarray) -> float:
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def sum_squares(grad: np.ndarray, grad_dtype: str) -> float:
    """Return the sum of float32(grad)^2 in float64; inf or NaN if an element is inf or NaN."""
    lanes = np.zeros(LANES)
    _sum_squares(typed(grad, grad_dtype), lanes)
    return combined(lanes)


def sums_of_squares(
    grad: np.ndarray, dtype: str, segments: Sequence[tuple[int, int, int]]
) -> np.ndarray:
    """Return the sum of squares of each segment of a chunk's gradient `grad`, [N] of `dtype`.
    segments: (parameter, start, stop)."""
    return np.array([sum_squares(grad[start:stop], dtype) for _, start, stop in segments])


@kernel
def _sum_k(total: Any, buffers: Any) -> Any:  # buffers: a tuple of arrays of one type
    for at in range(0, total.size, TILE):
        tile = total[at : at + TILE]
        _cast(buffers[0][at : at + TILE], tile)
        for k in range(1, len(buffers)):
            _accumulate(tile, buffers[k][at : at + TILE])


def sum_k(total: np.ndarray, buffers: Sequence[np.ndarray], dtype: str) -> None:
    """Set total to buffers[0] + buffers[1] + ..., left to right. total: float32 [N]; buffers: [N]
    of `dtype`; `total` may be buffers[0]."""
    if not buffers or any(b.size != total.size for b in buffers):
        raise RuleError(f"cannot sum buffers of size {[b.size for b in buffers]} into {total.size}")
    _sum_k(total, tuple(typed(b, dtype) for b in buffers))


def sum_in_order(total: np.ndarray, gradients: Iterable[tuple[np.ndarray, str]]) -> None:
    """Set `total`, float32 [N], to the sum of `gradients`. The gradients are added in the order of
    the iterable, so callers pass them in the order of the workers or of the hosts.

    gradients: pairs of an array [N] and its dtype. An iterator may reuse one buffer for all
    gradients. The first gradient may be `total` itself. Without gradients, `total` becomes 0.
    """
    if isinstance(gradients, list) and len({dtype for _, dtype in gradients}) == 1:
        sum_k(total, [grad for grad, _ in gradients], gradients[0][1])
        return
    begun = False
    for grad, dtype in gradients:
        if begun:
            accumulate(total, grad, dtype)
        elif grad is not total:
            cast(grad, dtype, total, "fp32")
        begun = True
    if not begun:
        total[:] = 0
