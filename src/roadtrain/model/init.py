"""First values of a model built on `meta`, one block at a time, by its own initialisation.

Each module of the block gets memory filled with NaN, then is initialised: by the user's `init(module)`; else as
`transformers` would (the nearest model above with `_init_weights`); else by its own `reset_parameters()`. Whatever
still reads as NaN was forgotten, and is an error rather than a silent start from nothing.

Assumes: initialisation looks only at the module it is given. Deterministic after torch.manual_seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from roadtrain.errors import ModelError
from roadtrain.model.borrowed import settle
from roadtrain.model.split import Part, Split

Init = Callable[[nn.Module], None]
CPU = torch.device("cpu")


@torch.no_grad()
def materialize(
    part: Part, parts: Split, init: Init | None = None, *, values: bool = True, given: Iterable[str] = ()
) -> None:
    """Parameters and buffers of `part` that are on meta come to the CPU and get their first values. `values` False:
    only modules with buffers are initialised, the parameters' values will come from elsewhere. `given`: names of
    parameters that will get their values from elsewhere. Raises ModelError naming what nothing initialised."""
    inside = {id(m) for block in parts.blocks for m in block.module.modules()} if part is parts.root else set()
    owners = _owners(parts.root.module)
    buffers: list[tuple[str, torch.Tensor]] = []
    todo: list[tuple[str, nn.Module]] = []
    for name, module in _children_first(part.module, part.name if part is not parts.root else ""):
        if id(module) in inside:
            continue
        fresh = _allocate(module)
        buffers += [(f"{name}.{n}", b) for n, b in fresh]
        if values or fresh:
            todo.append((name, module))
    for _, p in part.params:
        if p.is_meta:
            settle(p, torch.full(p.shape, float("nan") if p.is_floating_point() else 0, dtype=p.dtype))
    for _, module in todo:
        _initialise(module, init, owners.get(id(module)))
    known = set(given)
    lost = [n for n, p in part.params if values and n not in known and bool(p.isnan().any())]
    lost += [n for n, b in buffers if b.numel() and _untouched(b)]
    if lost:
        raise ModelError(
            f"nothing initialises {lost[0]!r}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
            + f" of block {part.name!r}, which was built on meta",
            hint="give place(..., init=function of a module), or build the model on the CPU",
        )


def _initialise(module: nn.Module, init: Init | None, owner: nn.Module | None) -> None:
    direct = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if init is not None:
        init(module)
        return
    if owner is not None:
        owner._init_weights(module)  # type: ignore[operator]
        if not any(t.is_floating_point() and bool(t.isnan().any()) for t in direct):
            return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if direct and reset is not None:
        reset()


def _allocate(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Memory for the module's own meta buffers; which those are."""
    fresh = []
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            new = torch.full(buffer.shape, _mark(buffer.dtype), dtype=buffer.dtype, device=CPU)
            module._buffers[name] = new
            fresh.append((name, new))
    return fresh


def _mark(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _untouched(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.dtype != torch.bool and bool((buffer == _mark(buffer.dtype)).all())


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _owners(model: nn.Module) -> dict[int, nn.Module]:
    """id(module) -> the nearest model above it (or itself) that initialises in the way of transformers."""
    out: dict[int, nn.Module] = {}

    def walk(module: nn.Module, owner: nn.Module | None) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        if owner is not None:
            out[id(module)] = owner
        for child in module.children():
            walk(child, owner)

    walk(model, None)
    return out
