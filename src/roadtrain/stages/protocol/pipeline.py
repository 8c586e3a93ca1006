"""In which order a rank of a pipeline stage runs its micro-batches, and with whom it exchanges what
passes between stages: one forward, one backward, with a flush at the step's end.

Stage s of p: min(m, p - 1 - s) forwards, then a forward and a backward in turn, then the backwards
that are left (PipeDream-Flush; Narayanan et al., 2021). At most p - s micro-batches' activations
are held.

Stage s may have a width d_s: so many replicas, of which replica r runs the micro-batches i with
i mod d_s = r, in the same order among its own. Its forwards before the first backward are chosen
from the last stage backwards, so that all of the stage behind can be busy:

    w_{p-1} = 0        w_s = ceil((w_{s+1} + 1) d_{s+1} / d_s)        never more than it has

No rank waits for ever: the backward of micro-batch i in stage s + 1 needs that stage's forwards up
to i + w_{s+1} d_{s+1}, which stage s runs after the backward of i + w_{s+1} d_{s+1} - (w_s + 1) d_s
at most. That one is before i, as (w_s + 1) d_s > w_{s+1} d_{s+1}. Equal widths give the order
above.

A stage may have v parts of the model, part k of stage s after all of parts k - 1 (interleaved; the
same paper, section 2.2): the idle time (p - 1) (f + b) of a step shrinks to 1 / v of it. Forwards
go p micro-batches at a time through a stage's parts, backwards the same with its last part first; 2
(p - 1 - s) + (v - 1) p forwards come before the first backward. m is a multiple of p then, and the
widths are equal. Pure: events in, actions out; the runtime and the simulator drive the same state
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from roadtrain.errors import ConfigError

FORWARD, BACKWARD = "Forward", "Backward"
SPARE_SLOTS = 1  # micro-batches that may arrive before the order needs them


@dataclass(frozen=True, slots=True)
class RunBlocks:
    """Run the blocks of the stage's `part` for `micro`. `last`: their gradients are whole after
    this."""

    what: str
    micro: int
    last: bool = False
    part: int = 0


class Peer(NamedTuple):
    """A replica of a stage, and the part of the model that it runs there."""

    stage: int
    part: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a run leaves for another rank: activations (FORWARD), or their gradient (BACKWARD)."""

    what: str
    micro: int
    # boundary s is between stage s and the one after it; the one after the last is the first
    boundary: int
    sender: Peer
    receiver: Peer


