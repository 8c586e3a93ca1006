"""The start of a placed model: its first values are stored, or its last committed ones resumed;
then the block stream takes over its blocks.

Values come from the model (tensor by tensor), from safetensors in Hugging Face layout, or, for a
model on `meta`, from its own initialisation, one block at a time; so the whole model never exists
beside the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from torch import nn

from roadtrain.chunks import ParamSpec
from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import cast
from roadtrain.placement.optimizer import PlacedOptimizer
from roadtrain.placement.session_plan import SessionPlan
from roadtrain.storage.convert import MASTER, Source
from roadtrain.storage.safetensors_io import Tensor, open_dir
from roadtrain.streaming.activations import Activations
from roadtrain.streaming.init import materialize, release
from roadtrain.streaming.split import DTYPES, NAMES, ModulePart, Split, as_numpy
from roadtrain.streaming.stream import BlockStream


def start(
    placed: PlacedOptimizer,
    parts: Split,
    plan: SessionPlan,
    given: Mapping[str, Tensor],
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Fills the store if it is new, attaches the block stream to the model, and resumes what is
    committed; afterwards `placed` trains. `given`: tensors that the first values come from."""
    model, session, device = placed.model, placed.session, plan.device
    _fill(placed, parts, plan, given, init)
    directories = session.store_plan.directories
    scratch = directories[0] if directories else None
    activations = Activations(plan.budgets.worker.activation_bytes, scratch, device)
    stream = BlockStream(model, parts, plan.table, placed, activations, device, placed.pass_ended)
    release(parts.root.params)
    for b in model.buffers():
        b.data = b.data.to(device)
    session.start(placed.job_state())
    stream.attach()
    stream.root_views(session.worker.root.tensor)
    placed.attach(stream, activations)
    if not session.new and session.blob:
        placed.load_job_state(session.blob)
    placed.forward_begins()


def _fill(
    placed: PlacedOptimizer,
    parts: Split,
    plan: SessionPlan,
    given: Mapping[str, Tensor],
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Block by block: values are made or read, go to a new store, and leave the model."""
    session, table = placed.session, plan.table
    store_plan = session.store_plan
    rules_of_residuals = len(store_plan.rules) - len(placed.rules)
    hyperparameters = [*placed.hyperparameters().values()] + [()] * rules_of_residuals
    on_meta = any(t.is_meta for t in (*placed.model.parameters(), *placed.model.buffers()))
    for block, part in zip(table.blocks, (parts.root, *parts.blocks)):
        if on_meta:
            materialize(part, parts, init, values=session.new and not given, given=given)
        if session.new:
            session.fill(block, _source(part, given), hyperparameters)
        if block.index:
            release(part.params)
        session.worker.heap.trim(at_once=True)
    if session.new:
        for residual_block in store_plan.table.blocks[len(table.blocks) :]:
            session.fill(residual_block, lambda *_: None, hyperparameters)


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


def open_weights(
    weights: str | Path, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Tensor]:
    """The tensors in `weights`. shapes: of the parameters that need one, by name. Raises
    ConfigError where they do not fit the model."""
    given = open_dir(weights)
    lacking = [name for name in shapes if name not in given]
    wrong = [n for n, shape in shapes.items() if n in given and tuple(given[n].shape) != shape]
    if found := lacking or wrong:
        name = found[0]
        raise ConfigError(
            f"the weights do not fit the model: {len(lacking)} of {len(shapes)} tensors are"
            f" absent, {len(wrong)} have another shape; {name!r} is"
            f" {tuple(given[name].shape) if wrong is found else 'absent'}, the model has"
            f" {shapes[name]}",
            hint="the directory's config.json says which model it is",
        )
    return given


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
