"""Pipeline: run one rank's forwards and backwards of a pipelined step, in the order of
protocol/pipeline.py. Does NOT update parameters.

A micro-batch's loss is divided by the number of micro-batches of the whole step, and gradients are
only summed. So the sum is the gradient of the step's mean loss, also if stages differ in width.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from roadtrain.servers.trace import Stages
from roadtrain.stages.links import Channel, StageLinks
from roadtrain.stages.protocol.pipeline import (
    BACKWARD,
    FORWARD,
    PipelineShape,
    RunBlocks,
    StageStateMachine,
    Transfer,
)
from roadtrain.stages.stage_model import MicroBatch, RandomStart
from roadtrain.stages.stage_part import StagePart


@dataclass
class StepTimes:
    """Seconds that this rank spent in one step, by activity."""

    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0  # waiting for messages of other stages


@dataclass
class _Step:
    """The state of a step in progress."""

    machine: StageStateMachine
    # for each channel, receives that are not posted yet, in order
    due: dict[Channel, deque[Transfer]] = field(default_factory=dict)
    # (what, part, micro) -> receive that is posted
    posted: dict[tuple[str, int, int], Transfer] = field(default_factory=dict)
    # micro-batch -> its loss, until its backward
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    # this rank's losses; their values are read at the end, because that waits for a GPU
    ended: list[torch.Tensor] = field(default_factory=list)


class Pipeline:
    """The pipeline on this rank. parts: the rank's segments of the model, in the model's order.
    seed: the seed of random numbers in forwards (dropout)."""

    def __init__(
        self, shape: PipelineShape, parts: Sequence[StagePart], links: StageLinks, seed: int = 0
    ) -> None:
        self.shape, self.parts, self.links, self.seed = shape, list(parts), links, seed
        self.times, self.trace = StepTimes(), Stages()

    def step(self, number: int, batch: Callable[[int], MicroBatch]) -> float:
        """Run this rank's micro-batches of step `number` forward and backward, which adds gradients
        to the parameters.

        batch: returns the micro-batch with a given number (0 to num_microbatches - 1). Returns the
        sum of this rank's losses, divided by num_microbatches; 0.0 except on the last stage. Raises
        DeadlineError and LostError.
        """
        self.times, self.links.step, self.links.wait_s = StepTimes(), number, 0.0
        step = _Step(StageStateMachine(self.shape))
        for transfer in step.machine.receives():
            step.due.setdefault((transfer.boundary, transfer.what), deque()).append(transfer)
        try:
            self._post(step)
            for run in self._runs(step):
                self._run(step, run, batch)
                self._post(step)
            with self.trace.timed("Wait"):
                self.links.flush()
        except BaseException:
            for part in self.parts:
                part.drop()
            raise
        self.times.waiting = self.links.wait_s
        return sum(map(float, step.ended), 0.0)

    @torch.no_grad()
    def evaluate(self, batch: Callable[[int], MicroBatch]) -> float:
        """Run only the forwards. Returns the sum of this rank's losses as `step` does, and raises
        the same errors."""
        machine, losses = StageStateMachine(self.shape), list[torch.Tensor]()
        handed: dict[tuple[int, int], list[torch.Tensor]] = {}
        for run in (run for run in machine.order if run.what == FORWARD):
            part, arrival = self.parts[run.part], machine.arrival(run)
            if arrival is not None:
                self.links.post(arrival, part.buffers(FORWARD, run.micro))
                self.links.wait(arrival)
            elif inputs := handed.pop((run.part, run.micro), None):
                for buffer, x in zip(part.buffers(FORWARD, run.micro), inputs, strict=True):
                    buffer.detach().copy_(x)
            out = part.run_forward(run.micro, batch(run.micro))
            part.drop()
            peer, transfer = machine.consumer(run), machine.transfer(run)
            if peer is None:
                assert isinstance(out, torch.Tensor)
                losses.append(out)
            elif transfer is None:
                handed[peer.part, run.micro] = list(out)
            else:
                # clones, because a block may return its input, whose buffer is reused
                self.links.send(transfer, [x.clone() for x in out])
        self.links.flush()
        return sum((float(loss) / self.shape.num_microbatches for loss in losses), 0.0)

    def _runs(self, step: _Step) -> Iterator[RunBlocks]:
        """Yield each forward or backward of the step when its inputs have arrived, in the order of
        the schedule."""
        machine = step.machine
        ready = machine.start()
        while not machine.finished:
            if not ready:
                run = machine.order[machine.at]
                with self.trace.timed("Wait"):
                    self.links.wait(step.posted.pop((run.what, run.part, run.micro)))
                ready = machine.arrived(run.what, run.micro, run.part)
            (run,) = ready
            yield run
            ready = machine.ended(run)

    def _run(self, step: _Step, run: RunBlocks, batch: Callable[[int], MicroBatch]) -> None:
        part, then = self.parts[run.part], time.perf_counter()
        if run.what == FORWARD:
            sends = self._forward(step, run, batch)
            self.times.forward += time.perf_counter() - then
        else:
            loss = step.losses.pop(run.micro) if part.is_last else None
            sends = part.run_backward(run.micro, loss)
            self.times.backward += time.perf_counter() - then
        self.trace.interval(run.what, self.trace.lane, then)
        if (transfer := step.machine.transfer(run)) is not None:
            self.links.send(transfer, sends)
        elif (peer := step.machine.consumer(run)) is not None:
            self._hand_over(step, run, peer.part, sends)

    def _forward(
        self, step: _Step, run: RunBlocks, batch: Callable[[int], MicroBatch]
    ) -> list[torch.Tensor]:
        part = self.parts[run.part]
        random = RandomStart(self.seed, self.links.step, run.micro)
        random.batch()
        out = part.run_forward(run.micro, batch(run.micro), random)
        if not part.is_last:
            return list(out)
        assert isinstance(out, torch.Tensor)
        loss = out / self.shape.num_microbatches
        step.losses[run.micro] = loss
        step.ended.append(loss.detach())
        return []

    def _hand_over(
        self, step: _Step, run: RunBlocks, part: int, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Copy `tensors`, the outputs of `run`, into the input buffers of this rank's segment
        `part`."""
        buffers = self.parts[part].buffers(run.what, run.micro)
        with torch.no_grad():
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.detach().copy_(tensor)
        step.machine.here[run.what].add((run.micro, part))

    def _post(self, step: _Step) -> None:
        """Post the receives whose buffers are free, in the order in which their messages are
        sent."""
        for waiting in step.due.values():
            while waiting and self._may_arrive(waiting[0]):
                transfer = waiting.popleft()
                part, micro = transfer.receiver.part, transfer.micro
                self.links.post(transfer, self.parts[part].buffers(transfer.what, micro))
                step.posted[transfer.what, part, micro] = transfer

    def _may_arrive(self, transfer: Transfer) -> bool:
        part = self.parts[transfer.receiver.part]
        return part.holds(transfer.micro) if transfer.what == BACKWARD else part.has_room
