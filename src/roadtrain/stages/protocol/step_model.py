"""Compute the time of a pipeline step for given sizes of the stages. Does NOT measure durations.

Assumptions: A replica can compute and send at the same time. It sends its messages over one
boundary and direction one after another. Messages of different replicas, boundaries or directions
do not slow each other down. A real step takes longer if a network card carries several such
messages at once and is the bottleneck.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from roadtrain.stages.protocol.pipeline import (
    BACKWARD,
    FORWARD,
    Peer,
    PipelineShape,
    RunBlocks,
    StageStateMachine,
)

# the most end times in memory, over all runs and all sizes that are computed at once
MOST_TIMES = 1 << 22

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageSpeed:
    """The seconds that a block of weight 1 takes on the slowest replica of a stage."""

    forward_s: float  # per micro-batch
    backward_s: float  # per micro-batch

    @property
    def pass_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class BoundarySpeed:
    """The seconds that the message of one micro-batch takes over a boundary."""

    activations_s: float = 0.0
    gradients_s: float = 0.0


@dataclass(frozen=True)
class StepWork:
    """The values that determine the time of a step, except the sizes of the stages."""

    stages: tuple[StageSpeed, ...]
    weights: tuple[float, ...]  # for each block, its work relative to an ordinary block
    num_microbatches: int  # number per step, over all replicas
    widths: tuple[int, ...]  # the number of replicas of each stage
    # the boundary after each stage; after the last stage only if stages are interleaved
    boundaries: tuple[BoundarySpeed, ...]
    # weights of the code before the first block and after the last block
    ends: tuple[float, float] = (0.0, 0.0)
    virtual_stages: int = 1

    @property
    def parts(self) -> int:
        """The number of parts (ranges of blocks) of the model; of p stages, stage i mod p has part
        i."""
        return len(self.stages) * self.virtual_stages

    @cached_property
    def before(self) -> tuple[float, ...]:
        """The total weight of the first i blocks, for each i from 0."""
        return tuple(itertools.accumulate(self.weights, initial=0.0))

    def weight(self, part: int, begin: int, stop: int) -> float:
        """Return the weight of the model's part `part` if it consists of the blocks [begin,
        stop)."""
        ends = self.ends[0] * (part == 0) + self.ends[1] * (part == self.parts - 1)
        return self.before[stop] - self.before[begin] + ends


@dataclass(slots=True)
class _Order:
    """The runs and messages of a step, each after its dependencies. `rows`: for each, its row in
    the table of durations: the forwards of each part of the model, the backwards, the activations
    of each boundary, and the gradients."""

    # for each run or message, its row in the table of durations
    rows: list[int] = field(default_factory=list)
    # for each run or message, the numbers of its dependencies
    needs: list[tuple[int, ...]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # for each replica, the number of its last run

    def add(self, row: int, needs: Iterator[int | None]) -> int:
        self.rows.append(row)
        self.needs.append(tuple(number for number in needs if number is not None))
        return len(self.rows) - 1


class StepModel:
    """The seconds of a step of `work` as a function of the stages' sizes."""

    def __init__(self, work: StepWork) -> None:
        self.work = work
        self._order = _ordered(work)

    def seconds(self, sizes: Sequence[int]) -> float:
        """Return the seconds of a step. sizes: the number of blocks of each part, in the model's
        order."""
        return float(self.seconds_of_all([sizes])[0])

    def seconds_of_all(self, many: Sequence[Sequence[int]]) -> Array:
        """Return the seconds of a step for each element of `many`: the numbers of blocks of each
        part, in the model's order."""
        sizes = np.asarray(many, dtype=np.int64)
        at_once = max(1, MOST_TIMES // len(self._order.rows))
        found = [self._run(sizes[i : i + at_once]) for i in range(0, len(sizes), at_once)]
        return np.concatenate(found)

    def _run(self, sizes: npt.NDArray[np.int64]) -> Array:
        durations, order = self._durations(sizes), self._order
        ends = np.empty((len(order.rows), len(sizes)))
        for number, (row, needs) in enumerate(zip(order.rows, order.needs, strict=True)):
            end = durations[row].copy()
            if needs:
                end += ends[needs[0]] if len(needs) == 1 else np.maximum(*(ends[n] for n in needs))
            ends[number] = end
        return ends[order.last].max(axis=0)

    def _durations(self, sizes: npt.NDArray[np.int64]) -> Array:
        """Return the durations in seconds, with a column for each element of `sizes`."""
        work, stages = self.work, len(self.work.stages)
        stops = np.cumsum(sizes, axis=1)
        weights = np.diff(np.asarray(work.before)[stops], axis=1, prepend=0.0).T
        weights[0] += work.ends[0]
        weights[-1] += work.ends[1]
        speeds = [work.stages[part % stages] for part in range(work.parts)]
        forward = weights * np.array([[speed.forward_s] for speed in speeds])
        backward = weights * np.array([[speed.backward_s] for speed in speeds])
        messages = [boundary.activations_s for boundary in work.boundaries]
        messages += [boundary.gradients_s for boundary in work.boundaries]
        alike = np.repeat(np.array(messages).reshape(-1, 1), len(sizes), axis=1)
        return np.concatenate([forward, backward, alike])


def _ordered(work: StepWork) -> _Order:
    """Return the order in which the state machines' runs and messages happen."""
    stages, parts, widths = len(work.stages), work.virtual_stages, work.widths
    machines = {
        (s, r): StageStateMachine(PipelineShape(s, r, widths, parts, work.num_microbatches))
        for s in range(stages)
        for r in range(widths[s])
    }
    order = _Order()
    last: dict[tuple[int, int], int] = {}  # replica -> number of its last run so far
    # (sender, row) -> number of the sender's last message in this row so far
    sent: dict[tuple[tuple[int, int], int], int] = {}
    # (direction, receiver, micro, part) -> number of the run or message that delivered the input
    inputs: dict[tuple[str, tuple[int, int], int, int], int] = {}
    todo = deque((key, run) for key, machine in machines.items() for run in machine.start())
    while todo:
        key, run = todo.popleft()
        needs = last.get(key), inputs.get((run.what, key, run.micro, run.part))
        row = work.parts * (run.what == BACKWARD) + run.part * stages + key[0]
        last[key] = number = order.add(row, iter(needs))
        to = machines[key].consumer(run)
        todo += [(key, other) for other in machines[key].ended(run)]
        if to is None:
            continue
        there = to.stage, to.replica
        if there != key:
            row = _message_row(work, key[0], run, to)
            number = order.add(row, iter((number, sent.get((key, row)))))
            sent[key, row] = number
        inputs[run.what, there, run.micro, to.part] = number
        arrived = machines[there].arrived(run.what, run.micro, to.part)
        todo += [(there, other) for other in arrived]
    order.last = [*last.values()]
    return order


def _message_row(work: StepWork, stage: int, run: RunBlocks, to: Peer) -> int:
    first = 2 * work.parts
    if run.what == FORWARD:
        return first + stage
    return first + len(work.boundaries) + to.stage
