"""Create the objects that a process needs for training in stages: process groups over the chosen
networks, the stage's optimizer, and the pipeline."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from roadtrain.environment import WorkerIdentity
from roadtrain.errors import ConfigError
from roadtrain.placement.place import check_fresh, groups_of, place
from roadtrain.stages.control_links import ControlLinks, RankPlace
from roadtrain.stages.cuts import Cuts
from roadtrain.stages.data_group import SharedCopies
from roadtrain.stages.gradient_sum import connect_gradient_sum
from roadtrain.stages.layout import StageLayout
from roadtrain.stages.links import Channel, StageLinks
from roadtrain.stages.networks import CONTROL, override
from roadtrain.stages.parallel_options import ParallelOptions
from roadtrain.stages.parallelism import RankPosition
from roadtrain.stages.pipeline import Pipeline
from roadtrain.stages.placed_stage import PlacedStage
from roadtrain.stages.preflight import preflight
from roadtrain.stages.process_groups import ProcessGroups, make_process_groups, start_processes
from roadtrain.stages.protocol.pipeline import BACKWARD, FORWARD, PipelineShape
from roadtrain.stages.rank_groups import GroupKind, Groups
from roadtrain.stages.rank_meeting import RankMeeting
from roadtrain.stages.sharded_optimizer import ShardedOptimizer, ShardedOptions
from roadtrain.stages.stage_model import StageModel
from roadtrain.stages.stage_optimizer import StageOptimizer
from roadtrain.stages.stage_part import LossFunction, StagePart
from roadtrain.stages.tensor import TensorParallel, tensor_parallel

Report = Callable[[str], None]
DIRECTION = {GroupKind.ACTIVATIONS: FORWARD, GroupKind.GRADIENTS: BACKWARD}


@dataclass(frozen=True)
class RankContext:
    """The groups, connections and options that the optimizer and pipeline of one rank have in
    common."""

    rank: int
    groups: Groups
    layout: StageLayout
    processes: ProcessGroups
    control: ControlLinks
    options: ParallelOptions
    device: torch.device
    rule: str  # class name of the user's optimizer, which snapshots contain
    start: str  # unique id of this start of the job

    @property
    def position(self) -> RankPosition:
        return self.groups.position(self.rank)


def join(
    meeting: RankMeeting,
    groups: Groups,
    layout: StageLayout,
    options: ParallelOptions,
    device: torch.device,
    rule: str,
    report: Report,
) -> RankContext:
    """Choose and test a network for every group, create the process groups and control links,
    connect the stages, and agree on an id of this start of the job. Collective.

    rule: the class name of the user's optimizer. Raises ConfigError if the hosts of a group have no
    network in common, and PeerError if a network does not work.
    """
    every = [*groups.to_create, *layout.shared_groups()]
    hosts = override(meeting.hosts, options.networks)
    networks = preflight(meeting, every, hosts, say=report)
    me, deadline_s = meeting.rank, options.deadline_s
    start_processes(networks[CONTROL], meeting.store, me, meeting.world_size, deadline_s)
    processes = make_process_groups(every, networks, deadline_s, device=device, say=report)
    places = []
    for rank, host in enumerate(groups.host_of):
        at = groups.position(rank)
        role = f"stage {at.stage}, replica {at.replica}"
        places.append(RankPlace(host.cluster, host.host, role))
    control = ControlLinks(processes.control, processes.replies, places, deadline_s)
    # launchers do not provide an id
    start = control.same(lambda: uuid.uuid4().hex, "the id of this start")
    context = RankContext(me, groups, layout, processes, control, options, device, rule, start)
    stage_links(context).connect()
    return context


class UserOptimizer:
    """The user's optimizer, and its original parameter groups over the whole model.

    Raises ConfigError if the optimizer has parameters that are not in the model, or has taken
    steps; so does its `load_state_dict` for the state of an optimizer that has taken steps.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, report: Report) -> None:
        groups_of(model, optimizer, report)
        check_fresh(optimizer)
        self.optimizer, self.rule = optimizer, type(optimizer).__name__
        self._groups = optimizer.param_groups
        self._whole = [list(group["params"]) for group in self._groups]
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy loaded settings into the original dictionaries of the parameter groups, which the
        stages read."""
        for group, loaded in zip(self._groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = self._groups
        check_fresh(optimizer)

    def keep(self, model: nn.Module) -> torch.optim.Optimizer:
        """Limit each parameter group to its original parameters that are in `model`, and return the
        optimizer."""
        own = set(model.parameters())
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = [p for p in whole if p in own]
        return self.optimizer


def make_stage_optimizer(
    context: RankContext,
    stage_model: StageModel,
    optimizer: torch.optim.Optimizer,
    report: Report,
) -> StageOptimizer:
    """Create the optimizer of this rank's stage: a PlacedStage if the stage has a store, otherwise
    a ShardedOptimizer over the data group."""
    stage = context.position.stage
    if stage in context.options.stores:
        return placed_stage(context, stage_model, optimizer)
    split = split_layers(context, stage_model)
    if split is not None:
        report(f"stage {stage}: {split}")
    sums, group = None, context.groups.group_of(GroupKind.DATA, context.rank)
    if context.options.reducers:
        address = context.processes.networks[group.name].card_of(context.rank).address
        sums = connect_gradient_sum(context.options, context.control, address, report)
    masters = cast_and_move(stage_model.model, context.device, context.options.dtype)
    return ShardedOptimizer(
        stage_model.model,
        optimizer,
        context.processes[group],
        shared=shared_copies(context),
        blocks=stage_model.own_modules,
        masters=masters,
        options=ShardedOptions(
            sums=sums,
            overlap=context.options.overlap,
            label=f"stage {stage}",
            split=split,
        ),
        report=report,
    )


def placed_stage(
    context: RankContext, stage_model: StageModel, optimizer: torch.optim.Optimizer
) -> PlacedStage:
    """Place the stage in its store. The stage's first rank prints the reports of `place`."""
    at, options = context.position, context.options
    width = context.groups.parallelism.replicas_of[at.stage]
    placed = place(
        stage_model.model,
        optimizer,
        store=options.stores[at.stage],
        dtype=options.dtype,
        blocks=stage_model.own_names,
        device=context.device,
        deadline_s=options.deadline_s,
        report=partial(print, f"stage {at.stage}:", flush=True) if at.replica == 0 else silent,
        group=WorkerIdentity(session=context.start).of_stage(at.stage, at.replica, width),
    )
    return PlacedStage(placed, shared_copies(context))


