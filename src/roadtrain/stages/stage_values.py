"""The first values of a stage: those that one process alone would begin with, of its parameters.

A model on `meta` is initialised a block at a time in its own order, and what is not this stage's is
dropped at once, so that the whole model never exists and every stage draws the same numbers.
Weights in Hugging Face layout are read for this stage's parameters only.

Assumes: all ranks have the same seed set. Does NOT move anything to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn

from roadtrain.storage.safetensors_io import open_weights
from roadtrain.streaming.init import materialize
from roadtrain.streaming.released import settle
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
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name in own}
    given = {} if weights is None else open_weights(weights, shapes)
    on_meta = any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    for part in (parts.root, *parts.blocks):
        if on_meta:
            materialize(part, parts, init, values=not given, loaded=given)
        for name, p in part.params:
            if name not in own:
                drop(p)
            elif given:
                raw = torch.from_numpy(given[name].read(0, p.numel()).copy())
                settle(p, raw.view(DTYPES[given[name].dtype]).reshape(p.shape).to(p.dtype))


def drop(p: nn.Parameter) -> None:
    """Its values take no memory any more."""
    if not p.is_meta:
        p.data = p.data.new_empty(()).expand(p.shape)
