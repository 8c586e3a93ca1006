"""What a worker knows of one block: how far its gradient of the open step is, and which sums of
squares are to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class GradPhase(Enum):
    """Of a block's gradient in the open step."""

    EMPTY = "empty"  # nothing of it is held
    HELD = "held"  # it rests at the servers
    EMPTY_CLOSED = "empty, closed"  # (several workers) all know that this one has none
    HELD_CLOSED = "held, closed"  # (several workers) all know that it is whole
    UPDATED = "updated"  # its update has begun


# Which phase may follow which. A push behind a close is the server's to refuse.
NEXT_PHASES: Mapping[GradPhase, frozenset[GradPhase]] = {
    GradPhase.EMPTY: frozenset({GradPhase.HELD, GradPhase.EMPTY_CLOSED, GradPhase.UPDATED}),
    GradPhase.HELD: frozenset(
        {GradPhase.HELD, GradPhase.EMPTY, GradPhase.HELD_CLOSED, GradPhase.UPDATED}
    ),
    GradPhase.EMPTY_CLOSED: frozenset({GradPhase.HELD_CLOSED, GradPhase.EMPTY, GradPhase.UPDATED}),
    GradPhase.HELD_CLOSED: frozenset(
        {GradPhase.HELD_CLOSED, GradPhase.HELD, GradPhase.EMPTY, GradPhase.UPDATED}
    ),
    GradPhase.UPDATED: frozenset({GradPhase.EMPTY}),
}
HELD = frozenset({GradPhase.HELD, GradPhase.HELD_CLOSED})
CLOSED = frozenset({GradPhase.EMPTY_CLOSED, GradPhase.HELD_CLOSED})


@dataclass
class SquareSums:
    """Sums of squares of one step's gradients of a block."""

    # chunk -> GradAccumulated messages to come; a chunk's come in the order of its pushes, also
    # from one step to the next
    due: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)  # chunk -> a segment each

    def came(self, chunk: int, values: Any) -> None:
        self.values[chunk] = values
        self.due[chunk] -= 1
        if not self.due[chunk]:
            del self.due[chunk]


@dataclass
class BlockState:
    """What a worker knows of a block."""

    updated_in: int  # the last step whose update of this block has begun
    changed_in: int  # the last one in which there was something to update
    version: int = 0  # that the updates begun so far give it
    phase: GradPhase = GradPhase.EMPTY
    present: set[int] = field(default_factory=set)  # parameters with a gradient in the open step
    sums: SquareSums = field(default_factory=SquareSums)  # of the open step
    # of steps that have ended: of the last one, and those that are not all here
    ended: deque[SquareSums] = field(default_factory=lambda: deque([SquareSums()]))

    @property
    def held(self) -> bool:
        return self.phase in HELD

    @property
    def closed(self) -> bool:
        return self.phase in CLOSED

    @property
    def updated(self) -> bool:
        return self.phase is GradPhase.UPDATED

    def enter(self, phase: GradPhase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase

    def came(self, chunk: int, values: Any) -> None:
        next(sums for sums in [*self.ended, self.sums] if chunk in sums.due).came(chunk, values)

    def end_step(self) -> None:
        while self.ended and not self.ended[0].due:
            self.ended.popleft()
        self.ended.append(self.sums)
        self.sums = SquareSums()
        if self.closed or self.updated:
            self.enter(GradPhase.HELD if self.held else GradPhase.EMPTY)

    def steps_due(self) -> int:
        """Steps that have ended and whose sums are not all here."""
        return sum(bool(sums.due) for sums in self.ended)
