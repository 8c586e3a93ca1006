"""A worker's state of one block: the phase of the block's gradient in the open step, and the sums
of squares that have not arrived yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class GradPhase(Enum):
    """The phase of a block's gradient in the open step."""

    EMPTY = "empty"  # the servers hold no gradient of this worker
    HELD = "held"  # the servers hold a gradient of this worker
    # Only with several workers: the servers know that this worker has no gradient.
    EMPTY_CLOSED = "empty, closed"
    # Only with several workers: the servers know that this worker's gradient is complete.
    HELD_CLOSED = "held, closed"
    UPDATED = "updated"  # the update has begun


# The allowed transitions. A push after a close is allowed here, but the server refuses it.
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
    """The sums of squares of a block's gradients in one step that have arrived."""

    # chunk -> number of GradAccumulated messages that have not arrived yet. The messages about a
    # chunk arrive in the order of the pushes, also across steps.
    due: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)  # chunk -> the sum of each segment

    def add_sums(self, chunk: int, values: Any) -> None:
        self.values[chunk] = values
        self.due[chunk] -= 1
        if not self.due[chunk]:
            del self.due[chunk]


@dataclass
class BlockState:
    """A worker's state of a block."""

    updated_in: int  # the last step in which an update of this block began
    changed_in: int  # the last step in which an update with a gradient began
    version: int = 0  # version after all updates that have begun
    phase: GradPhase = GradPhase.EMPTY
    present: set[int] = field(default_factory=set)  # parameters with a gradient in the open step
    sums: SquareSums = field(default_factory=SquareSums)  # the sums of the open step
    # the sums of the last step that has ended, and of earlier steps whose sums are incomplete
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

    def add_sums(self, chunk: int, values: Any) -> None:
        next(sums for sums in [*self.ended, self.sums] if chunk in sums.due).add_sums(chunk, values)

    def end_step(self) -> None:
        while self.ended and not self.ended[0].due:
            self.ended.popleft()
        self.ended.append(self.sums)
        self.sums = SquareSums()
        if self.closed or self.updated:
            self.enter(GradPhase.HELD if self.held else GradPhase.EMPTY)

    def steps_due(self) -> int:
        """Return the number of ended steps for which sums of squares have not arrived yet."""
        return sum(bool(sums.due) for sums in self.ended)
