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
from functools import partial

import torch
from torch import nn

from roadtrain.device.copies import own_device
from roadtrain.environment import launch_of
from roadtrain.options.check import check_options
from roadtrain.stages.cuts import Cuts
from roadtrain.stages.layout import StageLayout
from roadtrain.stages.networks import override
from roadtrain.stages.parallel_options import ParallelOptions
from roadtrain.stages.parallel_parts import (
    UserOptimizer,
    join,
    make_pipeline,
    make_stage_optimizer,
    report_start,
    silent,
)
from roadtrain.stages.parallel_sizes import StageSizes
from roadtrain.stages.parallel_training import ParallelTraining
from roadtrain.stages.rank_groups import Groups
from roadtrain.stages.rank_meeting import meet
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_part import LossFunction, own_loss
from roadtrain.stages.stage_values import fill
from roadtrain.streaming.split import split

Report = Callable[[str], None]


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
    # 1. what was asked for, on this process's device
    launch = launch_of(os.environ)
    say = report if launch.rank == 0 else silent
    for line in options.lossy_notes():
        say(line)
    users = UserOptimizer(model, optimizer, say)
    at = own_device(device or ("cuda" if torch.cuda.is_available() else "cpu"), say)
    # 2. all processes meet, or every one that came says who did not
    parallelism = options.parallelism
    meeting = meet(
        launch, job=options.describe(), needed=parallelism.devices, notice_s=options.deadline_s
    )
    # 3. where the model is cut, who works with whom, which parameters each stage has
    parts = split(model, options.blocks)
    cuts = Cuts(model, example.args, example.kwargs or {}, options.blocks, options.dtype)
    hosts = meeting.host_devices(override(meeting.hosts, options.networks))
    groups = Groups.of(parallelism, hosts, blocks=len(cuts.blocks), data_groups=options.data_groups)
    layout = StageLayout.of(parallelism, cuts)
    # 4. a network for each group, tried before the process groups are made
    context = join(meeting, groups, layout, options, at, users.rule, say)
    # 5. this stage's first values, and the model without the other stages
    own = context.position
    torch.manual_seed(options.seed)
    fill(model, parts, layout.names_of(own.stage), options.weights, options.init)
    stage_model = StageModel(model, cuts, layout.segments_of(own.stage), at)
    # 6. what updates the stage, and what runs its micro-batches
    speaks = (own.replica, own.tensor) == (0, 0)  # for its stage
    of_stage = say if launch.rank == 0 else partial(print, flush=True) if speaks else silent
    stage_optimizer = make_stage_optimizer(context, stage_model, users.keep(model), of_stage)
    pipeline = make_pipeline(context, stage_model, loss)
    report_start(context, cuts, say)
    training = ParallelTraining(context, stage_model, stage_optimizer, pipeline)
    # 7. sizes of stages by measured speeds, where they are asked for
    if options.stages != "even" or options.resize_stages is not None:
        training.sizes = StageSizes(training, users, loss, say)
        training.sizes.begin(example)
    return training
