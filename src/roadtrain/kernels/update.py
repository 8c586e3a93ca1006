"""One pass of an optimizer over flat arrays: gradient in (fp32, bf16, fp16), state in place, optional 16-bit copy out.

Beside each kernel stands its plain reference: the same operations in the same order on whole numpy arrays. The order is
that of torch's single-tensor paths. An argument that is None removes its part at compile time, so no loop branches.
Element i depends on elements i only: the result depends neither on how a range is cut nor on threads.

Names: x parameter, g gradient x scale, `coupled` weight decay added to the gradient, `decay` = 1 - lr x decoupled
weight decay, `keep`/`intake` = beta / 1 - beta, `step_size` is negative. `rest` is None while intake < 0.5 (see `mix`).
Scalars are float32, computed in float64 by the caller. Note one-divide: 1 / sqrt(bias correction 2) is multiplied;
torch divides: the divider bounds AdamW on an AVX2 core, and the difference stays below 2 ulp of the update.

Assumes: contiguous arrays of one length that do not overlap. Does NOT count steps, choose hyperparameters or thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from roadtrain.kernels.cast import fence, kernel, put, reference_narrow, reference_widen, typed, uncached, widen


@kernel
def sgd(p, grad, buf, copy, scale, coupled, keep, intake, lookahead, step_size):
    for i in range(p.size):
        x = p[i]
        g = widen(grad[i]) * scale
        if coupled is not None:
            g = g + coupled * x
        if buf is not None:
            if keep is None:  # the first step: the buffer starts as the gradient
                b = g
            else:
                b = buf[i] * keep + intake * g
            buf[i] = b
            if lookahead is not None:
                g = g + lookahead * b
            else:
                g = b
        x = x + step_size * g
        p[i] = x
        if copy is not None:
            put(copy, i, x)


def reference_sgd(p, g, buf, coupled, keep, intake, lookahead, step_size):
    if coupled is not None:
        g = g + coupled * p
    if buf is not None:
        buf[:] = g if keep is None else buf * keep + intake * g
        g = buf if lookahead is None else g + lookahead * buf
    p[:] = p + step_size * g


@kernel
def adam(p, grad, m, v, top, copy, scale, decay, coupled, intake, rest, keep2, intake2, root, step_size, eps):
    for i in range(p.size):
        x = p[i]
        g = widen(grad[i]) * scale
        if decay is not None:
            x = x * decay
        if coupled is not None:
            g = g + coupled * x
        if rest is None:
            a = m[i] + intake * (g - m[i])
        else:
            a = g - (g - m[i]) * rest
        m[i] = a
        b = v[i] * keep2 + (intake2 * g) * g
        v[i] = b
        if top is not None:
            t = top[i]
            b = t if t > b or t != t else b  # a NaN wins, as in torch.maximum
            top[i] = b
        x = x + (step_size * a) / (np.sqrt(b) * root + eps)
        p[i] = x
        if copy is not None:
            put(copy, i, x)


def reference_adam(p, g, m, v, top, decay, coupled, intake, rest, keep2, intake2, root, step_size, eps):
    x = p if decay is None else p * decay
    if coupled is not None:
        g = g + coupled * x
    m[:] = m + intake * (g - m) if rest is None else g - (g - m) * rest
    v[:] = v * keep2 + (intake2 * g) * g
    b = v
    if top is not None:
        top[:] = np.maximum(top, v)
        b = top
    p[:] = x + (step_size * m) / (np.sqrt(b) * root + eps)


@kernel
def adagrad(p, grad, total, copy, scale, coupled, step_size, eps):
    for i in range(p.size):
        x = p[i]
        g = widen(grad[i]) * scale
        if coupled is not None:
            g = g + coupled * x
        s = total[i] + g * g
        total[i] = s
        x = x + (step_size * g) / (np.sqrt(s) + eps)
        p[i] = x
        if copy is not None:
            put(copy, i, x)


def reference_adagrad(p, g, total, coupled, step_size, eps):
    if coupled is not None:
        g = g + coupled * p
    total[:] = total + g * g
    p[:] = p + (step_size * g) / (np.sqrt(total) + eps)


@kernel
def rmsprop(p, grad, v, mean, buf, copy, scale, coupled, keep, intake, rest, momentum, step_size, eps):
    for i in range(p.size):
        x = p[i]
        g = widen(grad[i]) * scale
        if coupled is not None:
            g = g + coupled * x
        b = v[i] * keep + (intake * g) * g
        v[i] = b
        if mean is not None:
            if rest is None:
                a = mean[i] + intake * (g - mean[i])
            else:
                a = g - (g - mean[i]) * rest
            mean[i] = a
            b = b - a * a
        d = np.sqrt(b) + eps
        if buf is not None:
            u = buf[i] * momentum + g / d
            buf[i] = u
            x = x + step_size * u
        else:
            x = x + (step_size * g) / d
        p[i] = x
        if copy is not None:
            put(copy, i, x)


def reference_rmsprop(p, g, v, mean, buf, coupled, keep, intake, rest, momentum, step_size, eps):
    if coupled is not None:
        g = g + coupled * p
    v[:] = v * keep + (intake * g) * g
    b = v
    if mean is not None:
        mean[:] = mean + intake * (g - mean) if rest is None else g - (g - mean) * rest
        b = v - mean * mean
    d = np.sqrt(b) + eps
    if buf is not None:
        buf[:] = buf * momentum + g / d
        p[:] = p + step_size * buf
    else:
        p[:] = p + (step_size * g) / d


@kernel
def lion(p, grad, m, copy, scale, decay, keep1, intake1, keep2, intake2, step_size):
    one = np.float32(1)
    for i in range(p.size):
        x = p[i]
        g = widen(grad[i]) * scale
        if decay is not None:
            x = x * decay
        u = m[i] * keep1 + intake1 * g
        m[i] = m[i] * keep2 + intake2 * g
        s = one if u > 0 else (-one if u < 0 else np.float32(0))  # NaN gives 0, as torch.sign
        x = x + step_size * s
        p[i] = x
        if copy is not None:
            put(copy, i, x)


def reference_lion(p, g, m, decay, keep1, intake1, keep2, intake2, step_size):
    x = p if decay is None else p * decay
    u = m * keep1 + intake1 * g
    m[:] = m * keep2 + intake2 * g
    p[:] = x + step_size * np.where(np.isnan(u), np.float32(0), np.sign(u))


def mix(intake: float) -> tuple[float, float | None]:
    """(intake, rest) of m += intake * (g - m). From 0.5 on torch's lerp comes from the other end: exact at intake 1."""
    return (intake, None) if intake < 0.5 else (intake, 1 - intake)


def run(
    kernel: Callable, p: np.ndarray, grad: np.ndarray, grad_dtype: str, arrays: Sequence[np.ndarray | None],
    copy: np.ndarray | None, copy_dtype: str | None, scale: float, *scalars: float | None,
) -> None:
    """Call one of the kernels above: scalars become float32, arrays get the types that name their formats."""
    out = None if copy is None else uncached(typed(copy, copy_dtype or "bf16"))
    narrow = [None if s is None else np.float32(s) for s in scalars]
    kernel(p, typed(grad, grad_dtype), *arrays, out, np.float32(scale), *narrow)
    if out is not None:
        fence()


def run_reference(
    plain: Callable, p: np.ndarray, grad: np.ndarray, grad_dtype: str, arrays: Sequence[np.ndarray | None],
    copy: np.ndarray | None, copy_dtype: str | None, scale: float, *scalars: float | None,
) -> None:
    """The same call for a reference."""
    narrow = [None if s is None else np.float32(s) for s in scalars]
    with np.errstate(all="ignore"):
        plain(p, reference_widen(grad, grad_dtype) * np.float32(scale), *arrays, *narrow)
    if copy is not None:
        copy[:] = reference_narrow(p, copy_dtype or "bf16")
