"""Optimizer formulas over flat arrays. A formula reads gradients (fp32, bf16 or fp16), updates
parameters and state in place, and optionally writes a 16-bit copy of the parameters.

The kernel is the formula compiled into a loop over elements; the reference runs the same formula on
whole numpy arrays. Operations are ordered as in torch's single-tensor implementations. New values
of element i depend on element i only, so neither cuts nor threads affect results.

Arguments: x is the parameter, and g the gradient multiplied by its scale. `coupled` is weight decay
that is added to the gradient, and `decay` is 1 - lr x decoupled weight decay. `keep` is a beta, and
`intake` is 1 - beta. `rest` is 1 - `intake`, or None if `intake` < 0.5 (see `mix`). `step_size` is
negative. Scalars are float32, computed by the caller in float64.

Note "one divide". The kernel multiplies by 1 / sqrt(bias correction 2), while torch divides by
sqrt(bias correction 2), because division limits the speed of AdamW on an AVX2 core. The results
differ by less than 2 ulp of the update.

Arrays are contiguous, of one length, and do not overlap. Does NOT count steps or start threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from roadtrain.kernels.cast import kernel, put, widen

# Arguments of a formula are elements in a kernel and whole arrays in the reference.


@register_jitable
def _moved(average: Any, x: Any, intake: Any, rest: Any) -> Any:
    """Return average + intake * (x - average). If `rest` is given, it must be 1 - intake, and the
    equal value x - (x - average) * rest is computed instead."""
    if rest is None:
        return average + intake * (x - average)
    return x - (x - average) * rest


def mix(intake: float) -> tuple[float, float | None]:
    """Return the arguments (intake, rest) of `_moved`, which follows torch's lerp: if `intake` is
    0.5 or more, x is corrected instead of the average. An intake of 1 then gives exactly x."""
    return (intake, None) if intake < 0.5 else (intake, 1 - intake)


@register_jitable
def sgd(x, g, buf, _b, _c, coupled, keep, intake, lookahead, step_size):  # type: ignore[no-untyped-def]
    if coupled is not None:
        g = g + coupled * x
    b = g  # the first step: the buffer starts as the gradient
    if buf is not None:
        if keep is not None:
            b = buf * keep + intake * g
        g = b if lookahead is None else g + lookahead * b
    return x + step_size * g, b


@register_jitable
def adam(x, g, m, v, top, decay, coupled, intake, rest, keep2, intake2, root, step_size, eps):  # type: ignore[no-untyped-def]
    if decay is not None:
        x = x * decay
    if coupled is not None:
        g = g + coupled * x
    a = _moved(m, g, intake, rest)
    b = v * keep2 + (intake2 * g) * g
    t = b
    if top is not None:
        t = np.maximum(top, b)
    return x + (step_size * a) / (np.sqrt(t) * root + eps), a, b, t


@register_jitable
def adagrad(x, g, total, _b, _c, coupled, step_size, eps):  # type: ignore[no-untyped-def]
    if coupled is not None:
        g = g + coupled * x
    s = total + g * g
    return x + (step_size * g) / (np.sqrt(s) + eps), s


@register_jitable
def rmsprop(x, g, v, mean, buf, coupled, keep, intake, rest, momentum, step_size, eps):  # type: ignore[no-untyped-def]
    if coupled is not None:
        g = g + coupled * x
    b = v * keep + (intake * g) * g
    spread, a, u = b, g, g
    if mean is not None:
        a = _moved(mean, g, intake, rest)
        spread = b - a * a
    d = np.sqrt(spread) + eps
    if buf is None:
        x = x + (step_size * g) / d
    else:
        u = buf * momentum + g / d
        x = x + step_size * u
    return x, b, a, u


@register_jitable
def lion(x, g, m, _b, _c, decay, keep1, intake1, keep2, intake2, step_size):  # type: ignore[no-untyped-def]
    if decay is not None:
        x = x * decay
    u = m * keep1 + intake1 * g
    sign = np.float32(u > 0) - np.float32(u < 0)  # NaN gives 0, as torch.sign
    return x + step_size * sign, m * keep2 + intake2 * g


def at(array: Any, i: Any) -> Any:
    """Return array[i], or None if `array` is None. For use inside kernels only."""
    raise NotImplementedError


@overload(at)
def _at(array, i):  # type: ignore[no-untyped-def]
    return (lambda array, i: None) if array is types.none else (lambda array, i: array[i])


def _compiled(formula: Callable[..., Any]) -> Any:
    @kernel
    def loop(p: Any, grad: Any, a: Any, b: Any, c: Any, copy: Any, scale: Any, scalars: Any) -> Any:
        for i in range(p.size):
            new = formula(p[i], widen(grad[i]) * scale, at(a, i), at(b, i), at(c, i), *scalars)
            p[i] = new[0]
            if a is not None:
                a[i] = new[1]
            if b is not None:
                b[i] = new[2]
            if c is not None:
                c[i] = new[3]
            if copy is not None:
                put(copy, i, new[0])

    return loop


KERNELS = {formula: _compiled(formula) for formula in (sgd, adam, adagrad, rmsprop, lion)}
