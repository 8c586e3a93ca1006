"""Initialize a stage's parameters with the same values as in a training with a single process.

A model on `meta` is initialized one block at a time, in the model's order. After each block, the
values of other stages' parameters are dropped. So the whole model is never in memory, and every
stage draws the same random numbers. If the user passes a directory of Hugging Face weights, only
the weights of this stage's parameters are read.

Assumes: all ranks set the same seed. Does NOT move anything to a device.
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
    """Initialize the parameters whose names are in `own`, and all buffers. parts: the blocks of the
    model, and the root with all other modules. weights: a directory of safetensors files with the
    initial values, or None. init: a function that initializes a module; if None, the model's own
    initialization is used. Raises ModelError if the initialization gives a parameter no value, and
    ConfigError if the weights do not fit the model."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name in own}
    loaded = {} if weights is None else open_weights(weights, shapes)
    on_meta = any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    for part in (parts.root, *parts.blocks):
        if on_meta:
            materialize(part, parts, init, values=not loaded, loaded=loaded)
        for name, p in part.params:
            if name not in own:
                drop(p)
            elif loaded:
                raw = torch.from_numpy(loaded[name].read(0, p.numel()).copy())
                settle(p, raw.view(DTYPES[loaded[name].dtype]).reshape(p.shape).to(p.dtype))


def drop(p: nn.Parameter) -> None:
    """Free the memory of the parameter's values."""
    if not p.is_meta:
        p.data = p.data.new_empty(()).expand(p.shape)
