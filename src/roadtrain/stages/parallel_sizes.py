"""StageSizes: how many blocks each stage has, by measured speeds; and blocks move between stages at
a step's end, where devices have become slower or faster.

    measured speeds -> sizes -> the model is cut anew -> values and state move -> the next step

Nothing is lost: the parts of every parameter go from the rank that has them to the one that is to
have them (stages/piece_exchange.py). Does NOT search for sizes (stages/protocol/stage_sizes.py) or
say when speeds have changed (stages/protocol/drift.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import psutil
import torch

from roadtrain.errors import ConfigError, UserError
from roadtrain.stages.block_times import block_parameters, block_weights, measure_blocks
from roadtrain.stages.layout import StageLayout
from roadtrain.stages.parallel_parts import (
    Joined,
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
    """The sizes of `training`'s stages. Collective, as all its methods."""

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
        self._ends = (0.0, 0.0)  # weights of what comes before and after the blocks

    def begin(self, example: MicroBatch) -> None:
        """Measure, choose, and move blocks where other sizes are better. Raises BudgetError where
        no sizes fit (Rule 4), PeerError."""
        training, joined = self._training, self._training.joined
        times = measure_blocks(training.stage_model, example, self._loss, self._weights)
        links, shape = training.pipeline.links, training.pipeline.shape
        messages = measure_messages(links, shape, self._message_bytes(), joined.device)
        own = msgspec.msgpack.encode(MeasuredRank(times, messages, self._room()))
        encoded = joined.control.gather(own, "speeds of all ranks")
        told = [msgspec.msgpack.decode(one, type=MeasuredRank) for one in encoded]
        work = measured_work(joined.groups, told, joined.options.num_microbatches, self._weights)
        self._ends = work.ends
        memory = self._memory(told, work)
        ranks = [joined.groups.stage_ranks(stage)[0] for stage in range(len(work.stages))]
        clusters = [joined.groups.cluster(rank) for rank in ranks]
        table = compare_sizes(work, clusters, fits=memory.fits)
        if table is None:
            raise memory.refusal()
        self._report(f"blocks of each stage, and what a step should take:\n{table}")
        sizes = table.best.sizes
        if joined.options.stages == "paper":
            paper = table.others.get("paper")
            sizes = paper[0] if paper else sizes
        elif joined.options.stages == "even":
            sizes = self._sizes()
        if sizes != self._sizes() and not self._move_or_say(sizes):
            sizes = self._sizes()
        gain = joined.options.resize_stages or MIN_GAIN
        self._watch = DriftWatch(work, sizes, memory.fits, gain)

    def own_pass_s(self, times: StepTimes) -> float:
        """Seconds in which this rank ran a block of weight 1 forward and backward for one
        micro-batch, in the step of `times`."""
        joined = self._training.joined
        own = joined.layout.segments_of(joined.position.stage)
        last = len(self._training.stage_model.cuts.blocks)
        weight = sum(self._weights[block] for s in own for block in range(s.begin, s.stop))
        weight += self._ends[0] * any(s.begin == 0 for s in own)
        weight += self._ends[1] * any(s.stop == last for s in own)
        passes = len(self._training.pipeline.shape.own)
        return (times.forward + times.backward) / (passes * weight)

    def step(self, passes_s: Sequence[float]) -> None:
        """After each step. passes_s: what every rank's `own_pass_s` was. Moves blocks, or says
        that it would be worth it."""
        if self._watch is None:
            return
        joined = self._training.joined
        groups = joined.groups
        of_stages = [
            max(passes_s[rank] for rank in groups.stage_ranks(stage))
            for stage in range(groups.parallelism.pp)
        ]
        offer = self._watch.step(of_stages)
        if offer is None:
            return
        if joined.options.resize_stages is None:
            self._report(f"stages: {offer}; parallelism.resize_stages lets them move")
            return
        self._report(f"stages: {offer}; they move before the next step")
        if self._move_or_say(offer.after):
            self._watch.moved(offer)

    def _move_or_say(self, sizes: tuple[int, ...]) -> bool:
        """Whether blocks moved; where the model cannot be cut so, all ranks stay as they are."""
        try:
            layout = self._layout(sizes)
        except UserError as why:
            self._report(
                f"stages of {', '.join(map(str, sizes))} blocks cannot be, they stay: {why}"
            )
            return False
        self._move(layout)
        return True

    def _sizes(self) -> tuple[int, ...]:
        return tuple(s.stop - s.begin for s in self._training.joined.layout.segments)

    def _message_bytes(self) -> int:
        """Of what crosses a cut, the largest."""
        own = max(part.message_nbytes for part in self._training.pipeline.parts)
        return max(self._training.joined.control.agree(own, "sizes"))

    def _memory(self, told: Sequence[MeasuredRank], work: StepWork) -> StageMemory:
        cuts, joined = self._training.stage_model.cuts, self._training.joined
        optimizer = self._training.optimizer
        assert isinstance(optimizer, ShardedOptimizer)  # measured stages are neither placed nor cut
        whole = self._training.stage_model.whole.values()
        nbytes = sum(p.numel() * cuts.dtype_of(p).itemsize for p in whole)
        each = nbytes / sum(p.numel() for p in whole)
        # fp32 arrays of the rule, and masters of parameters in 16 bits
        kept = 4.0 * (max(len(rule.arrays) for rule in optimizer.rules) + (each < 4))
        of = {"parameter_bytes": each, "state_bytes": kept}
        return measured_memory(joined.groups, told, work, cuts, self._numels, **of)

    def _room(self) -> float:
        """Bytes that this rank's stage may take: what is free, and what it has taken."""
        joined = self._training.joined
        taken = 4.0 * sum(p.nbytes for p in self._training.model.parameters())
        if joined.device.type == "cpu":
            host = joined.groups.host(joined.rank)
            ranks = range(joined.groups.world_size)
            here = sum(joined.groups.host(rank) == host for rank in ranks)
            return float(psutil.virtual_memory().available / here + taken)
        free, _ = torch.accelerator.get_memory_info(joined.device)
        return float(free + taken)

    def move(self, sizes: tuple[int, ...]) -> None:
        """Cut the model anew, and bring every parameter and its state to where it is now. Raises
        ModelError, ConfigError where it cannot be cut so; nothing has changed then."""
        self._move(self._layout(sizes))

    def _layout(self, sizes: tuple[int, ...]) -> StageLayout:
        """Raises as `move`, on all ranks alike."""
        joined = self._training.joined
        parallelism = replace(joined.groups.parallelism, stages=sizes)
        layout = StageLayout.of(parallelism, self._training.stage_model.cuts)
        check_shared(joined, layout)
        return layout

    def _move(self, layout: StageLayout) -> None:
        training, old = self._training, self._training.joined
        groups = replace(old.groups, parallelism=layout.parallelism)
        joined = replace(old, groups=groups, layout=layout)
        source, steps_done = training.optimizer, training.steps_done
        source.settle()
        had = own_buffers(training.stage_model)
        buffers = gather_buffers(training.stage_model, old.control)
        was = training.stage_model
        was.restore()
        segments = layout.segments_of(joined.position.stage)
        stage_model = StageModel(was.model, was.cuts, segments, joined.device)
        for name in stage_model.names - was.names:  # zeros until they are loaded
            p = stage_model.whole[name]
            dtype = was.cuts.dtype_of(p)
            p.data = torch.zeros(p.shape, dtype=dtype, device=joined.device)
        optimizer = make_stage_optimizer(
            joined, stage_model, self._users.keep(stage_model.model), silent
        )
        optimizer.load(exchange(source, optimizer.needed(), joined.control), steps_done)
        adopt_buffers(buffers, had, stage_model)
        source.close()
        for name, p in stage_model.whole.items():  # others may have asked for them until now
            if name not in stage_model.names:
                drop(p)
        pipeline = make_pipeline(joined, stage_model, self._loss)
        training.adopt(joined, stage_model, optimizer, pipeline)
        self._report(f"stages of {layout} from step {steps_done + 1} on")


def check_shared(joined: Joined, layout: StageLayout) -> None:
    """Raises ConfigError where stages would share parameters that have no process group."""
    for group in layout.shared_groups():
        if group.name not in joined.processes.networks:
            raise ConfigError(
                f"with {layout} there would be {group.name}, for which there is no process group",
                hint="state the sizes with stages=[...] at the next start",
            )
