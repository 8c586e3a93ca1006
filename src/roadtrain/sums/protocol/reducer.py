"""State machine of a reducer. It collects the parts of all workers in a round; then the caller sums
these parts. No I/O, no clock.

With the rule `sum`, the parts of a round are summed in the order of the workers, and all workers
get the sum. With the rule `accumulate` (asynchronous training), each part is added to the
accumulated value at once, and only its sender gets the new value.

If a spare host dies, another reducer takes over its parts. Workers that have the sum of a round
push the sum, and the others push their parts again. If any worker has pushed the sum, the reducer
sends this sum on instead of adding, so all workers have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from roadtrain.errors import LoopError

RULES = ("sum", "accumulate")


class Arrived(NamedTuple):
    """The header of a pushed part. The payload is a worker's part of a tensor, or, if `summed` is
    not 0, the sum of this part."""

    key: int  # of the tensor
    start: int  # first element of the part
    round: int
    elements: int
    format: str  # wire format of the elements
    # 0 if this is the worker's own part. Otherwise this is the sum, and `summed` is the number of
    # bytes of an element.
    summed: int = 0


@dataclass(slots=True)
class PartRound:
    """The state of one round of summing a part."""

    round: int
    elements: int
    format: str
    here: set[int] = field(default_factory=set)  # workers whose part has arrived
    summed: dict[int, int] = field(default_factory=dict)  # workers that pushed the sum -> `summed`


class ReducerStateMachine:
    def __init__(self, workers: int, rule: str = "sum") -> None:
        assert rule in RULES
        self.workers, self.rule = workers, rule
        # (tensor, first element) -> its current round; round numbers only increase
        self.rounds: dict[tuple[int, int], PartRound] = {}

    def arrived(self, worker: int, part: Arrived) -> PartRound | None:
        """Handle a pushed part. Returns the part's round if parts can be added now, otherwise None.
        Raises LoopError if the workers contradict each other."""
        where = part.key, part.start
        current = self.rounds.get(where)
        if current is None or (current.round < part.round and not current.here):
            current = self._begin(part, current)
        if self.rule == "accumulate":
            current.round = max(current.round, part.round)
            return current
        if (current.round, current.elements, current.format) != (
            part.round,
            part.elements,
            part.format,
        ):
            raise LoopError(
                f"worker {worker} pushed {part.elements} elements of {part.format} of tensor"
                f" {part.key} in round {part.round}, but worker(s) {sorted(current.here)} pushed"
                f" {current.elements} elements of {current.format} in round {current.round}",
                hint="every worker must run the same loop over the same model",
            )
        if worker in current.here:
            raise LoopError(f"worker {worker} pushed round {part.round} of tensor {part.key} twice")
        current.here.add(worker)
        if part.summed:
            current.summed[worker] = part.summed
        if len(current.here) < self.workers:
            return None
        self.rounds[where] = PartRound(part.round, part.elements, part.format)
        return current

    def _begin(self, part: Arrived, before: PartRound | None) -> PartRound:
        """Begin the next round of a part. Raises LoopError if the part's size or format has
        changed."""
        if before is not None and (before.elements, before.format) != (part.elements, part.format):
            raise LoopError(
                f"tensor {part.key} has changed: the part that begins at element {part.start} has"
                f" {part.elements} elements of {part.format} in round {part.round}, but had"
                f" {before.elements} elements of {before.format} in the last round",
                hint="use a new name for a tensor whose size or format has changed",
            )
        begun = PartRound(part.round, part.elements, part.format)
        self.rounds[part.key, part.start] = begun
        return begun

    def give_up(self, worker: int) -> None:
        """Drop the rounds in which `worker` waits for a sum, because the worker has abandoned these
        rounds. Rounds in which no worker waits are dropped when worker 0 gives up."""
        for where, current in list(self.rounds.items()):
            if worker in current.here or (worker == 0 and not current.here):
                del self.rounds[where]

    def missing(self) -> dict[tuple[int, int, int], list[int]]:
        """Return the incomplete rounds: (key, first element of the part, round) -> workers whose
        part is missing."""
        return {
            (key, start, r.round): [w for w in range(self.workers) if w not in r.here]
            for (key, start), r in self.rounds.items()
            if r.here
        }

    def check(self) -> None:
        """Assert every invariant."""
        for current in self.rounds.values():
            assert len(current.here) < self.workers
            assert set(current.summed) <= current.here
