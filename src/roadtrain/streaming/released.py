"""Released and stale parameters. The memory of such a parameter does not contain its current
values.

A released parameter has its shape, dtype, device and gradient, but no values and no memory. Any use
of its values, also after `detach()` or `.data`, raises LoopError, because computing with it would
silently give NaN (Rule 6).

A stale parameter, which is always in the root block, has old values in its memory after an update.
Its first use calls a function that fetches the new values of all stale parameters.

Reads by C++ code are NOT detected: such code reads NaN from a released parameter, and old values
from a stale parameter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from roadtrain.errors import LoopError

# Methods of torch.Tensor, and functions of torch, that need no values. Functions whose names begin
# with "is_" need no values either, except is_nonzero.
_METADATA = {
    "__hash__",
    "__len__",
    "_has_compatible_shallow_copy_type",
    "_is_view",
    "_is_zerotensor",
    "_has_symbolic_sizes_strides",
    "_typed_storage",
    "data_ptr",
    "dim",
    "dim_order",
    "element_size",
    "get_device",
    "has_names",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "size",
    "storage_offset",
    "storage_type",
    "stride",
    "sym_size",
    "typename",
    "untyped_storage",
}
_VIEWS = {"T", "H", "mT", "mH", "real", "imag"}  # attributes that are views of the values
_HELD = {"data", "detach"}  # attributes that return a tensor without values


class _Refusing:
    """A mixin for tensor classes that makes reading the values of an instance raise LoopError."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = _name_of(function)
        if name is None:
            raise _refusal(args)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        held = name in _HELD and result is not None
        return result.as_subclass(ReleasedTensor) if held else result

    def __repr__(self, **_: Any) -> str:
        tensor: Any = self
        return (
            f"released parameter(shape={tuple(tensor.shape)}, dtype={tensor.dtype},"
            f" device={tensor.device})"
        )

    def __format__(self, _: str) -> str:
        return repr(self)


class _Stale:
    """A mixin for parameter classes that makes the first use of an instance fetch its new
    values."""

    _fetch: Callable[[], object]  # fetches the values, and calls set_fetched at its end

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, values = _name_of(function), _flat((args, *(kwargs or {}).values()))
        found = next((a for a in values if isinstance(a, _Stale)), None)
        if found is not None and (name is None or name in _HELD):
            found._fetch()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class ReleasedTensor(_Refusing, torch.Tensor):  # type: ignore[misc]
    """The result of `detach()` or `.data` of a released parameter, which has no values either."""


def _name_of(function: Any) -> str | None:
    """Return the name of the tensor attribute or method that `function` uses, or None if `function`
    may read the tensor's values."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        if attribute in _VIEWS:
            return None
        return attribute if name == "__get__" else "set"
    asks = name.startswith("is_") and name != "is_nonzero"
    return str(name) if asks or name in _METADATA or name == "detach" else None


def in_child(maker: int) -> LoopError:
    """Return the error for a forked child that uses a model placed in process `maker`."""
    return LoopError(
        f"the model was placed in process {maker}, but this is its forked child {os.getpid()},"
        " which does not have the threads and the memory of the placed model",
        hint="do not use the model in a DataLoader's workers or other forked processes; to train in"
        " a second process, start it with spawn and place a model there",
    )


def forbid_in_child(params: Iterable[tuple[str, nn.Parameter]], maker: int) -> None:
    """Make every read of a parameter in `params` raise LoopError in this forked child, because the
    child does not have the memory of the parameters. `maker` is the id of the process that placed
    the model."""
    global _maker
    _maker = maker
    for _, p in params:
        set_released(p)


_maker = 0  # in a forked child, the id of the process that placed the model; else 0


def _refusal(args: tuple[Any, ...]) -> LoopError:
    if _maker:
        return in_child(_maker)
    found = next((a for a in _flat(args) if isinstance(a, _Refusing)), None)
    which = "" if found is None else f" of shape {tuple(found.shape)}"  # type: ignore[attr-defined]
    return LoopError(
        f"a parameter{which} was read, but its values are in memory only while its block runs",
        hint="read values with model.state_dict() or optimizer.read(name), or in the forward of the"
        " parameter's block",
    )


def _flat(args: Any) -> list[Any]:
    return [inner for a in args for inner in (_flat(a) if isinstance(a, list | tuple) else [a])]


@cache
def _class_of(mixin: type, kind: type) -> type:
    name = f"{'Released' if mixin is _Refusing else 'Behind'}{kind.__name__}"
    return type(name, (mixin, kind), {"__module__": __name__, "fetched_class": kind})


def is_released(p: torch.Tensor) -> bool:
    return isinstance(p, _Refusing)


def is_stale(p: torch.Tensor) -> bool:
    return isinstance(p, _Stale)


def released_value(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor whose elements are all NaN, or the minimum of an integer dtype, and which
    takes the memory of one element."""
    number = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if number else 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def has_released_value(p: torch.Tensor) -> bool:
    """Return whether `p` was released and has not been assigned values since."""
    return (
        not p.is_meta
        and p.numel() > 1
        and not any(p.stride())
        and p.untyped_storage().nbytes() == p.element_size()
    )


def settle(p: torch.Tensor, data: torch.Tensor) -> None:
    """Assign `p.data = data`, also between devices where torch refuses the assignment, such as from
    `meta`."""
    if torch._has_compatible_shallow_copy_type(p, data):  # type: ignore[attr-defined]
        p.data = data
    else:
        new: torch.Tensor = nn.Parameter(data, requires_grad=p.requires_grad)
        new.__class__ = p.__class__
        new.__dict__.update(p.__dict__)
        torch.utils.swap_tensors(p, new)  # type: ignore[no-untyped-call]


def release(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Replace the values of `params` with NaN values that take the memory of one element."""
    for _, p in params:
        if p.numel():
            settle(p, released_value(p.shape, p.dtype, torch.device("cpu")))


def set_released(p: nn.Parameter) -> None:
    """Make reading the values of `p` raise LoopError."""
    if not is_released(p):
        set_fetched(p)
        p.__class__ = _class_of(_Refusing, type(p))


def set_stale(p: nn.Parameter, fetch: Callable[[], object]) -> None:
    """Make the first use of `p` call `fetch`, which must call set_fetched(p)."""
    set_fetched(p)
    p.__class__ = _class_of(_Stale, type(p))
    p._fetch = fetch  # type: ignore[attr-defined]


def set_fetched(p: nn.Parameter) -> None:
    """Restore the class that `p` had before it was released or became stale."""
    if isinstance(p, _Refusing | _Stale):
        p.__class__ = type(p).fetched_class  # type: ignore[attr-defined]
        p.__dict__.pop("_fetch", None)


def is_called_by_dynamo() -> bool:
    """Return whether torch.compile is tracing or running the caller, which then must not change the
    classes of parameters."""
    frame = sys._getframe(1)
    while frame is not None:
        disables = frame.f_code.co_qualname.startswith("DisableContext.")  # torch.compiler.disable
        if frame.f_globals.get("__name__", "").startswith("torch._dynamo") and not disables:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def check_unchanged(params: Iterable[tuple[str, nn.Parameter]], versions: Iterable[int]) -> None:
    """Raise LoopError if a parameter was changed in place, because the change would be lost.
    `versions` has the earlier `_version` of each parameter."""
    for (name, p), version in zip(params, versions, strict=True):
        if p._version != version:
            raise LoopError(
                f"parameter {name!r} was changed in place, but its values are in the store, so the"
                " change would be lost",
                hint="use model.load_state_dict(), or change the model before place()",
            )
