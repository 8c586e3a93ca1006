"""PlacedGrad: the value of `p.grad` after a gradient was sent to its server.

A PlacedGrad has the parameter's shape, dtype and device and takes 0 bytes. Gradient clipping,
norms, scaling by a number and `torch.amp.GradScaler` accept a PlacedGrad like a tensor. A norm asks
the server for the sum of squares. A product changes `scale`, a factor that the server applies in
the update. Does NOT provide the elements: every operation that needs them raises LoopError.

Assumes that the server's sum of squares ignores `scale`, and is inf or nan if any element of the
gradient is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from roadtrain.errors import LoopError

aten = torch.ops.aten


class GradBook(Protocol):
    def sum_squares(self, param: int) -> float:
        """Wait for the sum of the squares of the gradient that the server has accumulated in this
        step, without the factor `PlacedGrad.scale`. `param`: index of the parameter in
        ChunkTable.params."""


class PlacedGrad(torch.Tensor):
    """A handle to a gradient on a server.

    Attributes:
        param: Index of the parameter in ChunkTable.params.
        book: The GradBook that returns the gradient's sum of squares from the server.
        label: Name of the parameter for messages.
        scale: Factor for the gradient, initially 1.0.
        shared: The list that contains `scale`. Aliases (`detach()`, `.data`) use the same list.
    """

    param: int
    book: GradBook
    label: str
    shared: list[float]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        param: int,
        book: GradBook,
        label: str = "",
        shared: list[float] | None = None,
    ) -> PlacedGrad:
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        self.param, self.book, self.label, self.shared = param, book, label, shared or [1.0]
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def scale(self) -> float:
        return self.shared[0]

    @scale.setter
    def scale(self, value: float) -> None:
        self.shared[0] = float(value)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"PlacedGrad({self.label or self.param}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" device={self.device}, scale={self.scale})"
        )

    def numpy(self, *, force: bool = False) -> Any:
        raise _left("numpy", (self,))

    def tolist(self) -> Any:
        raise _left("tolist", (self,))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is None or "out" in (kwargs or {}):
            raise _left(func, args)
        return handler(func, args, kwargs or {})


def _left(func: Any, args: Any, why: str = "") -> LoopError:
    flat = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else (arg,))]
    name = next((a.label or a.param for a in flat if isinstance(a, PlacedGrad)), "?")
    return LoopError(
        f"{getattr(func, '__name__', func)} needs the elements of the gradient of {name!r}, "
        f"which was sent to its server{why}",
        hint="use only norms of order 2, clip_grad_norm_, GradScaler and scaling by a number on the"
        " gradient; call zero_grad with set_to_none=True",
    )


def _detach(func: Any, args: Any, kwargs: Any) -> PlacedGrad:
    grad = args[0]
    return PlacedGrad(grad, grad.param, grad.book, grad.label, grad.shared)


def _norm_of(grad: PlacedGrad) -> torch.Tensor:
    """Return the norm of a gradient as a 0-dim tensor, in fp32 for 16-bit gradients, because fp16
    could overflow."""
    dtype = grad.dtype if grad.dtype == torch.float64 else torch.float32
    value = abs(grad.scale) * math.sqrt(grad.book.sum_squares(grad.param))
    return torch.tensor(value, dtype=dtype, device=grad.device)


def _norm(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
    whole = not any(args[2:4]) and not kwargs.get("dim") and not kwargs.get("keepdim")
    euclidean = order is None or float(order) == 2.0
    if not isinstance(args[0], PlacedGrad) or not euclidean or not whole:
        raise _left(func, args, f" (order {order}; the server only has the full norm of order 2)")
    value = _norm_of(args[0])
    return value if kwargs.get("dtype") is None else value.to(kwargs["dtype"])


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    grads: Sequence[torch.Tensor] = args[0]
    order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
    if float(order) != 2.0:
        raise _left(func, args, f" (order {order}; the server only has the norm of order 2)")
    rest = iter(_on_rest(func, args, kwargs) or ())
    return [_norm_of(g) if isinstance(g, PlacedGrad) else next(rest) for g in grads]


def _on_rest(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply `func` to the ordinary gradients in the list `args[0]`, or return None if there are
    none."""
    rest = [g for g in args[0] if not isinstance(g, PlacedGrad)]
    return func(rest, *args[1:], **kwargs) if rest else None


def _number(func: Any, args: Any, value: Any) -> float:
    if isinstance(value, PlacedGrad) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        raise _left(func, args)
    return float(value)


def _times(combine: Callable[[float, float], float]) -> Callable[[Any, Any, Any], Any]:
    def scale(func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(args[0], PlacedGrad) or kwargs:
            raise _left(func, args)
        args[0].scale = combine(args[0].scale, _number(func, args, args[1]))
        return args[0]

    return scale


def _foreach_times(method: str) -> Callable[[Any, Any, Any], None]:
    def scale(func: Any, args: Any, kwargs: Any) -> None:
        grads, by = args
        factors = by if isinstance(by, list | tuple) else [by] * len(grads)
        for grad, factor in zip(grads, factors, strict=True):
            getattr(grad, method)(factor)

    return scale


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    grads, found_inf, inv_scale = args
    _on_rest(func, args, kwargs)
    by = float(inv_scale)
    for grad in grads:
        if isinstance(grad, PlacedGrad):
            if not math.isfinite(grad.book.sum_squares(grad.param)):
                found_inf.fill_(1.0)
            if by != 1.0:
                grad.scale *= by


_HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {  # operation -> handler of all overloads
    aten.detach: _detach,
    aten.alias: _detach,
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten._foreach_norm: _foreach_norm,
    aten.mul_: _times(operator.mul),
    aten.div_: _times(operator.truediv),
    aten._foreach_mul_: _foreach_times("mul_"),
    aten._foreach_div_: _foreach_times("div_"),
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
