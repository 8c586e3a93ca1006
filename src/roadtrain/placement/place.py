"""place(): move a model's parameters and its optimizer's state to files, memory or servers.

With several workers, RANK and WORLD_SIZE must be set. Starts no processes.
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
from roadtrain.device.choice import device_of
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
    open_files,
    open_session,
    plan_session,
)
from roadtrain.placement.stores import Files, Memory, Servers, store_of
from roadtrain.retry import slow_work, undone_on_error
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
    compile: bool = False,
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
    """Move a model's parameters and its optimizer's state to files, memory or servers.

    After the call, the model fetches each block when the block runs. The returned optimizer
    replaces `optimizer` in the training loop. If `store` already holds this job, training resumes.
    The store holds trained parameters and optimizer state in fp32.

    Args:
        model: The model to train. The model keeps its modules, but its parameters no longer hold
            values.
        optimizer: An optimizer over parameters of `model` that has not taken a step.
        store: The place for parameters and optimizer state: one or several directories (the same as
            `Files`), `Files`, `Memory` or `Servers`. None is the same as `Memory()`: the memory of
            this process.
        compress: The compression of gradients, `TopK` or `Downcast`. If None, gradients are not
            compressed.
        delay: A `Delay`: a step may compute with parameters in which the latest updates are still
            missing. If None, each step computes with all earlier updates.
        host_budget: Host memory for all buffers of roadtrain in bytes, as a number or as text such
            as "900MiB". If None, half of the free memory is used.
        device_budget: Accelerator memory for fetched parameters and their gradients in bytes,
            without the memory that forward and backward allocate. If None, the free memory without
            a quarter of all memory; the number is reported.
        dtype: The dtype in which parameters are fetched and used for computing. If None, each
            parameter keeps its own dtype.
        blocks: Names or patterns of the modules that are the blocks. If None, the blocks are
            detected.
        compile: Whether each block runs under torch.compile, in forward and in the recomputation.
            torch.compile(model) compiles only the root block. The results are those of plain
            training in which each block's forward is compiled.
        backwards_per_step: A promise that step() follows after this number of backward passes, and
            that gradients are neither clipped nor scaled. Each block is then updated as soon as its
            last gradient is complete. If None, updates begin at step().
        chunk_elements: The number of elements in a chunk, the unit of transfer and storage.
        device: The device on which the blocks compute; "cuda" is the GPU of LOCAL_RANK. If None,
            the blocks compute on the device of the model.
        weights: A directory of safetensors files in Hugging Face layout with the initial values.
        init: For a model that was built on the `meta` device: a function that initializes the
            parameters of a module, called with one module at a time.
        extra: Objects with state_dict() and load_state_dict(), by name. Their states are committed
            with each step, and restored when a step is resumed.
        mark: The run directory's record of its store (storage/mark.py). A store that is missing,
            different or at an earlier step than recorded is refused.
        deadline_s: The number of seconds after which a wait fails with DeadlineError.
        report: A function that is called with each line to be printed.
        group: The rank of this worker and the number of workers that share the servers. If None,
            both are read from the environment variables of torchrun. The workers of each pipeline
            stage form a separate group. Several workers need `Servers`.
        **unknown: Always refused. The error names the option that was probably meant.

    Returns:
        The optimizer to call step() on. Its `steps_done` is the step of the store, or 0 for a new
        store.

    Raises:
        UserError: The model, the optimizer or an option is wrong (ConfigError, ModelError,
            RuleError, BudgetError). Nothing was changed.
        StoreError: The store is damaged, belongs to another job (ForeignError), lacks steps that
            were committed (StaleError), or its servers were trained separately (ForkedError).
        PeerError: A server cannot be reached or refuses this worker.
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
        compile,
        deadline_s,
        group or WorkerIdentity.of_environment(),
        report,
    )
    device = device_of(model, device, report)
    parts = split(model, blocks)
    groups = groups_of(model, optimizer, report)
    rules = rules_for(optimizer, report)
    close_earlier(request, model, all_of_model=False)
    plan = plan_session(request, device, table(parts, groups, dtype, chunk_elements), rules)
    shapes = {spec.name: spec.shape for spec in plan.table.params}
    initial = {} if weights is None else open_weights(weights, shapes)
    plan, opened = open_files(plan, mark)
    with nullcontext() if opened is None else undone_on_error(opened.close):
        if weights is None:
            _check_has_values(model, opened)
        close_earlier(request, model, all_of_model=True)
        session = open_session(plan, opened, mark)
    placed = PlacedOptimizer(model, optimizer, parts, plan, session, extra or {})
    with undone_on_error(placed.end):
        _fill(placed, parts, plan, initial, init)
        placed.start(parts, plan)
        _adopt(mark, plan, session, placed.steps_done)
    _say_placed(plan, session, placed.steps_done)
    return placed


