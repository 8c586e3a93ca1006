"""Plain references that the sums and the top-k kernels must equal bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roadtrain.kernels import sum as sums
from roadtrain.kernels.cast import reference_widen


def reference_accumulate(acc: np.ndarray, grad: np.ndarray, grad_dtype: str) -> None:
    acc[:] = acc + reference_widen(grad, grad_dtype)


def reference_sum_squares(grad: np.ndarray, grad_dtype: str) -> float:
    lanes = np.zeros(sums.LANES)
    with np.errstate(all="ignore"):
        wide = reference_widen(grad, grad_dtype).astype(np.float64)
        for at in range(0, wide.size, sums.LANES):
            part = wide[at : at + sums.LANES]
            lanes[: part.size] += part * part
        return sums.combined(lanes)


def reference_sum_k(total: np.ndarray, buffers: Sequence[np.ndarray], dtype: str) -> None:
    total[:] = reference_widen(buffers[0], dtype)
    for b in buffers[1:]:
        total[:] = total + reference_widen(b, dtype)


def reference_top_k(
    x: np.ndarray, dtype: str, k: int, idx_out: np.ndarray, val_out: np.ndarray
) -> None:
    sign, nan = {
        "fp32": (0x7FFFFFFF, 0x7F800001),
        "bf16": (0x7FFF, 0x7F81),
        "fp16": (0x7FFF, 0x7C01),
    }[dtype]
    bits = x.view(np.uint32) if dtype == "fp32" else x
    keys = np.minimum(bits.astype(np.int64) & sign, nan)
    idx_out[:] = np.sort(np.argsort(-keys, kind="stable")[:k])
    val_out[:] = x[idx_out]
