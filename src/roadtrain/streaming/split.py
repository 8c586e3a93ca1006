"""The split of a model into blocks, and the ChunkTable of the split. Does NOT move or change
values.

Unless the user names blocks, they are the items of the outermost `nn.ModuleList`s, or else the
children of the largest `nn.Sequential`. Without either, all parameters are in the root block. The
user names blocks by dotted names or patterns, in which `*` does not match dots (`model.layers.*`).
A parameter belongs to the root if it is used in two blocks, or in a block and outside of it (tied
weights).

Assumes that blocks are called (`block(x)`), and that their parameters are not read from outside
(`block.weight`), because parameters are released between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import nn

from roadtrain.chunks import MAX_CHUNK, TRAINABLE, ChunkTable, ParamSpec
from roadtrain.errors import ConfigError, ModelError
from roadtrain.options.names import did_you_mean
from roadtrain.options.schema import refusing

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ROOT = "root"


def _check_trainable(dtype: torch.dtype) -> None:
    if NAMES.get(dtype) not in TRAINABLE:
        raise ConfigError(f"update rules do not support the dtype {dtype}")


ComputeDtype = Annotated[
    torch.dtype,
    AfterValidator(refusing(_check_trainable)),
    Field(description="torch.float32, torch.bfloat16, torch.float16"),
]


@dataclass(frozen=True)
class ModulePart:
    """A block or the root: a module, and the parameters that belong to it, each with its first name
    in `model.named_parameters()`."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]


@dataclass(frozen=True)
class Split:
    """The split of a model into its root and its blocks.

    `root.module` is the model, and `root.params` are the parameters that belong to no block. The
    blocks are in module order, and no block contains another block.
    """

    root: ModulePart
    blocks: tuple[ModulePart, ...]


def split(model: nn.Module, blocks: Sequence[str] | None = None) -> Split:
    """Split `model` into the root and its blocks.

    Raises ModelError for a model without parameters. Raises ConfigError for a name that matches no
    module, a module that is never called (such as a list), or a block inside another block.
    """
    named = list(model.named_parameters())
    if not named:
        raise ModelError(
            f"{type(model).__name__} has no parameters", hint="there is nothing to place"
        )
    patterns = [blocks] if isinstance(blocks, str) else blocks
    items = dict(_found(model) if patterns is None else _named(model, patterns))
    # id(module) -> first name; a module listed twice (shared layers) is one block
    chosen: dict[int, str] = {}
    for name, module in items.items():
        chosen.setdefault(id(module), name)
    owners = _owners(model, chosen)
    params: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in chosen.values()}
    root: list[tuple[str, nn.Parameter]] = []
    for name, p in named:
        own = owners[id(p)]
        home = next(iter(own)) if len(own) == 1 else ROOT
        (root if home == ROOT else params[home]).append((name, p))
    owning = [name for name in chosen.values() if params[name]]
    parts = tuple(ModulePart(name, items[name], tuple(params[name])) for name in owning)
    return Split(ModulePart(ROOT, model, tuple(root)), parts)


def table(
    split: Split,
    groups: Mapping[nn.Parameter, int],
    dtype: torch.dtype | None,
    chunk_elements: int = MAX_CHUNK,
) -> ChunkTable:
    """Return the ChunkTable of `split`. Block 0 is the root, and block i + 1 is `split.blocks[i]`.

    Raises ModelError for an unsupported dtype.

    Args:
        groups: The parameter group of each parameter. A parameter is frozen if it is in no group,
            or does not require a gradient.
        dtype: The dtype in which floating-point parameters are transferred and used for computing.
            If None, each parameter keeps its own dtype.
        chunk_elements: The largest number of elements of a chunk.
    """

    def spec(name: str, p: nn.Parameter) -> ParamSpec:
        held = dtype if dtype is not None and p.is_floating_point() else p.dtype
        if held not in NAMES:
            raise ModelError(
                f"parameter {name!r} has dtype {held}; supported are {', '.join(map(str, NAMES))}"
            )
        trainable = p.requires_grad and p in groups
        group = groups[p] if trainable else -1
        return ParamSpec(name, tuple(p.shape), NAMES[held], trainable, group)

    parts = (split.root, *split.blocks)
    return ChunkTable.build(
        [(part.name, [spec(n, p) for n, p in part.params]) for part in parts], chunk_elements
    )


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return `tensor` as an array, with 16-bit floats as uint16: a view of a contiguous CPU tensor,
    else a copy."""
    tensor = tensor.detach().cpu().contiguous()
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return (tensor.view(torch.uint16) if half else tensor).numpy()


def _found(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if items := list(_list_items(model, "")):
        return items
    best: list[tuple[str, nn.Module]] = []
    most = 0
    for name, module in model.named_modules():
        if type(module).forward is not nn.Sequential.forward:
            continue
        children = [(_join(name, n), c) for n, c in module.named_children() if _has_params(c)]
        numel = sum(p.numel() for p in module.parameters())
        if len(children) >= 2 and numel > most:
            best, most = children, numel
    return best


def _list_items(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the items of the outermost module lists in `module`."""
    for child_name, child in module.named_children():
        full = _join(name, child_name)
        several = isinstance(child, nn.ModuleList) and len(child) >= 2
        if several and all(_has_params(item) and _callable(item) for item in child.children()):
            yield from ((_join(full, n), item) for n, item in child.named_children())
        else:
            yield from _list_items(child, full)


def _callable(module: nn.Module) -> bool:
    return not isinstance(
        module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    )


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _named(model: nn.Module, patterns: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    modules = {name: module for name, module in model.named_modules() if name}
    chosen = set()
    for pattern in patterns:
        parts = pattern.split(".")
        hits = [n for n in modules if _fits(n.split("."), parts) and _has_params(modules[n])]
        if not hits:
            raise ConfigError(
                f"blocks: no module with parameters is named {pattern!r}",
                hint=did_you_mean(pattern, modules, least=0.0),
            )
        for hit in hits:
            if not _callable(modules[hit]):
                raise ConfigError(
                    f"block {hit!r} is a {type(modules[hit]).__name__}, which is never called",
                    hint=f"name the items of the block instead: {hit}.*",
                )
        chosen.update(hits)
    return ((name, module) for name, module in modules.items() if name in chosen)


def _fits(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(fnmatchcase(n, p) for n, p in zip(name, pattern))


def _owners(model: nn.Module, chosen: dict[int, str]) -> dict[int, set[str]]:
    """Map the id of each parameter to the names of all blocks that contain it, or ROOT outside of
    blocks."""
    owner_of = {"": ROOT}
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            above = owner_of[name.rpartition(".")[0]]
            here = chosen.get(id(module), above)
            if above not in (ROOT, here):
                raise ConfigError(
                    f"block {here!r} is inside block {above!r}", hint="name only one of the two"
                )
            owner_of[name] = here
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), set()).add(owner_of[name])
    return owners


def _join(a: str, b: str) -> str:
    return f"{a}.{b}" if a else b