def _unknown(name: str) -> ConfigError:
    for kind in (Files, Servers):
        if name in kind.__dataclass_fields__:
            return ConfigError(
                f"`{name}` is an option of {kind.__name__}",
                hint=f"place(..., store={kind.__name__}(..., {name}=...))",
            )
    return unknown_name("option of place", name, inspect.signature(place).parameters)


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, report: Report
) -> dict[nn.Parameter, int]:
    """Map each parameter to the number of its parameter group.

    Raises:
        ConfigError: A parameter of the optimizer is not in the model.
    """
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    mine = set(model.parameters())
    strangers = [p for p in groups if p not in mine]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} of the optimizer's {len(groups)} parameters are not in the model "
            f"(the first has shape {tuple(strangers[0].shape)})",
            hint="create the optimizer with the parameters of this model",
        )
    if outside := [n for n, p in model.named_parameters() if p.requires_grad and p not in groups]:
        report(
            f"{len(outside)} parameters are in no parameter group (the first is {outside[0]!r}):"
            " these parameters are not trained, and clipping does not count their gradients"
        )
    return groups


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if `optimizer` is already placed, or has state that would be lost."""
    if isinstance(optimizer, PlacedOptimizer):
        raise ConfigError(
            "this optimizer is already placed",
            hint="pass the original torch optimizer to place(), not the result of place()",
        )
    if any(state and float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            f"this {type(optimizer).__name__} has already taken steps: its state would be lost",
            hint="call place() before the first step, or drop the state: optimizer.state.clear()",
        )


def _check_has_values(model: nn.Module, opened: OpenedStore | None) -> None:
    """Raise ConfigError if neither the model nor the store `opened` holds the initial values."""
    empty = [n for n, p in model.named_parameters() if has_released_value(p)]
    if empty and opened is None:
        raise ConfigError(
            f"{len(empty)} of the model's parameters hold no values (the first is {empty[0]!r}),"
            " because the model is or was placed",
            hint="build the model again, name the store with its values, or pass weights=DIRECTORY",
        )


def _fill(
    placed: PlacedOptimizer,
    parts: Split,
    plan: SessionPlan,
    initial: Mapping[str, Tensor],
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Write the initial values to a new store block by block, and release the memory of the model's
    parameters.

    A model on `meta` is thus never in memory as a whole. Values that are not in `initial` come from
    the model, or, on `meta`, from `init` or the modules' own initialization.
    """
    session, groups = placed.session, placed.param_groups
    on_meta = any(t.is_meta for t in (*placed.model.parameters(), *placed.model.buffers()))
    pairs = list(zip(plan.table.blocks, (parts.root, *parts.blocks)))
    what = "writing the first values" if session.new else "preparing the blocks"
    with slow_work(what, len(pairs), plan.request.report) as advance:
        for block, part in pairs:
            if on_meta:
                materialize(part, parts, init, values=session.new and not initial, loaded=initial)
            if session.new:
                session.fill(block, _source(part, initial), groups)
            if block.index:
                release(part.params)
            advance(1)
    if session.new:
        for residual_block in session.store_plan.table.blocks[len(plan.table.blocks) :]:
            session.fill(residual_block, lambda *_: None, groups)
    release(parts.root.params)


def _source(part: ModulePart, initial: Mapping[str, Tensor]) -> Source:
    tensors = dict(part.params)

    def source(spec: ParamSpec, what: str, start: int, stop: int) -> np.ndarray | None:
        if what != MASTER:
            return None
        if spec.name in initial:
            return _as(initial[spec.name].read(start, stop), initial[spec.name].dtype, spec)
        flat = tensors[spec.name].detach().reshape(-1)[start:stop]
        return _as(as_numpy(flat), NAMES[flat.dtype], spec)

    return source


def _as(values: np.ndarray, dtype: str, spec: ParamSpec) -> np.ndarray:
    """Cast `values` from `dtype` to fp32 for a trained parameter, or to the compute dtype for a
    frozen one."""
    want = "fp32" if spec.trainable else spec.dtype
    if dtype == want:
        return values
    if "fp64" in (dtype, want) or dtype not in DTYPES:
        raise ConfigError(f"parameter {spec.name!r} has dtype {dtype}, but must have {want}")
    out: np.ndarray = np.empty(values.size, np.float32 if want == "fp32" else np.uint16)
    cast(values, dtype, out, want)
    return out


def _adopt(mark: Mark | None, plan: SessionPlan, session: JobSession, step: int) -> None:
    if mark is not None and plan.request.group.rank == 0:
        mark.adopt(
            "" if plan.request.in_memory else session.meta.job, step, session.servers.history
        )


def _say_placed(plan: SessionPlan, session: JobSession, step: int) -> None:
    """Report where the training state is kept, and its step."""
    request, group = plan.request, plan.request.group
    match request.store:
        case Files():
            where = f"files in {', '.join(map(str, plan.store_plan.directories))}"
        case Servers() as servers:
            where = (
                f"{len(servers.addresses)} server(s) {session.servers.rests}, replicas ="
                f" {servers.replicas}, worker {group.rank} of {group.workers}"
            )
            worker = session.worker
            kept = min(len(worker.order), len(worker.prefetch.slots))
            request.report(
                f"buffering: {kept} of {len(worker.order)} blocks are kept from forward to backward"
            )
        case Memory():
            where = "RAM (lost when this process ends)"
    blocks = len(plan.table.blocks) - 1
    line = f"placed {blocks} blocks and the root block; state on {where}; step {step}"
    # without a host budget, the free memory is the only limit
    bound = "" if request.host_budget is None else f"; {plan.budgets}"
    request.report(line + bound)
