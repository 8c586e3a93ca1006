"""Functions for the arguments and results of a block as a flat list of leaves. A key-value cache is
always a single leaf."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roadtrain.errors import ModelError


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of `value`, and the spec with which pytree.tree_unflatten restores it."""
    return pytree.tree_flatten(value, is_leaf=_is_cache)


def distinct(leaves: Sequence[Any]) -> tuple[list[torch.Tensor], list[tuple[int, Any]]]:
    """Return the distinct tensors among `leaves`, and a pair for each leaf: (index among the
    distinct tensors, None) for a tensor, (-1, the leaf) for any other leaf."""
    tensors = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
    at = {key: i for i, key in enumerate(tensors)}
    return list(tensors.values()), [
        (at[id(x)], None) if isinstance(x, torch.Tensor) else (-1, x) for x in leaves
    ]


def pristine(leaf: Any, name: str) -> Any:
    """Return `leaf`, or an empty copy of `leaf` if it is a key-value cache, because each run of a
    block appends to its cache. Raises ModelError, with the block's name `name`, if the cache is not
    empty."""
    if not _is_cache(leaf):
        return leaf
    if int(leaf.get_seq_length()) > 0:
        raise ModelError(
            f"block {name!r} got a {type(leaf).__name__} that is not empty during training",
            hint="pass use_cache=False",
        )
    return copy.deepcopy(leaf)


def check_device(
    values: Iterable[Any], device: torch.device, of: str, verb: str = "was called with"
) -> None:
    """Raise ModelError if a tensor with gradients is not on `device`. `of` computes on `device`."""
    for x in values:
        if isinstance(x, torch.Tensor) and x.requires_grad and x.dim() and x.device != device:
            raise ModelError(
                f"{of} {verb} a tensor on {x.device}, but computes on {device}",
                hint=f"modules and hooks must return tensors on {device}",
            )


def check_opaque(leaf: Any, name: str) -> None:
    """Raise ModelError if block `name` returns an object that hides tensors with gradients."""
    own = {} if isinstance(leaf, type | nn.Module) else getattr(leaf, "__dict__", {})
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in own.values()):
        way = "register_pytree_node"
        if dataclasses.is_dataclass(leaf):
            way = "torch.utils._pytree.register_dataclass"
        raise ModelError(
            f"block {name!r} returns a {type(leaf).__name__}, whose tensors autograd cannot see",
            hint=f"return a tuple or dict, or register the type ({way})",
        )


def _is_cache(leaf: Any) -> bool:
    return hasattr(leaf, "get_seq_length")
