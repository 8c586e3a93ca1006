"""parallelize(): train a model in stages over several hosts or clusters. The model's forward and
parameter names stay the same, and so do the optimizer's class and groups.

    options = ParallelOptions(Parallelism(pp=2, dp=2), num_microbatches=8)
    training = roadtrain.parallelize(model, optimizer, options,
                                     example=MicroBatch((), {"input_ids": x, "labels": x}))
    for number in range(steps):
        loss = training.step(lambda micro: MicroBatch((), {"input_ids": ..., "labels": ...}))

Every process calls `parallelize` with the same model and options. torchrun starts one process per
device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from roadtrain.device.choice import own_device
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
from roadtrain.stages.process_groups import check_device
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
    """Divide `model` into stages and prepare this process's part of the training. Collective.

    Args:
        model: The whole model, preferably built on `meta`. This process keeps only the parameters
            of its stage.
        optimizer: An optimizer over the model's parameters that has taken no steps.
        options: Degrees of parallelism and other options.
        example: A micro-batch with the shapes and dtypes of all micro-batches.
        loss: Function of the model's result and the micro-batch. It returns the mean loss over the
            micro-batch as a scalar tensor. The default returns the loss that the model itself
            computes.
        device: Device of this process. "cuda" selects the CUDA device with the index LOCAL_RANK. If
            None, the host's accelerator is used, or the CPU if there is none.
        report: Called with each line of the log on the first process. Lines about another stage
            are printed by the first process of that stage.

    Returns:
        The training, whose `step` every process calls.

    Raises:
        ConfigError: Options are invalid, or do not fit the hosts, the networks or the model.
        ModelError: The model cannot be divided into these stages.
        DeadlineError: A process did not start in time, or a network did not work in time (Rule 5).
    """
    check_options(parallelize, locals())
    # 1. options, and the device of this process
    launch = launch_of(os.environ)
    say = report if launch.rank == 0 else silent
    for line in options.lossy_notes():
        say(line)
    users = UserOptimizer(model, optimizer, say)
    at = own_device(device, say)
    check_device(at)
    # 2. rendezvous of all processes; if a process is missing, all others report this
    parallelism = options.parallelism
    meeting = meet(
        launch, job=options.describe(), needed=parallelism.devices, notice_s=options.deadline_s
    )
    # 3. the cuts of the model, the groups of ranks, the parameters of each stage
    parts = split(model, options.blocks)
    cuts = Cuts(model, example.args, example.kwargs or {}, options.blocks, options.dtype)
    hosts = meeting.host_devices(override(meeting.hosts, options.networks))
    groups = Groups.of(parallelism, hosts, blocks=len(cuts.blocks), data_groups=options.data_groups)
    layout = StageLayout.of(parallelism, cuts)
    # 4. the network of each group, tested before the process groups are created
    context = join(meeting, groups, layout, options, at, users.rule, say)
    # 5. the initial values of this stage; the model loses the parameters of other stages
    own = context.position
    torch.manual_seed(options.seed)
    fill(model, parts, layout.names_of(own.stage), options.weights, options.init)
    stage_model = StageModel(model, cuts, layout.segments_of(own.stage), at)
    # 6. the optimizer of the stage, and its pipeline
    # the first rank of its stage, which reports about the stage
    is_first = (own.replica, own.tensor) == (0, 0)
    of_stage = say if launch.rank == 0 else partial(print, flush=True) if is_first else silent
    stage_optimizer = make_stage_optimizer(context, stage_model, users.keep(model), of_stage)
    pipeline = make_pipeline(context, stage_model, loss)
    report_start(context, cuts, say)
    training = ParallelTraining(context, stage_model, stage_optimizer, pipeline)
    # 7. sizes of stages by measured speeds, if requested
    if options.stages != "even" or options.resize_stages is not None:
        training.sizes = StageSizes(training, users, loss, say)
        training.sizes.begin(example)
    return training
