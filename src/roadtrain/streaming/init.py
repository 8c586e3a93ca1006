"""Initial values for a model that was built on `meta`. The values are computed for one block at a
time, so the whole model is never in memory.

    for part in (split.root, *split.blocks):  # the root must be first, see below
        materialize(part, split, init)
        ...use the values of part.params (CPU, the parameter's own dtype)...
        release(part.params)

`init` is a function of the user that initializes a module, or None for the model's own
initialization: `_initialize_weights` of the nearest enclosing Hugging Face model, or else
`reset_parameters()` of each module.

The root must be first, because the initialization of its modules may write to blocks; blocks are
still on `meta` then, where a write has no effect. The same `torch.manual_seed` gives the same
values, but not the values of a model that is built on the CPU with this seed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from roadtrain.errors import ModelError
from roadtrain.streaming.released import released_value, settle
from roadtrain.streaming.split import ModulePart, Split

Init = Callable[[nn.Module], None]


def own_init(model: nn.Module) -> Init:
    """Return the model's own initialization, as a function that initializes one module. It must be
    called for each module of the model, and for children before their parents."""
    families: dict[int, Init] = {}

    def walk(module: nn.Module, family: Init | None) -> None:
        family = getattr(module, "_initialize_weights", family)
        if id(module) not in families:
            families[id(module)] = _reset if family is None else family
            for child in module.children():
                walk(child, family)

    walk(model, None)

    def init(module: nn.Module) -> None:
        family = families[id(module)]
        module.__dict__.pop("_is_hf_initialized", None)
        family(module)
        if family is not _reset and any(_starts_nan(t) for t in _direct(module)):
            _reset(module)  # as the constructor of the module does
            module.__dict__.pop("_is_hf_initialized", None)
            family(module)

    return init


def materialize(
    part: ModulePart,
    split: Split,
    init: Init | None = None,
    *,
    values: bool = True,
    loaded: Collection[str] = (),
) -> None:
    """Replace those parameters and buffers of `part` that are on `meta` by initialized CPU tensors.

    Args:
        part: The block or the root.
        init: A function that initializes a module. If None, the model's own initialization is used.
        values: Whether to initialize parameters. If False, all parameters stay on `meta`.
        loaded: Names of parameters that stay on `meta`, because their values will be loaded.

    Raises:
        ModelError: A parameter or buffer got no value.
    """
    fresh = [(name, p) for name, p in part.params if values and name not in loaded and p.is_meta]
    init = init or own_init(split.root.module)
    modules = list(_post_order(part.module, {id(b.module) for b in split.blocks if b is not part}))
    mine = {id(p) for _, p in fresh}
    for _, p in fresh:
        settle(p, _blank(p))
        p.__dict__.pop("_is_hf_initialized", None)
    buffers = list(_blank_buffers(modules))
    blanks = (*(p for _, p in fresh), *(m._buffers[k] for m, k in buffers))
    started = {id(t): t._version for t in blanks if t is not None}
    kept = {
        id(p): (p, p.detach().clone())
        for m in modules
        for p in m.parameters(recurse=False)
        if id(p) not in mine and not p.is_meta
    }
    needed = {id(m) for m in modules if any(id(p) in mine for p in m.parameters(recurse=False))}
    needed |= {id(m) for m, _ in buffers}
    if fresh or buffers:
        with torch.no_grad(), torch.device("cpu"):
            for module in modules:
                if id(module) in needed or not any(True for _ in module.parameters(recurse=False)):
                    init(module)
            for p, value in kept.values():
                p.copy_(value)
    left = [name for name, p in fresh if _unset(p, started)]
    lost = [(m, k) for m, k in buffers if _unset(m._buffers[k], started)]
    if lost:
        names = {id(m): n for n, m in split.root.module.named_modules()}
        left += [f"{names[id(m)]}.{k} (buffer)" for m, k in lost]
    if left:
        raise ModelError(
            "the initialization gave no value to"
            f" {', '.join(left[:5])}{f' and {len(left) - 5} more' if len(left) > 5 else ''}",
            hint=(
                "give the module a reset_parameters(), pass init=, load weights, or build the model"
                " on the CPU"
            ),
        )


def _post_order(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield each module below `module` once, children before their parents, without the modules in
    `seen`."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _post_order(child, seen)
    yield module


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset) and next(iter(_direct(module)), None) is not None:
        reset()


def _direct(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _starts_nan(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.numel() == 0 or not tensor.is_floating_point():
        return False
    return bool(tensor.view(-1)[0].isnan())


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor like `tensor`, filled with NaN or the minimum of an integer dtype."""
    return released_value(tensor.shape, tensor.dtype, torch.device("cpu")).clone(
        memory_format=torch.contiguous_format
    )


def _blank_buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Replace buffers on `meta` with blank CPU tensors, and yield the (module, key) of each
    buffer."""
    blanks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = blanks.setdefault(id(buffer), (buffer, _blank(buffer)))[1]
                yield module, key


def _unset(tensor: torch.Tensor | None, started: dict[int, int]) -> bool:
    if tensor is None or tensor.numel() == 0:
        return False
    if tensor.is_meta:
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    untouched = started.get(id(tensor)) == tensor._version
    return untouched and (
        tensor.dtype == torch.bool or bool((tensor == torch.iinfo(tensor.dtype).min).all())
    )
