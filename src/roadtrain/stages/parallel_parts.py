"""What a process's part of a parallel training is made of: process groups over chosen networks, the
stage's optimizer, the pipeline."""

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
from roadtrain.stages.networks import CONTROL, stated
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
WHAT = {GroupKind.ACTIVATIONS: FORWARD, GroupKind.GRADIENTS: BACKWARD}


@dataclass(frozen=True)
class Joined:
    """A process among the others of a job."""

    rank: int
    groups: Groups
    layout: StageLayout
    processes: ProcessGroups
    control: ControlLinks
    options: ParallelOptions
    device: torch.device
    rule: str  # the name of the optimizer's class, which a snapshot tells
    start: str  # the name of this start, another one for each

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
) -> Joined:
    """Choose a network for every group, prove that it works, make the process groups and the links
    of all processes to all, and give this start a name. rule: as in Joined. Collective. Raises
    ConfigError where a group has no network in common, PeerError where one does not work."""
    every = [*groups.to_create, *layout.shared_groups()]
    hosts = stated(meeting.hosts, options.networks)
    networks = preflight(meeting, every, hosts, say=report)
    deadline_s = options.deadline_s
    start_processes(networks[CONTROL], meeting.store, meeting.rank, meeting.world_size, deadline_s)
    processes = make_process_groups(
        every, networks, deadline_s, device_type=device.type, say=report
    )
    places = []
    for rank in range(groups.world_size):
        at = groups.position(rank)
        role = f"stage {at.stage}, replica {at.replica}"
        places.append(RankPlace(groups.cluster(rank), groups.host(rank), role))
    control = ControlLinks(processes.control, processes.replies, places, deadline_s)
    start = control.same(lambda: uuid.uuid4().hex, "the name of this start")  # agents have none
    return Joined(meeting.rank, groups, layout, processes, control, options, device, rule, start)


class UserOptimizer:
    """The user's optimizer, and the parameters of the whole model that its groups were made of.
    Raises ConfigError for one of other parameters, and one that has taken steps, also later, where
    it loads the state of such a one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, report: Report) -> None:
        groups_of(model, optimizer, report)
        check_fresh(optimizer)
        self.optimizer = optimizer
        self._groups = optimizer.param_groups
        self._whole = [list(group["params"]) for group in self._groups]
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """torch has put other groups in the place of those that the stages read."""
        for group, loaded in zip(self._groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = self._groups
        check_fresh(optimizer)

    @property
    def rule(self) -> str:
        return type(self.optimizer).__name__

    def keep(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, whose groups have those parameters that `model` has."""
        own = set(model.parameters())
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = [p for p in whole if p in own]
        return self.optimizer


def make_stage_optimizer(
    joined: Joined,
    stage_model: StageModel,
    optimizer: torch.optim.Optimizer,
    report: Report,
) -> StageOptimizer:
    """What updates this rank's stage: placed, or with its state cut over the data group."""
    stage = joined.position.stage
    if stage in joined.options.stores:
        return placed_stage(joined, stage_model, optimizer)
    split = split_layers(joined, stage_model)
    if split is not None:
        report(f"stage {stage}: {split}")
    sums, group = None, joined.groups.group_of(GroupKind.DATA, joined.rank)
    if joined.options.reducers:
        address = joined.processes.networks[group.name].card_of(joined.rank).address
        sums = connect_gradient_sum(joined.options, joined.control, address, report)
    masters = bring(stage_model.model, joined.device, joined.options.dtype)
    return ShardedOptimizer(
        stage_model.model,
        optimizer,
        joined.processes[group],
        shared=shared_copies(joined),
        blocks=stage_model.own_modules,
        masters=masters,
        options=ShardedOptions(
            sums=sums,
            overlap=joined.options.overlap,
            label=f"stage {stage}",
            split=split,
        ),
        report=report,
    )


