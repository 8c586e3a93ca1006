"""The state of one chunk at the fan-in end: the queued messages of workers and the state of the
chunk's sum. No clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from roadtrain.servers.protocol.messages import ApplyUpdate, Close, DiscardGrad


@dataclass(frozen=True, slots=True)
class Announce:
    """An event: a worker announces a gradient of a chunk, which is to be summed."""

    chunk: int
    fresh: bool  # whether it is the worker's first gradient of the step: it replaces the sum
    worker: int = 0


GradientMessage: TypeAlias = Announce | Close | ApplyUpdate | DiscardGrad


class RoundPhase(Enum):
    EXPONENTS = "exponents"  # the exponents of all workers are in flight
    READY = "ready"  # has the maxima; waits for its turn and a sum buffer
    GRADIENT = "gradient"  # the integers are in flight
    SUMMED = "summed"  # the sum is complete; waits for earlier messages to the server
    PUSHED = "pushed"  # the server is reading the sum buffer


AFTER = {
    RoundPhase.EXPONENTS: RoundPhase.READY,
    RoundPhase.READY: RoundPhase.GRADIENT,
    RoundPhase.GRADIENT: RoundPhase.SUMMED,
    RoundPhase.SUMMED: RoundPhase.PUSHED,
}


@dataclass(slots=True)
class SumRound:
    """The fan-in end's state of one sum of a chunk's gradients."""

    chunk: int
    number: int  # counts the sums of this chunk, from 1
    fresh: bool  # the first one since the chunk's last update
    since: float  # when its phase began
    phase: RoundPhase = RoundPhase.EXPONENTS
    buffer: int | None = None  # the sum buffer, from GRADIENT on

    def enter(self, phase: RoundPhase, now_s: float) -> None:
        assert AFTER[self.phase] is phase
        self.phase, self.since = phase, now_s


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A message of a worker, and the time when it arrived."""

    message: GradientMessage
    since: float


@dataclass(slots=True)
class ChunkQueue:
    """The state of one chunk. `queues` has a queue for each worker, and at least one of them is
    empty.
    """

    number: int
    # for each worker, its messages for which some other worker has not sent the matching message
    queues: list[deque[QueuedMessage]]
    # Since the chunk's last update or discard:
    announced: set[int] = field(default_factory=set)  # workers that had a gradient
    without: set[int] = field(default_factory=set)  # left out of a round (NOTE alone)
    summed: bool = False  # there was a round
    closed: bool = False  # all workers have closed it, and nothing was announced since
    rounds: int = 0  # all rounds of this chunk so far
    # Rounds and messages for the server, in order. If not empty, it begins with a round that is not
    # SUMMED yet.
    up: deque[SumRound | Close | ApplyUpdate | DiscardGrad] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return not (any(self.queues) or self.up or self.summed or self.closed)

    @property
    def lacking(self) -> set[int]:
        """The workers with an empty queue, for which all other workers wait."""
        return {worker for worker, queue in enumerate(self.queues) if not queue}

    @property
    def heads(self) -> list[GradientMessage]:
        """The first message of each queue that is not empty."""
        return [queue[0].message for queue in self.queues if queue]

    def at(self, kind: type[Any]) -> set[int]:
        """Return the workers whose first message is an instance of `kind`."""
        return {
            w for w, queue in enumerate(self.queues) if queue and isinstance(queue[0].message, kind)
        }

    @property
    def dropped(self) -> bool:
        """True if the sum is to be discarded, because all workers with a gradient in it request
        that.
        """
        drop = self.at(DiscardGrad)
        return bool(drop) and self.announced <= drop

    def pop(self, kind: type[Any]) -> list[Any]:
        """Remove and return the first messages that are instances of `kind`, in worker order."""
        return [self.queues[worker].popleft().message for worker in sorted(self.at(kind))]

    def begin(self) -> None:
        """Reset the state of the sum, after an update or a discard."""
        self.announced, self.without, self.summed, self.closed = set(), set(), False, False


@dataclass(frozen=True, slots=True)
class LateWorker:
    """A worker that has not sent a message about a chunk, although others have."""

    worker: int
    chunk: int
    since: float  # when the first of the others' messages arrived
