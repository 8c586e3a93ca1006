"""StageSizes: choose the number of blocks of each stage by measured speeds, and move blocks between
stages after a step if devices have become slower or faster.

    measured speeds -> sizes -> the model is cut again -> values and state move -> the next step

Ranks send values and optimizer state to each other as pieces (stages/piece_exchange.py). Does NOT
search for sizes (stages/protocol/stage_sizes.py) or detect changed speeds
(stages/protocol/drift.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import psutil
import torch

from roadtrain.errors import ConfigError, UserError
from roadtrain.stages.block_times import block_parameters, block_weights, measure_blocks
from roadtrain.stages.layout import StageLayout
from roadtrain.stages.parallel_parts import (
    RankContext,
    UserOptimizer,
    make_pipeline,
    make_stage_optimizer,
    silent,
)
from roadtrain.stages.parallel_training import ParallelTraining
from roadtrain.stages.piece_exchange import exchange
from roadtrain.stages.pipeline import StepTimes
from roadtrain.stages.protocol.drift import MIN_GAIN, DriftWatch
from roadtrain.stages.protocol.stage_memory import StageMemory
from roadtrain.stages.protocol.stage_sizes import compare_sizes
from roadtrain.stages.protocol.step_model import StepWork
from roadtrain.stages.sharded_optimizer import ShardedOptimizer
from roadtrain.stages.stage_buffers import adopt_buffers, gather_buffers, own_buffers
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_part import LossFunction
from roadtrain.stages.stage_speeds import (
    MeasuredRank,
    measure_messages,
    measured_memory,
    measured_work,
)
from roadtrain.stages.stage_values import drop

Report = Callable[[str], None]


class StageSizes:
    """The sizes of the stages of `training`, in blocks. All methods are collective."""

    def __init__(
        self,
        training: ParallelTraining,
        users: UserOptimizer,
        loss: LossFunction,
        report: Report,
    ) -> None:
        self._training, self._users, self._loss, self._report = training, users, loss, report
        self._numels = {name: p.numel() for name, p in training.stage_model.whole.items()}
        counts, _ = block_parameters(training.stage_model.cuts, self._numels)
        self._weights = block_weights(counts)
        self._watch: DriftWatch | None = None
        # weights of the layers before the first block and after the last block
        self._ends = (0.0, 0.0)

    def begin(self, example: MicroBatch) -> None:
        """Measure speeds, choose sizes, and move blocks if the sizes change. Raises BudgetError if
        no sizes fit in memory (Rule 4), and PeerError if a rank is missing."""
        training, context = self._training, self._training.context
        times = measure_blocks(training.stage_model, example, self._loss, self._weights)
        links, shape = training.pipeline.links, training.pipeline.shape
        messages = measure_messages(links, shape, self._message_bytes(), context.device)
        own = MeasuredRank(times, messages, self._room())
        every = context.control.agree(own, "speeds of all ranks", MeasuredRank)
        work = measured_work(context.groups, every, context.options.num_microbatches, self._weights)
        self._ends = work.ends
        memory = self._memory(every, work)
        ranks = [context.groups.stage_ranks(stage)[0] for stage in range(len(work.stages))]
        clusters = [context.groups.host_of[rank].cluster for rank in ranks]
        table = compare_sizes(work, clusters, fits=memory.fits)
        if table is None:
            raise memory.refusal()
        self._report(f"blocks of each stage, and expected time of a step:\n{table}")
        sizes = table.best.sizes
        if context.options.stages == "paper":
            paper = table.others.get("paper")
            sizes = paper[0] if paper else sizes
        elif context.options.stages == "even":
            sizes = self._sizes()
        if sizes != self._sizes():
            self._try_move(sizes)
        gain = context.options.resize_stages or MIN_GAIN
        self._watch = DriftWatch(work, self._sizes(), memory.fits, gain)

    def own_pass_s(self, times: StepTimes) -> float:
        """Return this rank's average seconds for the forward and backward of one micro-batch
        through a block of weight 1. times: the times of a step on this rank."""
        context = self._training.context
        own = context.layout.segments_of(context.position.stage)
        last = len(self._training.stage_model.cuts.blocks)
        weight = sum(self._weights[block] for s in own for block in range(s.begin, s.stop))
        weight += self._ends[0] * any(s.begin == 0 for s in own)
        weight += self._ends[1] * any(s.stop == last for s in own)
        passes = len(self._training.pipeline.shape.own)
        return (times.forward + times.backward) / (passes * weight)

    def step(self, passes_s: Sequence[float]) -> None:
        """Move blocks if speeds have changed so much that other sizes would shorten a step, or only
        report these sizes if the option `resize_stages` is None. Call this after each step.

        passes_s: the result of `own_pass_s` on every rank.
        """
        if self._watch is None:
            return
        context = self._training.context
        groups = context.groups
        of_stages = [
            max(passes_s[rank] for rank in groups.stage_ranks(stage))
            for stage in range(groups.parallelism.pp)
        ]
        offer = self._watch.step(of_stages)
        if offer is None:
            return
        if context.options.resize_stages is None:
            self._report(f"stages: {offer}; set parallelism.resize_stages to move blocks")
            return
        self._report(f"stages: {offer}; blocks move before the next step")
        if self._try_move(offer.after):
            self._watch.moved(offer)

    def _try_move(self, sizes: tuple[int, ...]) -> bool:
        """Move blocks to reach these sizes, and return True. If the model cannot be cut this way,
        report the reason and return False."""
        try:
            layout = self._layout(sizes)
        except UserError as why:
            self._report(
                f"cannot use stages of {', '.join(map(str, sizes))} blocks, none move: {why}"
            )
            return False
        self._move(layout)
        return True

    def _sizes(self) -> tuple[int, ...]:
        return tuple(s.stop - s.begin for s in self._training.context.layout.segments)

    def _message_bytes(self) -> int:
        """Return the size in bytes of the largest message between stages, over all ranks."""
        own = max(part.message_nbytes for part in self._training.pipeline.parts)
        return max(self._training.context.control.agree(own, "sizes"))

    def _memory(self, measured: Sequence[MeasuredRank], work: StepWork) -> StageMemory:
        cuts, context = self._training.stage_model.cuts, self._training.context
        optimizer = self._training.optimizer
        # measured stages have no stores and no stated sizes
        assert isinstance(optimizer, ShardedOptimizer)
        whole = self._training.stage_model.whole.values()
        nbytes = sum(p.numel() * cuts.dtype_of(p).itemsize for p in whole)
        each = nbytes / sum(p.numel() for p in whole)
        # bytes of a parameter's state: the rule's fp32 arrays, and the master copy of a 16-bit
        # value
        kept = 4.0 * (max(len(rule.arrays) for rule in optimizer.rules) + (each < 4))
        of = {"parameter_bytes": each, "state_bytes": kept}
        return measured_memory(context.groups, measured, work, cuts, self._numels, **of)

    def _room(self) -> float:
        """Return the bytes of memory that a stage on this rank may use: free memory plus what the
        current stage uses."""
        context = self._training.context
        used = 4.0 * sum(p.nbytes for p in self._training.model.parameters())
        if context.device.type == "cpu":
            host = context.groups.host(context.rank)
            here = sum(at.host == host for at in context.groups.host_of)
            return float(psutil.virtual_memory().available / here + used)
        free, _ = torch.accelerator.get_memory_info(context.device)
        return float(free + used)

    def move(self, sizes: tuple[int, ...]) -> None:
        """Cut the model into stages of these sizes, and move parameters and state between the
        stages. If the model cannot be cut this way, raises ModelError or ConfigError and changes
        nothing."""
        self._move(self._layout(sizes))

    def _layout(self, sizes: tuple[int, ...]) -> StageLayout:
        """Return the layout of stages with these sizes, or raise ModelError or ConfigError on all
        ranks."""
        context = self._training.context
        parallelism = replace(context.groups.parallelism, stages=sizes)
        layout = StageLayout.of(parallelism, self._training.stage_model.cuts)
        check_shared(context, layout)
        return layout

    def _move(self, layout: StageLayout) -> None:
        training, old = self._training, self._training.context
        groups = replace(old.groups, parallelism=layout.parallelism)
        context = replace(old, groups=groups, layout=layout)
        source, steps_done = training.optimizer, training.steps_done
        source.settle()
        old_buffers = own_buffers(training.stage_model)
        buffers = gather_buffers(training.stage_model, old.control)
        old_model = training.stage_model
        old_model.restore()
        segments = layout.segments_of(context.position.stage)
        stage_model = StageModel(old_model.model, old_model.cuts, segments, context.device)
        # new parameters are zeros until their values are loaded
        for name in stage_model.names - old_model.names:
            p = stage_model.whole[name]
            dtype = old_model.cuts.dtype_of(p)
            p.data = torch.zeros(p.shape, dtype=dtype, device=context.device)
        optimizer = make_stage_optimizer(
            context, stage_model, self._users.keep(stage_model.model), silent
        )
        optimizer.load(exchange(source, optimizer.needed(), context.control), steps_done)
        adopt_buffers(buffers, old_buffers, stage_model)
        source.close()
        # only after the exchange, because other ranks may have needed these parameters
        for name, p in stage_model.whole.items():
            if name not in stage_model.names:
                drop(p)
        pipeline = make_pipeline(context, stage_model, self._loss)
        training.adopt(context, stage_model, optimizer, pipeline)
        self._report(f"stages of {layout} from step {steps_done + 1} on")


def check_shared(context: RankContext, layout: StageLayout) -> None:
    """Raise ConfigError if stages of this layout share parameters, but no process group connects
    them."""
    for group in layout.shared_groups():
        if group.name not in context.processes.networks:
            raise ConfigError(
                f"stages of {layout} need a process group for {group.name}, which does not exist",
                hint="set these sizes with stages=[...] at the next start",
            )
