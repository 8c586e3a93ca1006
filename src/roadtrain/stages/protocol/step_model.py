"""How long a step of a pipeline takes with given stages: the state machines of `pipeline` with
durations of runs and messages.

Each replica runs in its machine's order. A message of a replica leaves after those that it sent
before over the same boundary and direction, while it computes on. The step ends with the last
backward of all. Which run follows which does not depend on the durations, so the order is found
once and many stages are tried with it. Messages of different senders, boundaries or directions take
nothing from each other: where links are busier than devices and a card carries several, a step is
longer.
Pure arithmetic. Does NOT know where durations come from.
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

MOST_TIMES = 1 << 22  # finish times held at once, of all runs of the stages that are tried

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageSpeed:
    """Seconds that a block of weight 1 takes on the slowest replica of a stage."""

    forward_s: float  # of one micro-batch
    backward_s: float  # of one micro-batch

    @property
    def pass_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class BoundarySpeed:
    """Seconds that one micro-batch's message takes from a replica over a boundary."""

    activations_s: float = 0.0
    gradients_s: float = 0.0


@dataclass(frozen=True)
class StepWork:
    """All that decides how long a step takes, but for the stages' sizes."""

    stages: tuple[StageSpeed, ...]
    weights: tuple[float, ...]  # of each block of the model: its work, over that of an ordinary one
    num_microbatches: int  # of a step, over all replicas
    widths: tuple[int, ...]  # replicas of each stage
    boundaries: tuple[BoundarySpeed, ...]  # after each stage; of interleaved ones the last too
    ends: tuple[float, float] = (0.0, 0.0)  # weights of what comes before and after all blocks
    virtual_stages: int = 1

    @property
    def parts(self) -> int:
        """Of the model, over all stages; part i is of stage i mod p."""
        return len(self.stages) * self.virtual_stages

    @cached_property
    def before(self) -> tuple[float, ...]:
        """Weights of all blocks before each one, and of all."""
        return tuple(itertools.accumulate(self.weights, initial=0.0))

    def weight(self, part: int, begin: int, stop: int) -> float:
        """Of blocks [begin, stop) as that part of the model."""
        ends = self.ends[0] * (part == 0) + self.ends[1] * (part == self.parts - 1)
        return self.before[stop] - self.before[begin] + ends


@dataclass(slots=True)
class _Order:
    """What a step consists of, each after all that it needs. Rows of durations: forwards of all
    parts, backwards of all parts, then activations and gradients of all boundaries."""

    rows: list[int] = field(default_factory=list)
    needs: list[tuple[int, ...]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # of each replica, its last run

    def add(self, row: int, needs: Iterator[int | None]) -> int:
        self.rows.append(row)
        self.needs.append(tuple(one for one in needs if one is not None))
        return len(self.rows) - 1


class StepModel:
    """The step of `work` for any stages' sizes."""

    def __init__(self, work: StepWork) -> None:
        self.work = work
        self._order = _ordered(work)

    def seconds(self, sizes: Sequence[int]) -> float:
        """sizes: blocks of each part, in the model's order."""
        return float(self.seconds_of_all([sizes])[0])

    def seconds_of_all(self, many: Sequence[Sequence[int]]) -> Array:
        """Of each of many sizes."""
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
        """By row of `_Order` and sizes."""
        work, stages = self.work, len(self.work.stages)
        stops = np.cumsum(sizes, axis=1)
        weights = np.diff(np.asarray(work.before)[stops], axis=1, prepend=0.0).T
        weights[0] += work.ends[0]
        weights[-1] += work.ends[1]
        speeds = [work.stages[part % stages] for part in range(work.parts)]
        forward = weights * np.array([[one.forward_s] for one in speeds])
        backward = weights * np.array([[one.backward_s] for one in speeds])
        messages = [one.activations_s for one in work.boundaries]
        messages += [one.gradients_s for one in work.boundaries]
        alike = np.repeat(np.array(messages).reshape(-1, 1), len(sizes), axis=1)
        return np.concatenate([forward, backward, alike])


def _ordered(work: StepWork) -> _Order:
    """By driving the machines, whatever the durations."""
    stages, parts, widths = len(work.stages), work.virtual_stages, work.widths
    machines = {
        (s, r): StageStateMachine(PipelineShape(s, r, widths, parts, work.num_microbatches))
        for s in range(stages)
        for r in range(widths[s])
    }
    order = _Order()
    last: dict[tuple[int, int], int] = {}  # replica -> its last run
    sent: dict[tuple[tuple[int, int], int], int] = {}  # sender, row -> its last message
    came: dict[tuple[str, tuple[int, int], int, int], int] = {}  # -> what brought it
    todo = deque((key, run) for key, machine in machines.items() for run in machine.start())
    while todo:
        key, run = todo.popleft()
        needs = last.get(key), came.get((run.what, key, run.micro, run.part))
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
        came[run.what, there, run.micro, to.part] = number
        arrived = machines[there].arrived(run.what, run.micro, to.part)
        todo += [(there, other) for other in arrived]
    order.last = [*last.values()]
    return order


def _message_row(work: StepWork, stage: int, run: RunBlocks, to: Peer) -> int:
    first = 2 * work.parts
    if run.what == FORWARD:
        return first + stage
    return first + len(work.boundaries) + to.stage
