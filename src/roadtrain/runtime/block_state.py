"""What a worker knows of each block while a step is open, and the links that it speaks by. Does
NOT send or wait: runtime/worker.py does."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol


class MessageLink(Protocol):
    """To one server: a Server of this process, or the end of a link to one elsewhere. Bulk bytes
    are named by messages as memoryviews (`into`, `grad`)."""

    peer: str  # for messages to people: "server 0 (/mnt/ssd0/run)"

    def send(self, message: Any) -> None:
        """Keeps the order, does not block. LostError once it is closed."""


@dataclass
class SquareSums:
    """Of squares, of one step's gradients of a block: chunk -> a segment each. `due`: chunk ->
    GradAccumulated messages to come; a chunk's come in the order of its pushes, also from one
    step to the next."""

    due: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)

    def came(self, chunk: int, values: Any) -> None:
        self.values[chunk] = values
        self.due[chunk] -= 1
        if not self.due[chunk]:
            del self.due[chunk]


@dataclass
class BlockState:
    """`version`: updates released so far. `held`: a gradient of the open step rests at the
    servers; `present`: the parameters that have one. `released_in`: the last step whose update
    of this block has begun. `sums`: of the open step, `sealed`: of those before, the last one
    and those that are not all here. `closed`: (several workers) all were told that it is
    whole."""

    version: int = 0
    held: bool = False
    present: set[int] = field(default_factory=set)
    released_in: int = -1
    closed: bool = False
    sums: SquareSums = field(default_factory=SquareSums)
    sealed: deque[SquareSums] = field(default_factory=lambda: deque([SquareSums()]))

    def came(self, chunk: int, values: Any) -> None:
        next(sums for sums in [*self.sealed, self.sums] if chunk in sums.due).came(chunk, values)

    def seal(self) -> None:
        while self.sealed and not self.sealed[0].due:
            self.sealed.popleft()
        self.sealed.append(self.sums)
        self.sums, self.closed = SquareSums(), False

    def due(self) -> int:
        """Steps sealed whose sums are not all here."""
        return sum(bool(sums.due) for sums in self.sealed)
