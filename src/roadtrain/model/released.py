"""What a released parameter is until its block is fetched: a parameter that says who it is, and refuses to be read.

A released parameter has its shape, dtype, device and gradient, takes no memory and has no values. Whoever computes with
it would compute with NaN, without a word (Rule 6). So its class is changed while it is released: metadata is answered,
any other use raises LoopError. `detach()` and `.data` give a tensor that refuses in the same way.

Assumes: uses go through torch's Python functions. Does NOT see code in C++ that reads memory; it reads NaN there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from roadtrain.errors import LoopError

# Methods of torch.Tensor that need no values.
_TOLD = {
    "__hash__", "__len__", "_is_view", "_is_zerotensor", "_has_symbolic_sizes_strides", "_typed_storage", "data_ptr",
    "dim", "dim_order", "element_size", "get_device", "has_names", "is_coalesced", "is_complex", "is_conj",
    "is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size",
    "is_set_to", "is_shared", "is_signed", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset", "storage_type",
    "stride", "sym_size", "untyped_storage",
}  # fmt: skip
_TOLD_FUNCTIONS = {"numel", "is_complex", "is_floating_point", "is_signed", "is_tensor", "is_storage", "typename"}
_VIEWS = {"T", "H", "mT", "mH", "real", "imag"}  # attributes that are views of the values
_HELD = {"data", "detach"}  # what gives a tensor with the same missing values


class _Refusing:
    """Mixed into a class of tensors."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name_of(function)
        if name is None:
            raise _refusal(args)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(ReleasedTensor) if name in _HELD and result is not None else result

    def __repr__(self, **_: Any) -> str:
        tensor: Any = self
        return f"released parameter(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device})"

    def __format__(self, _: str) -> str:
        return repr(self)


class ReleasedTensor(_Refusing, torch.Tensor):  # type: ignore[misc]
    """Of a released parameter's shape, without its values."""


def _name_of(function: Any) -> str | None:
    """The name of what `function` asks of a tensor; None where that needs values."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        if attribute in _VIEWS:
            return None
        return attribute if name == "__get__" else "set"
    if name == "detach" or name in _TOLD:
        return str(name)
    return str(name) if name in _TOLD_FUNCTIONS else None


def _refusal(args: tuple[Any, ...]) -> LoopError:
    found = next((a for a in _flat(args) if isinstance(a, _Refusing)), None)
    which = "" if found is None else f" of shape {tuple(found.shape)}"  # type: ignore[attr-defined]
    return LoopError(
        f"a parameter{which} is read while its block is not fetched: its values are elsewhere",
        hint="model.state_dict() and optimizer.read(name) give values; a block's own forward has them while it runs",
    )


def _flat(args: Any) -> list[Any]:
    return [inner for a in args for inner in (_flat(a) if isinstance(a, list | tuple) else [a])]


@cache
def _released_class(kind: type) -> type:
    return type(f"Released{kind.__name__}", (_Refusing, kind), {"__module__": __name__, "fetched_class": kind})


def is_released(p: torch.Tensor) -> bool:
    return isinstance(p, _Refusing)


def set_released(p: nn.Parameter) -> None:
    """From here on `p` refuses to be read."""
    if not is_released(p):
        p.__class__ = _released_class(type(p))


def set_fetched(p: nn.Parameter) -> None:
    """`p` is what it was before."""
    if is_released(p):
        p.__class__ = type(p).fetched_class  # type: ignore[attr-defined]
