"""parallelize(): a model trained over several hosts or clusters, in stages. The user's model keeps
its forward and its names, their optimizer its class and groups.

    options = ParallelOptions(Parallelism(pp=2, dp=2), num_microbatches=8)
    training = roadtrain.parallelize(model, optimizer, options,
                                     example=MicroBatch((), {"input_ids": x, "labels": x}))
    for number in range(steps):
        loss = training.step(lambda micro: MicroBatch((), {"input_ids": ..., "labels": ...}))

Every process calls it with the same model and options; torchrun starts them, one a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roadtrain.device.copies import own_device
from roadtrain.environment import launch_of
from roadtrain.errors import ModelError
from roadtrain.options.check import check_options
from roadtrain.stages.cuts import Cuts
from roadtrain.stages.layout import StageLayout
from roadtrain.stages.networks import stated
from roadtrain.stages.parallel_options import ParallelOptions
from roadtrain.stages.parallel_parts import (
    Joined,
    UserOptimizer,
    connect,
    join,
    make_pipeline,
    make_stage_optimizer,
    silent,
)
from roadtrain.stages.parallel_sizes import StageSizes
from roadtrain.stages.parallel_training import ParallelTraining
from roadtrain.stages.rank_groups import Groups
from roadtrain.stages.rank_meeting import meet
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_part import LossFunction
from roadtrain.stages.stage_values import fill
from roadtrain.streaming.split import split

Report = Callable[[str], None]


def own_loss(result: Any, batch: MicroBatch) -> torch.Tensor:
    """The loss that the model itself returns, as models of transformers do."""
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, torch.Tensor) and result.dim() == 0:
        loss = result
    if not isinstance(loss, torch.Tensor):
        raise ModelError(
            f"the model returned a {type(result).__name__} without a loss",
            hint="give parallelize(loss=...), a function of its result and the micro-batch",
        )
    return loss


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: ParallelOptions,
    *,
    example: MicroBatch,
    loss: LossFunction = own_loss,
    device: torch.device | str | None = None,
    report: Report = print,
) -> ParallelTraining:
    """Cut `model` into stages and train this process's part of it.

    model: whole, best built on `meta`; this process keeps its own stage's parameters. optimizer:
    the user's own, over the model's parameters. example: a micro-batch; its shapes are those of
    all. loss: of the model's result and the micro-batch, a scalar: the mean over the micro-batch.
    device: where this process computes ("cuda": its own, by LOCAL_RANK; None: CUDA where there is
    one). report: hears each line, on the first process; what another stage has to say of itself
    is printed by the first process of that stage.

    Raises ConfigError, ModelError before anything is trained, DeadlineError where a process or a
    network does not come (Rule 5).
    """
    check_options(parallelize, locals())
    launch = launch_of(os.environ)
    say = report if launch.rank == 0 else silent
    for line in options.say_lossy():
        say(line)
    users = UserOptimizer(model, optimizer, say)
    at = own_device(device or _default_device(), say)
    meeting = meet(
        launch,
        job=options.told(),
        needed=options.parallelism.devices,
        notice_s=options.deadline_s,
    )
    parts = split(model, options.blocks)
    cuts = Cuts(model, example.args, example.kwargs or {}, options.blocks, options.dtype)
    parallelism = options.parallelism
    hosts = meeting.host_devices(stated(meeting.hosts, options.networks))
    groups = Groups.of(parallelism, hosts, blocks=len(cuts.blocks), data_groups=options.data_groups)
    layout = StageLayout.of(parallelism, cuts)
    processes = connect(meeting, groups, layout, options, at, say)
    own = groups.position(launch.rank)
    torch.manual_seed(options.seed)
    fill(model, parts, layout.names_of(own.stage), options.weights, options.init)
    stage_model = StageModel(model, cuts, layout.segments_of(own.stage), at)
    joined = join(launch.rank, groups, layout, processes, options, at, users.rule)
    speaks = (own.replica, own.tensor) == (0, 0)  # for its stage
    of_stage = say if launch.rank == 0 else _print if speaks else silent
    stage_optimizer = make_stage_optimizer(joined, stage_model, users.keep(model), of_stage)
    pipeline = make_pipeline(joined, stage_model, loss)
    _say_start(joined, cuts, say)
    training = ParallelTraining(joined, stage_model, stage_optimizer, pipeline)
    if options.stages != "even" or options.resize_stages is not None:
        training.sizes = StageSizes(training, users, loss, say)
        training.sizes.begin(example)
    return training


def _say_start(joined: Joined, cuts: Cuts, say: Report) -> None:
    parallelism, micro = joined.groups.parallelism, joined.options.num_microbatches
    say(f"parallel: {parallelism}, {micro} micro-batches a step, stages of {joined.layout}")
    if parallelism.tp > 1 and cuts.draws:  # Rule 2
        say(
            f"tensor: the model draws random numbers (dropout), and each of the {parallelism.tp}"
            " tensor ranks draws its own inside split layers: losses are not those of another tp"
        )


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _print(line: str) -> None:
    print(line, flush=True)
