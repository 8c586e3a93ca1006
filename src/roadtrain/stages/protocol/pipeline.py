"""The pipeline schedule: the order in which a rank runs its micro-batches, and the ranks with which
it exchanges tensors. The runtime and the simulator drive the same pure state machine.

A step runs m micro-batches through p stages. Stage s runs min(m, p - 1 - s) forwards, then
alternates a forward and a backward, then runs the remaining backwards (PipeDream-Flush; Narayanan
et al., 2021). So it holds the activations of at most p - s micro-batches.

Stage s may have d_s replicas. Replica r runs the micro-batches i with i mod d_s = r, in ascending
order. The number w_s of forwards before the first backward is such that all replicas of the next
stage can be busy:

    w_{p-1} = 0        w_s = ceil((w_{s+1} + 1) d_{s+1} / d_s)        at most m / d_s

Deadlock is impossible. Before the backward of micro-batch i, stage s + 1 must run its forwards up
to micro-batch i + w_{s+1} d_{s+1}. Stage s runs these forwards after the backward of micro-batch i
+ w_{s+1} d_{s+1} - (w_s + 1) d_s at the latest. That number is less than i, because (w_s + 1) d_s >
w_{s+1} d_{s+1}. So no backward waits for itself.

A stage may have v parts of the model (interleaved schedule; same paper, section 2.2), which divides
the idle time of a step by v. Forwards run p micro-batches through the first part of a stage, then
through its second part, and so on, before they continue with the next p micro-batches. Backwards do
the same, beginning with the last part. Before the first backward, stage s runs 2 (p - 1 - s) + (v -
1) p forwards. m must be a multiple of p, and all widths must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from roadtrain.errors import ConfigError

FORWARD, BACKWARD = "Forward", "Backward"
SPARE_SLOTS = 1  # number of micro-batches that may arrive before the order needs them


@dataclass(frozen=True, slots=True)
class RunBlocks:
    """A forward or backward (`what`) of micro-batch `micro` through the stage's range of blocks
    `part`. `last`: whether the gradients of these blocks are then complete."""

    what: str
    micro: int
    last: bool = False
    part: int = 0


class Peer(NamedTuple):
    """A sender or receiver of messages: one range of blocks on one replica of a stage. `part`: the
    index of the range among the stage's ranges."""

    stage: int
    part: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message from one rank to another: activations (FORWARD) or their gradient (BACKWARD)."""

    what: str
    micro: int
    # boundary s is between stage s and the next stage; the first stage is next after the last stage
    boundary: int
    sender: Peer
    receiver: Peer


@dataclass(frozen=True)
class PipelineShape:
    """The position of one replica of a stage in the pipeline, and the size of a step.

    widths: the number of replicas of each stage. virtual_stages: the number of ranges of blocks
    that each stage has. num_microbatches: the number of micro-batches of the step, over all
    replicas.
    """

    stage: int
    replica: int
    widths: tuple[int, ...]
    virtual_stages: int
    num_microbatches: int

    @property
    def stages(self) -> int:
        return len(self.widths)

    @property
    def own(self) -> range:
        """The indices of the micro-batches that this replica runs."""
        return range(self.replica, self.num_microbatches, self.widths[self.stage])

    @property
    def first_forwards(self) -> int:
        """The number of forwards that run before forwards and backwards alternate."""
        if self.virtual_stages > 1:
            warm = 2 * (self.stages - 1 - self.stage) + (self.virtual_stages - 1) * self.stages
        else:
            warm = 0
            for behind in range(self.stages - 1, self.stage, -1):
                warm = -(-(warm + 1) * self.widths[behind] // self.widths[behind - 1])
        return min(len(self.own) * self.virtual_stages, warm)

    @property
    def ahead(self) -> int:
        """The largest number of forwards, of all ranges of blocks together, whose activations this
        rank holds at once."""
        return min(len(self.own) * self.virtual_stages, self.first_forwards + 1)

    @property
    def slots(self) -> int:
        """The number of micro-batches for which each range of blocks on this rank has buffers."""
        return max(1, min(len(self.own), self.ahead + SPARE_SLOTS))

    def order(self) -> list[RunBlocks]:
        """Return all forwards and backwards of the step on this rank, in order. Raises ConfigError
        if the interleaved schedule cannot run this number of micro-batches."""
        own, parts = self.own, range(self.virtual_stages)
        if len(parts) > 1 and self.num_microbatches % (self.stages * self.widths[0]):
            raise ConfigError(
                f"{self.num_microbatches} micro-batches cannot be divided over {self.stages} stages"
                f" of {len(parts)} parts each, in {self.widths[0]} replicas",
                hint="with virtual_stages above 1, num_microbatches must be a multiple of stages x"
                " replicas of a stage",
            )
        turns = [own[first : first + self.stages] for first in range(0, len(own), self.stages)]
        if self.virtual_stages == 1:
            turns = [own]
        forwards = [RunBlocks(FORWARD, i, False, k) for turn in turns for k in parts for i in turn]
        backwards = [
            RunBlocks(BACKWARD, i, i == own[-1], k)
            for turn in turns
            for k in reversed(parts)
            for i in turn
        ]
        warm = self.first_forwards
        out = forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards):
            out += [forward, backward]
        return out + backwards[len(forwards) - warm :]


class StageStateMachine:
    """The state machine of one replica of a stage in one step.

    Invariants (`check`): begun forwards minus ended backwards are at most the shape's `ahead`; each
    forward or backward runs once, after its inputs have arrived.
    """

    def __init__(self, shape: PipelineShape) -> None:
        """Compute the order of the step's forwards and backwards. Raises ConfigError if the
        interleaved schedule cannot run this number of micro-batches."""
        self.shape = shape
        self.order = shape.order()
        self.at = 0  # the index in `order` of the next run
        self.running: RunBlocks | None = None
        # the (micro, part) for which the input (FORWARD) or the gradient of the output (BACKWARD)
        # has arrived and has not been used
        self.here: dict[str, set[tuple[int, int]]] = {FORWARD: set(), BACKWARD: set()}
        if shape.stage == 0:
            self.here[FORWARD] = {(i, 0) for i in shape.own}
        self.ran: dict[str, int] = {FORWARD: 0, BACKWARD: 0}

    def arrived(self, what: str, micro: int, part: int = 0) -> list[RunBlocks]:
        """Record that the input (`what` FORWARD) or the gradient of the output (BACKWARD) of the
        stage's range of blocks `part` has arrived for micro-batch `micro`. Return at most one
        forward or backward that can begin now."""
        self.here[what].add((micro, part))
        return self._next()

    def start(self) -> list[RunBlocks]:
        return self._next()

    def consumer(self, run: RunBlocks) -> Peer | None:
        """Return the receiver of the result of `run`, or None for the loss and the gradient of the
        model's input."""
        return self._beside(run, 1 if run.what == FORWARD else -1)

    def producer(self, run: RunBlocks) -> Peer | None:
        """Return the sender of the input of `run`, or None if the input is the batch or the
        loss."""
        return self._beside(run, -1 if run.what == FORWARD else 1)

    def _beside(self, run: RunBlocks, step: int) -> Peer | None:
        turns, stage = divmod(self.shape.stage + step, self.shape.stages)
        part = run.part + turns
        if not 0 <= part < self.shape.virtual_stages:
            return None
        return Peer(stage, part, run.micro % self.shape.widths[stage])

    def sends(self) -> list[Transfer]:
        """Return the messages to other ranks in this step, in order."""
        return [found for run in self.order if (found := self.transfer(run)) is not None]

    def receives(self) -> list[Transfer]:
        """Return the messages from other ranks in this step, in the order in which this rank needs
        them. Over one boundary and direction, a sender sends its messages in this order, too."""
        return [found for run in self.order if (found := self.arrival(run)) is not None]

    def transfer(self, run: RunBlocks) -> Transfer | None:
        """Return the message that sends the result of `run` to another rank, or None."""
        return _between(run, self._own(run), self.consumer(run))

    def arrival(self, run: RunBlocks) -> Transfer | None:
        """Return the message from another rank that `run` needs, or None."""
        return _between(run, self.producer(run), self._own(run))

    def _own(self, run: RunBlocks) -> Peer:
        return Peer(self.shape.stage, run.part, self.shape.replica)

    def ended(self, run: RunBlocks) -> list[RunBlocks]:
        assert run == self.running
        self.running = None
        self.ran[run.what] += 1
        if run.what == FORWARD and self.consumer(run) is None:
            self.here[BACKWARD].add((run.micro, run.part))  # the loss is the input of its backward
        return self._next()

    def _next(self) -> list[RunBlocks]:
        if self.running is not None or self.at == len(self.order):
            return []
        run = self.order[self.at]
        if (run.micro, run.part) not in self.here[run.what]:
            return []
        self.here[run.what].remove((run.micro, run.part))
        self.at += 1
        self.running = run
        return [run]

    @property
    def finished(self) -> bool:
        return self.at == len(self.order) and self.running is None

    def check(self) -> None:
        """Assert the invariants of the class."""
        begun = sum(run.what == FORWARD for run in self.order[: self.at])
        assert 0 <= begun - self.ran[BACKWARD] <= self.shape.ahead
        assert all(
            micro in self.shape.own and 0 <= part < self.shape.virtual_stages
            for micro, part in self.here[FORWARD] | self.here[BACKWARD]
        )


def _between(run: RunBlocks, sender: Peer | None, receiver: Peer | None) -> Transfer | None:
    """Return the message from `sender` to `receiver`, or None if either is None or both are on one
    rank."""
    if sender is None or receiver is None:
        return None
    if (sender.stage, sender.replica) == (receiver.stage, receiver.replica):
        return None
    boundary = sender.stage if run.what == FORWARD else receiver.stage
    return Transfer(run.what, run.micro, boundary, sender, receiver)
