"""What workers have said of one chunk whose gradients are summed in the network, and its rounds:
the part of fan_in.py that each chunk has of its own. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from roadtrain.servers.protocol.messages import ApplyUpdate, Close, DiscardGrad


@dataclass(frozen=True, slots=True)
class Announce:
    """A worker has a gradient of the chunk to be summed."""

    chunk: int
    fresh: bool  # its first of this step: it replaces what is held
    worker: int = 0


GradientWord: TypeAlias = Announce | Close | ApplyUpdate | DiscardGrad


class RoundPhase(Enum):
    EXPONENTS = "exponents"  # of all workers, on their way
    READY = "ready"  # their maxima are here: waits for its turn and a sum buffer
    GRADIENT = "gradient"  # integers are on their way to the sum buffer
    SUMMED = "summed"  # waits for what goes to the server before it
    PUSHED = "pushed"  # the server takes it out of the sum buffer


AFTER = {
    RoundPhase.EXPONENTS: RoundPhase.READY,
    RoundPhase.READY: RoundPhase.GRADIENT,
    RoundPhase.GRADIENT: RoundPhase.SUMMED,
    RoundPhase.SUMMED: RoundPhase.PUSHED,
}


@dataclass(slots=True)
class SumRound:
    """One sum of a chunk."""

    chunk: int
    number: int  # counts the sums of this chunk, from 1
    fresh: bool  # the first since the chunk's last update
    since: float  # when its phase began
    phase: RoundPhase = RoundPhase.EXPONENTS
    buffer: int | None = None  # for the sum; from GRADIENT on

    def enter(self, phase: RoundPhase, now_s: float) -> None:
        assert AFTER[self.phase] is phase
        self.phase, self.since = phase, now_s


@dataclass(frozen=True, slots=True)
class Heard:
    """What one worker said, and when."""

    word: GradientWord
    since: float


@dataclass(slots=True)
class ChunkQueue:
    """What is said of one chunk. Invariant: some worker's `heard` is empty, or all are matched."""

    number: int
    heard: list[deque[Heard]]  # of each worker what the others have not said yet, in order
    # Since the chunk's last update or discard:
    announced: set[int] = field(default_factory=set)  # workers that had a gradient
    without: set[int] = field(default_factory=set)  # lacking in a round (NOTE alone)
    summed: bool = False  # there was a round
    closed: bool = False  # all have closed it, and nothing has come after that
    rounds: int = 0  # of this chunk, ever
    # What goes to the server, in order; empty, or a round that is not SUMMED comes first.
    up: deque[SumRound | Close | ApplyUpdate | DiscardGrad] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return not (any(self.heard) or self.up or self.summed or self.closed)

    @property
    def lacking(self) -> set[int]:
        """Workers that others wait for."""
        return {worker for worker, heard in enumerate(self.heard) if not heard}

    @property
    def heads(self) -> list[GradientWord]:
        """The first unmatched word of each worker, where there is one."""
        return [heard[0].word for heard in self.heard if heard]

    def at(self, kind: type[Any]) -> set[int]:
        """Workers whose first word is of that kind."""
        return {
            w for w, heard in enumerate(self.heard) if heard and isinstance(heard[0].word, kind)
        }

    @property
    def dropped(self) -> bool:
        """Whether all that have a gradient in the sum drop it next."""
        drop = self.at(DiscardGrad)
        return bool(drop) and self.announced <= drop

    def pop(self, kind: type[Any]) -> list[Any]:
        """The first words that are of that kind, by worker."""
        return [self.heard[worker].popleft().word for worker in sorted(self.at(kind))]

    def begin(self) -> None:
        """The chunk was updated, or what was pushed of it dropped."""
        self.announced, self.without, self.summed, self.closed = set(), set(), False, False


@dataclass(frozen=True, slots=True)
class LateWorker:
    """Others have said something of a chunk; this one has not."""

    worker: int
    chunk: int
    since: float  # when the first of the others said it