@dataclass(frozen=True)
class PipelineShape:
    """A replica of a stage, and the step that it takes part in.

    widths: replicas of each stage. virtual_stages: parts of the model that each stage has.
    num_microbatches: of the step, over all replicas.
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
        """The micro-batches that run here."""
        return range(self.replica, self.num_microbatches, self.widths[self.stage])

    @property
    def first_forwards(self) -> int:
        """Forwards of one part before those that take turns with a backward."""
        if self.virtual_stages > 1:
            warm = 2 * (self.stages - 1 - self.stage) + (self.virtual_stages - 1) * self.stages
        else:
            warm = 0
            for behind in range(self.stages - 1, self.stage, -1):
                warm = -(-(warm + 1) * self.widths[behind] // self.widths[behind - 1])
        return min(len(self.own) * self.virtual_stages, warm)

    @property
    def ahead(self) -> int:
        """Most passes of one part of which this rank holds the activations at once."""
        return min(len(self.own) * self.virtual_stages, self.first_forwards + 1)

    @property
    def slots(self) -> int:
        """Micro-batches of one part for which a rank has buffers."""
        return max(1, min(len(self.own), self.ahead + SPARE_SLOTS))

    def order(self) -> list[RunBlocks]:
        """The whole order of the step on this rank. Raises ConfigError where parts take turns and
        micro-batches do not divide."""
        own, parts = self.own, range(self.virtual_stages)
        if len(parts) > 1 and self.num_microbatches % (self.stages * self.widths[0]):
            raise ConfigError(
                f"{self.num_microbatches} micro-batches go through {self.stages} stages of"
                f" {len(parts)} parts each, in {self.widths[0]} replicas",
                hint="with virtual_stages above 1 micro-batches are a multiple of the stages times"
                " their width",
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
    """One replica of a stage in one step. Invariants (`check`): forwards begun are at most `ahead`
    of backwards ended; each runs once, after what it needs has come."""

    def __init__(self, shape: PipelineShape) -> None:
        """Raises ConfigError as `PipelineShape.order`."""
        self.shape = shape
        self.order = shape.order()
        self.at = 0  # the index in `order` of what is begun next
        self.running: RunBlocks | None = None
        # (micro, part) whose input, or whose output's gradient, is here and not used yet
        self.here: dict[str, set[tuple[int, int]]] = {FORWARD: set(), BACKWARD: set()}
        if shape.stage == 0:
            self.here[FORWARD] = {(i, 0) for i in shape.own}
        self.ran: dict[str, int] = {FORWARD: 0, BACKWARD: 0}

    def arrived(self, what: str, micro: int, part: int = 0) -> list[RunBlocks]:
        """The activations (for FORWARD) or the gradient of them (for BACKWARD) of `micro` are
        here for `part`."""
        self.here[what].add((micro, part))
        return self._next()

    def start(self) -> list[RunBlocks]:
        return self._next()

    def consumer(self, run: RunBlocks) -> Peer | None:
        """Who needs what `run` leaves; None: nobody, or this stage's own backward of the loss."""
        return self._beside(run, 1 if run.what == FORWARD else -1)

    def producer(self, run: RunBlocks) -> Peer | None:
        """Whose run leaves what `run` needs; None: nobody's, it is the batch or the loss."""
        return self._beside(run, -1 if run.what == FORWARD else 1)

    def _beside(self, run: RunBlocks, step: int) -> Peer | None:
        turns, stage = divmod(self.shape.stage + step, self.shape.stages)
        part = run.part + turns
        if not 0 <= part < self.shape.virtual_stages:
            return None
        return Peer(stage, part, run.micro % self.shape.widths[stage])

    def sends(self) -> list[Transfer]:
        """What goes from here to other ranks in this step, in order."""
        return [found for run in self.order if (found := self.transfer(run)) is not None]

    def receives(self) -> list[Transfer]:
        """What comes here from other ranks in this step, in the order in which it is needed, so
        that receives can be posted ahead. On one boundary and direction the transfers between two
        ranks are in the order of the sender's `sends`."""
        return [found for run in self.order if (found := self.arrival(run)) is not None]

    def transfer(self, run: RunBlocks) -> Transfer | None:
        """The message that `run` leaves for another rank; None: there is none."""
        return _between(run, self._own(run), self.consumer(run))

    def arrival(self, run: RunBlocks) -> Transfer | None:
        """The message of another rank that `run` needs; None: there is none."""
        return _between(run, self.producer(run), self._own(run))

    def _own(self, run: RunBlocks) -> Peer:
        return Peer(self.shape.stage, run.part, self.shape.replica)

    def ended(self, run: RunBlocks) -> list[RunBlocks]:
        assert run == self.running
        self.running = None
        self.ran[run.what] += 1
        if run.what == FORWARD and self.consumer(run) is None:
            self.here[BACKWARD].add((run.micro, run.part))  # the loss
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
        """Assert every invariant."""
        begun = sum(run.what == FORWARD for run in self.order[: self.at])
        assert 0 <= begun - self.ran[BACKWARD] <= self.shape.ahead
        assert all(
            micro in self.shape.own and 0 <= part < self.shape.virtual_stages
            for micro, part in self.here[FORWARD] | self.here[BACKWARD]
        )


def _between(run: RunBlocks, sender: Peer | None, receiver: Peer | None) -> Transfer | None:
    """None where nothing passes between them, or they are on one rank."""
    if sender is None or receiver is None:
        return None
    if (sender.stage, sender.replica) == (receiver.stage, receiver.replica):
        return None
    boundary = sender.stage if run.what == FORWARD else receiver.stage
    return Transfer(run.what, run.micro, boundary, sender, receiver)
