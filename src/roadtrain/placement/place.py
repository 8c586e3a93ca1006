"""place(): the user's one line. Their model keeps its modules, their optimizer its class and
groups; parameters and optimizer state move to servers, blocks are fetched as they run.

Assumes: what RANK and WORLD_SIZE say, where there are several workers. Does NOT start processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import nn

from roadtrain.chunks import MAX_CHUNK, SEGMENT, ParamSpec
from roadtrain.device.copies import device_of
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import cast
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.options.check import (
    Deadline,
    ExistingPath,
    PathLike,
    PositiveInt,
    Size,
    check_options,
)
from roadtrain.options.lossy import Delay, Downcast, TopK
from roadtrain.options.names import unknown_name
from roadtrain.placement.job_state import HasState
from roadtrain.placement.optimizer import PlacedOptimizer, close_earlier
from roadtrain.placement.session_plan import (
    Report,
    Request,
    SessionPlan,
    keep_blocks,
    open_files,
    open_session,
    plan_session,
)
from roadtrain.placement.stores import Files, Memory, Servers, Store, store_of
from roadtrain.retry import undone_on_error
from roadtrain.servers.session import JobSession
from roadtrain.storage.convert import MASTER, Source
from roadtrain.storage.generation import OpenedStore
from roadtrain.storage.mark import Mark
from roadtrain.storage.safetensors_io import Tensor, open_weights
from roadtrain.streaming.init import materialize
from roadtrain.streaming.released import has_released_value, release
from roadtrain.streaming.split import (
    DTYPES,
    NAMES,
    ComputeDtype,
    ModulePart,
    Split,
    as_numpy,
    split,
    table,
)

ChunkElements = Annotated[int, Field(ge=SEGMENT, le=MAX_CHUNK, multiple_of=SEGMENT)]


def place(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    store: PathLike | Sequence[PathLike] | Files | Memory | Servers | None = None,
    compress: TopK | Downcast | None = None,
    delay: Delay | None = None,
    host_budget: Size | None = None,
    device_budget: Size | None = None,
    dtype: ComputeDtype | None = None,
    blocks: str | Sequence[str] | None = None,
    backwards_per_step: PositiveInt | None = None,
    chunk_elements: ChunkElements = MAX_CHUNK,
    device: torch.device | str | None = None,
    weights: ExistingPath | None = None,
    init: Callable[[nn.Module], None] | None = None,
    extra: Mapping[str, HasState] | None = None,
    mark: Mark | None = None,
    deadline_s: Deadline = 600.0,
    report: Report = print,
    group: WorkerIdentity | None = None,
    **unknown: Any,
) -> PlacedOptimizer:
    """Move `model`'s parameters and `optimizer`'s state to servers; returns the optimizer to use
    from now on.

    store: where they rest: a directory or several (as Files), Files, Memory (as None) or Servers.
    compress: TopK or Downcast of the gradients (None: they go as they are).
    delay: how many updates a step's parameters may lack (None: none).
    host_budget: host bytes for everything that roadtrain keeps in memory ("900MiB"; None: half of
    what is free).
    device_budget: bytes of the accelerator for parameters and gradients that are there for a
    moment; what a block's own forward and backward allocate is not in it (None: no bound).
    dtype: what parameters travel and compute in (None: their own); masters and state are fp32.
    blocks: names or patterns of the blocks (None: found).
    backwards_per_step: None, updates begin at step(); N promises that step() follows every N-th
    backward pass, without clipping or loss scaling, and a block is updated as soon as its last
    gradient is in.
    chunk_elements: of the units that are transferred and stored.
    device: where blocks run ("cuda": each worker's own, by LOCAL_RANK; None: where the model is).
    weights: a directory of safetensors in Hugging Face layout that the first values come from.
    init: initialises a module of a model built on `meta`.
    extra: objects with state_dict/load_state_dict that are committed and resumed with each step.
    mark: what a run directory knows of its store (storage/mark.py): another store than it names,
    an older one, or none, is refused before anything is changed.
    deadline_s: after which a wait is an error that says for whom (Rule 5).
    report: hears each line that is printed.
    group: which of the servers' workers this process is (None: as torchrun says it); the ranks of
    a pipeline's stage are a group of their own.

    Raises UserError (ConfigError, ModelError, RuleError, BudgetError) before anything is changed,
    StoreError (also ForkedError, where servers went on without each other, and StaleError, where
    later steps are known of).
    """
    check_options(place, locals())
    check_fresh(optimizer)
    for name in unknown:
        raise _unknown(name)
    store = store_of(store)
    request = Request(
        store,
        compress,
        delay,
        host_budget,
        device_budget,
        backwards_per_step,
        chunk_elements,
        deadline_s,
        _workers(store, group or WorkerIdentity.of_environment(), report),
        report,
    )
    device = device_of(model, device, report)
    parts = split(model, blocks)
    groups = groups_of(model, optimizer, report)
    rules = rules_for(optimizer, report)
    close_earlier(request, model, all_of_model=False)
    plan = plan_session(request, device, table(parts, groups, dtype, chunk_elements), rules)
    shapes = {spec.name: spec.shape for spec in plan.table.params}
    given = {} if weights is None else open_weights(weights, shapes)
    plan, opened = open_files(plan, mark)
    with nullcontext() if opened is None else undone_on_error(opened.close):
        if weights is None:
            _check_has_values(model, opened)
        close_earlier(request, model, all_of_model=True)
        session = open_session(plan, opened, mark)
    placed = PlacedOptimizer(model, optimizer, parts, plan, session, extra or {})
    with undone_on_error(placed.end):
        _fill(placed, parts, plan, given, init)
        placed.start(parts, plan)
        _adopt(mark, plan, session, placed.steps_done)
    _say_placed(plan, session, placed.steps_done)
    return placed


def _unknown(name: str) -> ConfigError:
    """The error for a keyword that place() does not have."""
    for kind in (Files, Servers):
        if name in kind.__dataclass_fields__:
            return ConfigError(
                f"`{name}` is an option of {kind.__name__}",
                hint=f"place(..., store={kind.__name__}(..., {name}=...))",
            )
    return unknown_name("option of place", name, inspect.signature(place).parameters)


def _workers(store: Store, group: WorkerIdentity, report: Report) -> WorkerIdentity:
    """The workers that train together with this one: those that share servers."""
    if isinstance(store, Servers):
        return group
    if others := group.workers - 1:
        report(
            f"WORLD_SIZE says {others} more worker(s): without servers each trains by itself,"
            " nothing is averaged"
        )
    return WorkerIdentity()


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, report: Report
) -> dict[nn.Parameter, int]:
    """Parameter -> its group of the optimizer. Raises ConfigError for one that is not the
    model's."""
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    mine = set(model.parameters())
    strangers = [p for p in groups if p not in mine]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} of the optimizer's {len(groups)} parameters are not in the model "
            f"(the first has shape {tuple(strangers[0].shape)})",
            hint="make the optimizer from the parameters of this model",
        )
    if outside := [n for n, p in model.named_parameters() if p.requires_grad and p not in groups]:
        report(
            f"{len(outside)} parameters are in no parameter group ({outside[0]!r} is the first):"
            " they stay as they are and get no gradient, so that clipping does not count theirs"
        )
    return groups


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for an optimizer that is placed, or whose state would be lost."""
    if isinstance(optimizer, PlacedOptimizer):
        raise ConfigError(
            "this optimizer is placed already",
            hint="give place() the optimizer that it was made from",
        )
    if any(state and float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            f"this {type(optimizer).__name__} has taken steps: its state would be lost",
            hint="place it before the first step; optimizer.state.clear() begins anew",
        )


def _check_has_values(model: nn.Module, opened: OpenedStore | None) -> None:
    """ConfigError where neither the model nor a store holds the first values."""
    gone = [n for n, p in model.named_parameters() if has_released_value(p)]
    if gone and opened is None:
        raise ConfigError(
            f"{len(gone)} of the model's parameters hold no values ({gone[0]!r}): it is placed,"
            " or was",
            hint=(
                "build the model anew, or name the store that holds its values, or give"
                " weights=DIRECTORY"
            ),
        )


def _fill(
    placed: PlacedOptimizer,
    parts: Split,
    plan: SessionPlan,
    given: Mapping[str, Tensor],
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Block by block, values are made or read, go to a new store, and leave the model, so that the
    whole model never exists beside the store. They come from `given`, from the model, or, where it
    is on `meta`, from `init` or its own initialisation."""
    session, groups = placed.session, placed.param_groups
    on_meta = any(t.is_meta for t in (*placed.model.parameters(), *placed.model.buffers()))
    for block, part in zip(plan.table.blocks, (parts.root, *parts.blocks)):
        if on_meta:
            materialize(part, parts, init, values=session.new and not given, loaded=given)
        if session.new:
            session.fill(block, _source(part, given), groups)
        if block.index:
            release(part.params)
    if session.new:
        for residual_block in session.store_plan.table.blocks[len(plan.table.blocks) :]:
            session.fill(residual_block, lambda *_: None, groups)
    release(parts.root.params)


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


def _adopt(mark: Mark | None, plan: SessionPlan, session: JobSession, step: int) -> None:
    """The run directory's mark names the store that was opened or made."""
    if mark is not None and plan.request.group.rank == 0:
        mark.adopt(
            "" if plan.request.in_memory else session.meta.job, step, session.servers.history
        )


def _say_placed(plan: SessionPlan, session: JobSession, step: int) -> None:
    """The last lines that place() prints."""
    request, group = plan.request, plan.request.group
    match request.store:
        case Files():
            where = f"files in {', '.join(map(str, plan.store_plan.directories))}"
        case Servers() as servers:
            where = (
                f"{len(servers.addresses)} server(s) {session.servers.rests}, replicas ="
                f" {servers.replicas}, worker {group.rank} of {group.workers}"
            )
            spare = plan.budgets.worker.kept if servers.buffering == "auto" else 0
            request.report(keep_blocks(session.worker, spare))
        case Memory():
            where = "RAM: it is lost when this process ends"
    blocks = len(plan.table.blocks) - 1
    line = f"placed {blocks} blocks and the root block; state on {where}; step {step}"
    # without a host budget, whatever is free bounds it
    bound = "" if request.host_budget is None else f"; {plan.budgets}"
    request.report(line + bound)