def silent(_: str) -> None: ...


def split_layers(context: RankContext, stage_model: StageModel) -> TensorParallel | None:
    """Split the stage's layers over the ranks of the replica's tensor group. Return None if tp is
    1."""
    if context.groups.parallelism.tp == 1:
        return None
    group = context.processes[context.groups.group_of(GroupKind.TENSOR, context.rank)]
    mesh = DeviceMesh.from_group(group, context.device.type, mesh_dim_names=("tp",))
    plan = context.options.tensor_plan
    return tensor_parallel(stage_model.model, mesh, stage_model.own_names, plan)


def shared_copies(context: RankContext) -> list[tuple[tuple[str, ...], SharedCopies]]:
    """Return pairs (names of parameters that this stage shares, group of the ranks that have them),
    one for each set of stages that share parameters, in the same order in all of these stages.

    Raises ConfigError if only some stages of a set have a store, because these sum gradients in
    another way.
    """
    at, out = context.position, list[tuple[tuple[str, ...], SharedCopies]]()
    widths = context.groups.parallelism.replicas_of
    for stages, names in context.layout.shared().items():
        placed = [stage for stage in stages if stage in context.options.stores]
        if placed and len(placed) < len(stages):
            raise ConfigError(
                f"stages {', '.join(map(str, stages))} share parameter {names[0]!r}, but not all"
                f" of these stages have a store: only {', '.join(map(str, placed))}",
                hint="give a store to all of these stages, or to none",
            )
        if at.stage in stages:
            group = context.processes[context.layout.shared_group(stages, at.tensor)]
            copies = SharedCopies(group, tuple(widths[s] for s in stages), context.device)
            out.append((names, copies))
    return out


def cast_and_move(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Cast floating-point parameters to `dtype` (unless it is None), and move parameters and
    buffers to `device`. Return the previous fp32 values of narrowed parameters by name, on their
    previous device."""
    masters = {}
    for name, p in model.named_parameters():
        floating = dtype if dtype is not None and p.is_floating_point() else p.dtype
        if p.dtype == torch.float32 != floating:
            masters[name] = p.data
        p.data = p.data.to(device, floating)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return masters


def make_pipeline(context: RankContext, stage_model: StageModel, loss: LossFunction) -> Pipeline:
    """Create the pipeline of this rank, with its segments and its links to neighboring stages."""
    at, options, layout = context.position, context.options, context.layout
    parallelism = context.groups.parallelism
    shape = PipelineShape(
        at.stage,
        at.replica,
        parallelism.replicas_of,
        parallelism.virtual_stages,
        options.num_microbatches,
    )
    parts = [
        StagePart(stage_model, segment, loss, options.activations, shape.slots)
        for segment in layout.segments_of(at.stage)
    ]
    return Pipeline(shape, parts, stage_links(context), options.seed)


def stage_links(context: RankContext) -> StageLinks:
    groups, channels = context.groups, dict[Channel, Any]()
    # each boundary has two groups, one per direction
    for number, group in enumerate(groups.boundaries):
        if group in context.processes:
            channels[number // len(DIRECTION), DIRECTION[group.kind]] = context.processes[group]
    return StageLinks(channels, groups, context.rank, context.options.deadline_s, context.device)


def report_start(context: RankContext, cuts: Cuts, say: Report) -> None:
    """Report the parallelism, and whether results depend on tp because the model draws random
    numbers (Rule 2)."""
    parallelism, micro = context.groups.parallelism, context.options.num_microbatches
    say(f"parallel: {parallelism}, {micro} micro-batches a step, stages of {context.layout}")
    if parallelism.tp > 1 and cuts.draws:
        say(
            f"tensor: the model draws random numbers (dropout), and each of the {parallelism.tp}"
            " tensor ranks draws its own inside split layers: losses depend on tp"
        )
