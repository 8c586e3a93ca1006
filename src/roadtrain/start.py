"""The first contents of a placed model, or its last committed ones; then the stream takes over its blocks.

Values come from the model (tensor by tensor), from safetensors in Hugging Face layout, or, for a model on `meta`, from
its own initialisation, one block at a time; so the whole model never exists beside the store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import cast
from roadtrain.model.activations import Activations
from roadtrain.model.init import materialize, release
from roadtrain.model.split import DTYPES, NAMES, Part, Split, as_numpy
from roadtrain.model.stream import Stream
from roadtrain.node.cluster import Cluster
from roadtrain.node.engine import Engine
from roadtrain.spec.chunks import ChunkTable, ParamSpec
from roadtrain.store.convert import MASTER
from roadtrain.store.safetensors_io import open_dir


class Start:
    def __init__(
        self, model: nn.Module, parts: Split, table: ChunkTable, engine: Engine | Cluster, device: torch.device,
        weights: str | Path | None, init: Callable[[nn.Module], None] | None, activation_bytes: int,
    ) -> None:
        self.model, self.parts, self.table, self.engine, self.device = model, parts, table, engine, device
        self.weights = open_dir(weights) if weights is not None else None
        self.init, self.activation_bytes = init, activation_bytes

    def run(self, placed: Any) -> None:
        """Fills or resumes; afterwards `placed` trains."""
        hypers = [rule.hyper(group) for rule, group in zip(self.engine.layout.rules, placed.param_groups)]
        hypers += [()] * (len(self.engine.layout.rules) - len(hypers))
        self._check_weights()
        on_meta = any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers()))
        for block, part in zip(self.table.blocks, (self.parts.root, *self.parts.blocks)):
            if on_meta:
                given = self.weights.keys() if self.weights is not None else ()
                materialize(part, self.parts, self.init, values=self.engine.new and not given, given=given)
            if self.engine.new:
                self.engine.fill(block, self._source(part), hypers)
            if block.index:
                release(part.params)
            self.engine.worker.heap.trim(at_once=True)
        for twin in self.engine.layout.table.blocks[len(self.table.blocks) :]:
            if self.engine.new:
                self.engine.fill(twin, lambda *_: None, hypers)
        scratch = self.engine.layout.directories[0] if self.engine.layout.directories else None
        activations = Activations(self.activation_bytes, scratch, self.device)
        stream = Stream(self.model, self.parts, self.table, placed, activations, self.device, placed.pass_ended)
        release(self.parts.root.params)
        for b in self.model.buffers():
            b.data = b.data.to(self.device)
        self.engine.start(placed.job_state())
        stream.attach()
        stream.root_views(self.engine.worker.root.tensor)
        placed.attach(stream, activations)
        if not self.engine.new and self.engine.blob:
            placed.load_job_state(self.engine.blob)
        placed.forward_begins()

    def _source(self, part: Part) -> Callable[[ParamSpec, str, int, int], np.ndarray | None]:
        tensors = dict(part.params)

        def source(spec: ParamSpec, what: str, start: int, stop: int) -> np.ndarray | None:
            if what != MASTER:
                return None
            if self.weights is not None and spec.name in self.weights:
                found = self.weights[spec.name]
                return _as(found.read(start, stop), found.dtype, spec)
            flat = tensors[spec.name].detach().reshape(-1)[start:stop]
            return _as(as_numpy(flat), NAMES[flat.dtype], spec)

        return source

    def _check_weights(self) -> None:
        if self.weights is None:
            return
        mine = {p.name: p for p in self.table.params}
        lacking = [n for n in mine if n not in self.weights]
        wrong = [n for n, p in mine.items() if n in self.weights and tuple(self.weights[n].shape) != p.shape]
        if lacking or wrong:
            name = (lacking or wrong)[0]
            there = tuple(self.weights[name].shape) if name in self.weights else "absent"
            raise ConfigError(
                f"the weights do not fit the model: {len(lacking)} of {len(mine)} tensors are absent, {len(wrong)} "
                f"have another shape; {name!r} is {there}, the model has {mine[name].shape}",
                hint="the directory's config.json says which model it is",
            )


def _as(values: np.ndarray, dtype: str, spec: ParamSpec) -> np.ndarray:
    """`values` of `dtype` as the store wants them: fp32 masters, a frozen parameter in the dtype it travels in."""
    want = "fp32" if spec.trainable else spec.dtype
    if dtype == want:
        return values
    if "fp64" in (dtype, want) or dtype not in DTYPES:
        raise ConfigError(f"parameter {spec.name!r} is {dtype}, the store wants {want}")
    out: np.ndarray = np.empty(values.size, np.float32 if want == "fp32" else np.uint16)
    cast(values, dtype, out, want)
    return out
