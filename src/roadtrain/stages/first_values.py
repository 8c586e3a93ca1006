"""First values of a stage: those that one process alone would begin with, of its parameters.

A model on `meta` is initialised a block at a time in its own order, and what is not this stage's is
dropped at once, so that the whole model never exists and every stage draws the same numbers.
Weights in Hugging Face layout are read for this stage's parameters only.

Assumes: all ranks have the same seed set. Does NOT move anything to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from roadtrain.errors import ConfigError
from roadtrain.storage.safetensors_io import Tensor, open_dir
from roadtrain.streaming.fetched import settle
from roadtrain.streaming.init import materialize
from roadtrain.streaming.split import DTYPES, Split


def fill(
    model: nn.Module,
    parts: Split,
    own: Collection[str],
    weights: str | Path | None = None,
    init: Callable[[nn.Module], None] | None = None,
) -> None:
    """Give the parameters named in `own`, and all buffers, their first values. weights: a
    directory of safetensors; init: of a module, None: the model's own. Raises ModelError naming
    what is left without a value, ConfigError where the weights do not fit."""
    given = {} if weights is None else open_dir(weights)
    on_meta = any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    for part in (parts.root, *parts.blocks):
        if on_meta:
            materialize(part, parts, init, values=not given, given=given)
        for name, p in part.params:
            if name not in own:
                drop(p)
            elif given:
                read(name, p, given)


def drop(p: nn.Parameter) -> None:
    """Its values take no memory any more."""
    if not p.is_meta:
        p.data = p.data.new_empty(()).expand(p.shape)


def read(name: str, p: nn.Parameter, given: Mapping[str, Tensor]) -> None:
    """The values of `p`, of the tensor of its name. Raises ConfigError where it does not fit."""
    tensor = given.get(name)
    if tensor is None or tuple(tensor.shape) != tuple(p.shape):
        raise ConfigError(
            f"the weights do not fit the model: {name!r} is"
            f" {'absent' if tensor is None else tuple(tensor.shape)}, the model has"
            f" {tuple(p.shape)}",
            hint="the directory's config.json says which model it is",
        )
    raw = torch.from_numpy(tensor.read(0, p.numel()).copy())
    dtype = DTYPES[tensor.dtype]
    settle(p, raw.view(dtype).reshape(p.shape).to(p.dtype))
