"""What a parameter is while its values are elsewhere: one that refuses to be read, or that fetches
its values first.

A released parameter has its shape, dtype, device and gradient, takes no memory and has no values.
Whoever computes with it would compute with NaN, without a word (Rule 6). So its class is changed
while it is released: metadata is answered, any other use raises LoopError. `detach()` and `.data`
give a tensor that refuses in the same way.

A parameter that is behind (of the root block, after an update) has old values in its memory: its
first use fetches the new ones, for all that are behind, by what `set_behind` was given.

Assumes: uses go through torch's Python functions. Does NOT see code in C++ that reads memory; it
reads NaN there.
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

# Methods of torch.Tensor, and functions of torch, that need no values; so do those that begin with
# "is_", except is_nonzero.
_TOLD = {
    "__hash__",
    "__len__",
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
_HELD = {"data", "detach"}  # what gives a tensor with the same missing values


class _Refusing:
    """Mixed into a class of tensors."""

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


class _Behind:
    """Mixed into a class of parameters."""

    _fetch: Callable[[], object]  # ends with set_fetched

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, given = _name_of(function), _flat((args, *(kwargs or {}).values()))
        found = next((a for a in given if isinstance(a, _Behind)), None)
        if found is not None and (name is None or name in _HELD):
            found._fetch()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


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
    asks = name.startswith("is_") and name != "is_nonzero"
    return str(name) if asks or name in _TOLD or name == "detach" else None


def in_child(maker: int) -> LoopError:
    """The error of a forked child that uses a model which process `maker` placed."""
    return LoopError(
        f"the model was placed in process {maker}, and this is process {os.getpid()}, forked from"
        " it: the threads and the memory of the placed model are not here",
        hint=(
            "a DataLoader's workers, and other forked processes, must not use the model; a process"
            " that is to train places a model of its own (start it with spawn)"
        ),
    )


def forbid_in_child(params: Iterable[tuple[str, nn.Parameter]], maker: int) -> None:
    """In a forked child: `params`, whose memory is not there, refuse to be read."""
    global _maker
    _maker = maker
    for _, p in params:
        set_released(p)


_maker = 0  # in a forked child: the process that placed a model


def _refusal(args: tuple[Any, ...]) -> LoopError:
    if _maker:
        return in_child(_maker)
    found = next((a for a in _flat(args) if isinstance(a, _Refusing)), None)
    which = "" if found is None else f" of shape {tuple(found.shape)}"  # type: ignore[attr-defined]
    return LoopError(
        f"a parameter{which} is read while its block is not fetched: its values are elsewhere",
        hint=(
            "model.state_dict() and optimizer.read(name) give values; a block's own forward has"
            " them while it runs"
        ),
    )


def _flat(args: Any) -> list[Any]:
    return [inner for a in args for inner in (_flat(a) if isinstance(a, list | tuple) else [a])]


@cache
def _class_of(mixin: type, kind: type) -> type:
    name = f"{'Released' if mixin is _Refusing else 'Behind'}{kind.__name__}"
    return type(name, (mixin, kind), {"__module__": __name__, "fetched_class": kind})


def is_released(p: torch.Tensor) -> bool:
    return isinstance(p, _Refusing)


def is_behind(p: torch.Tensor) -> bool:
    return isinstance(p, _Behind)


def released_value(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`shape` of NaN (integers: the least value) in one element of memory."""
    number = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if number else 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def has_released_value(p: torch.Tensor) -> bool:
    """Whether `p` was released and nothing has given it values since."""
    return (
        not p.is_meta
        and p.numel() > 1
        and not any(p.stride())
        and p.untyped_storage().nbytes() == p.element_size()
    )


def settle(p: nn.Parameter, data: torch.Tensor) -> None:
    """`p.data = data`, also for a parameter on `meta`, which torch refuses to move by
    assignment."""
    if p.is_meta:
        new = nn.Parameter(data, requires_grad=p.requires_grad)
        new.__class__ = p.__class__
        new.__dict__.update(p.__dict__)
        torch.utils.swap_tensors(p, new)  # type: ignore[no-untyped-call]
    else:
        p.data = data


def release(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Drop the values: they read as NaN and take 0 bytes."""
    for _, p in params:
        if p.numel():
            settle(p, released_value(p.shape, p.dtype, torch.device("cpu")))


def set_released(p: nn.Parameter) -> None:
    """From here on `p` refuses to be read."""
    if not is_released(p):
        set_fetched(p)
        p.__class__ = _class_of(_Refusing, type(p))


def set_behind(p: nn.Parameter, fetch: Callable[[], object]) -> None:
    """The first use of `p` calls `fetch`, which ends with set_fetched(p)."""
    set_fetched(p)
    p.__class__ = _class_of(_Behind, type(p))
    p._fetch = fetch  # type: ignore[attr-defined]


def set_fetched(p: nn.Parameter) -> None:
    """`p` is what it was before."""
    if isinstance(p, _Refusing | _Behind):
        p.__class__ = type(p).fetched_class  # type: ignore[attr-defined]
        p.__dict__.pop("_fetch", None)


def is_called_by_dynamo() -> bool:
    """Whether torch.compile runs the caller: what it compiled is guarded by the classes of
    parameters."""
    frame = sys._getframe(1)
    while frame is not None:
        disables = frame.f_code.co_qualname.startswith("DisableContext.")  # torch.compiler.disable
        if frame.f_globals.get("__name__", "").startswith("torch._dynamo") and not disables:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def check_unchanged(params: Iterable[tuple[str, nn.Parameter]], versions: Iterable[int]) -> None:
    """LoopError where one was written in place since its `_version` was as given: its server
    would not hear of it."""
    for (name, p), version in zip(params, versions, strict=True):
        if p._version != version:
            raise LoopError(
                f"parameter {name!r} was changed in place: its values are elsewhere, and the change"
                " would be lost",
                hint="model.load_state_dict() changes them; or change the model before place()",
            )
