"""Initialize a stage's parameters with the same values as in a training with a single process.

A model on `meta` is initialized one block at a time, and the values of other stages are dropped, so
every stage draws the same random numbers and the whole model is never in memory. All ranks must set
the same seed.
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
    """Initialize the parameters whose names are in `own`, and all buffers.

    parts: the blocks of the model, and the root with all other modules. weights: a directory of
    safetensors files with the initial values, or None. init: initializes a module (default: the
    model's own initialization). Raises ModelError if a parameter gets no value, and ConfigError if
    the weights do not fit the model.
    """
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