def placed_stage(
    joined: Joined, stage_model: StageModel, optimizer: torch.optim.Optimizer
) -> PlacedStage:
    """The stage's state rests where the options say. Each stage says itself where that is."""
    at, options = joined.position, joined.options
    width = joined.groups.parallelism.replicas_of[at.stage]
    placed = place(
        stage_model.model,
        optimizer,
        store=options.stores[at.stage],
        dtype=options.dtype,
        blocks=stage_model.own_names,
        device=joined.device,
        deadline_s=options.deadline_s,
        report=partial(_of_stage, at.stage) if at.replica == 0 else silent,
        group=WorkerIdentity(session=joined.start).of_stage(at.stage, at.replica, width),
    )
    return PlacedStage(placed, shared_copies(joined))


def _of_stage(stage: int, line: str) -> None:
    print(f"stage {stage}: {line}", flush=True)


def silent(_: str) -> None: ...


def split_layers(joined: Joined, stage_model: StageModel) -> TensorParallel | None:
    """Every layer in parts over the replica's tensor group, where there are several ranks."""
    if joined.groups.parallelism.tp == 1:
        return None
    group = joined.processes[joined.groups.group_of(GroupKind.TENSOR, joined.rank)]
    mesh = DeviceMesh.from_group(group, joined.device.type, mesh_dim_names=("tp",))
    plan = joined.options.tensor_plan
    return tensor_parallel(stage_model.model, mesh, stage_model.own_names, plan)


def shared_copies(joined: Joined) -> list[tuple[tuple[str, ...], SharedCopies]]:
    """Names of parameters that this stage has in common with others, for each set of stages, in an
    order that is the same on all of them. Raises ConfigError where some of these stages are placed
    and some are not: they sum gradients in other ways."""
    at, out = joined.position, list[tuple[tuple[str, ...], SharedCopies]]()
    widths = joined.groups.parallelism.replicas_of
    for stages, names in joined.layout.shared().items():
        placed = [stage for stage in stages if stage in joined.options.stores]
        if placed and len(placed) < len(stages):
            raise ConfigError(
                f"stages {', '.join(map(str, stages))} share {names[0]!r}, and of these only"
                f" {', '.join(map(str, placed))} have a store",
                hint="give all of them a store, or none",
            )
        if at.stage in stages:
            group = joined.processes[joined.layout.shared_group(stages, at.tensor)]
            copies = SharedCopies(group, tuple(widths[s] for s in stages), joined.device)
            out.append((names, copies))
    return out


def bring(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Parameters in `dtype` (None: their own), and buffers, to the device. Returns the fp32 values
    of those that are narrower now, by name and where they were."""
    masters = {}
    for name, p in model.named_parameters():
        floating = dtype if dtype is not None and p.is_floating_point() else p.dtype
        if p.dtype == torch.float32 != floating:
            masters[name] = p.data
        p.data = p.data.to(device, floating)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return masters


def make_pipeline(joined: Joined, stage_model: StageModel, loss: LossFunction) -> Pipeline:
    """This rank's segments and its links to the stages beside it."""
    at, options, layout = joined.position, joined.options, joined.layout
    parallelism = joined.groups.parallelism
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
    return Pipeline(shape, parts, stage_links(joined), options.seed)


def stage_links(joined: Joined) -> StageLinks:
    groups, channels = joined.groups, dict[Channel, Any]()
    for number, group in enumerate(groups.boundaries):  # one for each direction
        if group in joined.processes:
            channels[number // len(WHAT), WHAT[group.kind]] = joined.processes[group]
    return StageLinks(channels, groups, joined.rank, joined.options.deadline_s)


def say_start(joined: Joined, cuts: Cuts, say: Report) -> None:
    """What the job is, and what of it is not as in one process (Rule 2)."""
    parallelism, micro = joined.groups.parallelism, joined.options.num_microbatches
    say(f"parallel: {parallelism}, {micro} micro-batches a step, stages of {joined.layout}")
    if parallelism.tp > 1 and cuts.draws:
        say(
            f"tensor: the model draws random numbers (dropout), and each of the {parallelism.tp}"
            " tensor ranks draws its own inside split layers: losses are not those of another tp"
        )
