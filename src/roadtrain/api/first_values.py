"""The first contents of a placed model, or its last committed ones; then the stream takes over its
blocks.

Values come from the model (tensor by tensor), from safetensors in Hugging Face layout, or, for a
model on `meta`, from its own initialisation, one block at a time; so the whole model never exists
beside the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from roadtrain.api.session_plan import SessionPlan
from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import cast
from roadtrain.runtime.session import JobSession
from roadtrain.storage.convert import MASTER, Source
from roadtrain.storage.safetensors_io import Tensor, open_dir
from roadtrain.streaming.activations import Activations
from roadtrain.streaming.init import materialize, release
from roadtrain.streaming.split import DTYPES, NAMES, ModulePart, Split, as_numpy
from roadtrain.streaming.stream import BlockStream


def start(
    placed: Any,
    model: nn.Module,
    parts: Split,
    plan: SessionPlan,
    engine: JobSession,
    weights: str | Path | None,
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Fills or resumes; afterwards `placed` trains."""
    table, device, budgets = plan.table, plan.device, plan.budgets.worker
    given = open_dir(weights) if weights is not None else {}
    if weights is not None:
        _check_weights(given, table)
    store_plan = engine.store_plan
    hyperparameters = [
        rule.hyper(group) for rule, group in zip(store_plan.rules, placed.param_groups)
    ]
    hyperparameters += [()] * (len(store_plan.rules) - len(hyperparameters))
    on_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    for block, part in zip(table.blocks, (parts.root, *parts.blocks)):
        if on_meta:
            materialize(part, parts, init, values=engine.new and not given, given=given)
        if engine.new:
            engine.fill(block, _source(part, given), hyperparameters)
        if block.index:
            release(part.params)
        engine.worker.heap.trim(at_once=True)
    for residual_block in store_plan.table.blocks[len(table.blocks) :]:
        if engine.new:
            engine.fill(residual_block, lambda *_: None, hyperparameters)
    scratch = store_plan.directories[0] if store_plan.directories else None
    activations = Activations(budgets.activation_bytes, scratch, device)
    stream = BlockStream(model, parts, table, placed, activations, device, placed.pass_ended)
    release(parts.root.params)
    for b in model.buffers():
        b.data = b.data.to(device)
    engine.start(placed.job_state())
    stream.attach()
    stream.root_views(engine.worker.root.tensor)
    placed.attach(stream, activations)
    if not engine.new and engine.blob:
        placed.load_job_state(engine.blob)
    placed.forward_begins()


def _source(part: ModulePart, given: Mapping[str, Tensor]) -> Source:
    tensors = dict(part.params)

    def source(spec: ParamSpec, what: str, start: int, stop: int) -> np.ndarray | None:
        if what != MASTER:
            return None
        if spec.name in given:
            return _as(given[spec.name].read(start, stop), given[spec.name].dtype, spec)
        flat = tensors[spec.name].detach().reshape(-1)[start:stop]
        return _as(as_numpy(flat), NAMES[flat.dtype], spec)

    return source


def _check_weights(given: Mapping[str, Tensor], table: ChunkTable) -> None:
    lacking = [p for p in table.params if p.name not in given]
    wrong = [p for p in table.params if p.name in given and tuple(given[p.name].shape) != p.shape]
    if found := lacking or wrong:
        name = found[0].name
        raise ConfigError(
            f"the weights do not fit the model: {len(lacking)} of {len(table.params)} tensors are"
            f" absent, {len(wrong)} have another shape; {name!r} is"
            f" {tuple(given[name].shape) if wrong is found else 'absent'}, the model has"
            f" {found[0].shape}",
            hint="the directory's config.json says which model it is",
        )


def _as(values: np.ndarray, dtype: str, spec: ParamSpec) -> np.ndarray:
    """`values` of `dtype` as the store wants them: fp32 masters, a frozen parameter in the
    dtype it travels in."""
    want = "fp32" if spec.trainable else spec.dtype
    if dtype == want:
        return values
    if "fp64" in (dtype, want) or dtype not in DTYPES:
        raise ConfigError(f"parameter {spec.name!r} is {dtype}, the store wants {want}")
    out: np.ndarray = np.empty(values.size, np.float32 if want == "fp32" else np.uint16)
    cast(values, dtype, out, want)
    return out
