"""The AdamW, Adam and SGD updates in Triton, for CUDA tensors, in one pass.

An update gives the same bits as the CPU kernel: it does the operations of `update.py` in the same
order, with IEEE division and square root and without contraction.

Tensors must be contiguous, flat and on one device. Tested with triton's interpreter. Does NOT
choose between CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from roadtrain.errors import RuleError
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.rules import AdamRule, SgdRule

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE = 1024  # elements per program


def _jit(function: Any) -> Any:
    return triton.jit(function) if triton is not None else function


@_jit
# bf16 is rounded to nearest even by hand, because the interpreter truncates
def _rounded(x, kind: tl.constexpr):
    if kind == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(kind)


@_jit
def _sgd(
    n, p, grad, buf, copy, scale, coupled, keep, intake, lookahead, step_size, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    x = tl.load(p + at, mask=here)
    g = tl.load(grad + at, mask=here).to(tl.float32) * scale
    if coupled is not None:
        g = g + coupled * x
    if buf is not None:
        if keep is None:
            b = g
        else:
            b = tl.load(buf + at, mask=here) * keep + intake * g
        tl.store(buf + at, b, mask=here)
        if lookahead is not None:
            g = g + lookahead * b
        else:
            g = b
    x = x + step_size * g
    tl.store(p + at, x, mask=here)
    if copy is not None:
        tl.store(copy + at, _rounded(x, copy.dtype.element_ty), mask=here)


@_jit
def _adam(
    n,
    p,
    grad,
    m,
    v,
    top,
    copy,
    scale,
    decay,
    coupled,
    intake,
    rest,
    keep2,
    intake2,
    root,
    step_size,
    eps,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    x = tl.load(p + at, mask=here)
    g = tl.load(grad + at, mask=here).to(tl.float32) * scale
    if decay is not None:
        x = x * decay
    if coupled is not None:
        g = g + coupled * x
    a = tl.load(m + at, mask=here)
    if rest is None:
        a = a + intake * (g - a)
    else:
        a = g - (g - a) * rest
    tl.store(m + at, a, mask=here)
    b = tl.load(v + at, mask=here) * keep2 + (intake2 * g) * g
    tl.store(v + at, b, mask=here)
    if top is not None:
        t = tl.load(top + at, mask=here)
        b = tl.where((t > b) | (t != t), t, b)
        tl.store(top + at, b, mask=here)
    x = x + tl.div_rn(step_size * a, tl.sqrt_rn(b) * root + eps)
    tl.store(p + at, x, mask=here)
    if copy is not None:
        tl.store(copy + at, _rounded(x, copy.dtype.element_ty), mask=here)


def available() -> bool:
    """Return whether triton is installed."""
    return triton is not None


def apply(
    rule: Rule,
    p: torch.Tensor,
    grad: torch.Tensor,
    arrays: Sequence[torch.Tensor],
    row: np.ndarray,
    hyper: Sequence[float],
    grad_scale: float = 1.0,
    copy: torch.Tensor | None = None,
) -> None:
    """Run `rule.apply` on tensors, updating p, arrays and row in place.

    p, arrays: fp32 [N]. grad: fp32, bf16 or fp16 [N]. row: float64 numpy array. copy: bf16 or fp16
    [N]. Raises RuleError if the rule has no GPU kernel, or if triton is not installed.
    """
    if not isinstance(rule, (AdamRule, SgdRule)):
        raise RuleError(
            f"{rule.name} has no GPU kernel", hint="use AdamW, Adam or SGD, or update on the CPU"
        )
    if triton is None:
        raise RuleError(
            "updates on a GPU need triton, which is not installed", hint="pip install triton"
        )
    held, sign, scalars = rule.scaled(arrays, row, hyper)  # type: ignore[arg-type]
    narrow = [None if s is None else float(np.float32(s)) for s in scalars]
    scale, n = float(np.float32(sign * grad_scale)), p.numel()
    kernel = (_adam if isinstance(rule, AdamRule) else _sgd)[max(1, -(-n // TILE)),]
    # triton launches a kernel on the current device, even if its arguments are on another device
    with torch.cuda.device_of(p):
        kernel(n, p, grad, *held, copy, scale, *narrow, BLOCK=TILE, enable_fp_fusion=False)
