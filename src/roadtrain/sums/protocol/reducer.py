"""State machine of a reducer: collect the parts of all workers in a round, then have them summed.

Rule `sum`: the parts of a round are summed in the order of the workers, and all of them get the
sum. Rule `accumulate` (asynchronous training): each part is added to the accumulated value at once,
and only its sender gets the new value.

If a spare host dies, another reducer takes over its parts. Each worker pushes its part of the round
again, or, if it already has the sum, the sum. If at least one worker pushed the sum, that is sent
to the others instead of adding again, so that all workers have the same bits.

No I/O, no clock. A worker pushes round r of a part after it has the sum of round r - 1 and, if it
pushed that sum, after all workers have it. So a part is in one round at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from roadtrain.errors import LoopError

RULES = ("sum", "accumulate")


class Arrived(NamedTuple):
    """The header of a pushed part: a worker's part of a tensor, or the sum of that part."""

    key: int  # of the tensor
    start: int  # first element of the part
    round: int
    elements: int
    format: str  # wire format of the elements
    summed: int = 0  # 0: the worker's own part; else the sum, with so many bytes per element


@dataclass(slots=True)
class PartRound:
    """One round of a part."""

    round: int
    elements: int
    format: str
    here: set[int] = field(default_factory=set)  # workers whose part has arrived; not all
    summed: dict[int, int] = field(default_factory=dict)  # workers that pushed the sum -> `summed`


class ReducerStateMachine:
    def __init__(self, workers: int, rule: str = "sum") -> None:
        assert rule in RULES
        self.workers, self.rule = workers, rule
        # (tensor, first element) -> its current round; round numbers only increase
        self.rounds: dict[tuple[int, int], PartRound] = {}

    def arrived(self, worker: int, part: Arrived) -> PartRound | None:
        """Take a pushed part. Returns the round to add up now, if any. Raises LoopError if the
        workers contradict each other."""
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
                f" {part.key} in round {part.round}, worker(s) {sorted(current.here)} pushed"
                f" {current.elements} of {current.format} in round {current.round}",
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
        """Begin the part's next round."""
        if before is not None and (before.elements, before.format) != (part.elements, part.format):
            raise LoopError(
                f"tensor {part.key} has {part.elements} elements of {part.format} from element"
                f" {part.start} on in round {part.round}, it had {before.elements} of"
                f" {before.format} before",
                hint="give a tensor of another size or format another name",
            )
        begun = PartRound(part.round, part.elements, part.format)
        self.rounds[part.key, part.start] = begun
        return begun

    def give_up(self, worker: int) -> None:
        """Drop the rounds in which a worker waits for a sum: it has abandoned them, as all workers
        will, and uses other keys from now on. For worker 0, also drop complete rounds."""
        for where, current in list(self.rounds.items()):
            if worker in current.here or (worker == 0 and not current.here):
                del self.rounds[where]

    def missing(self) -> dict[tuple[int, int, int], list[int]]:
        """Map (key, start, round) of each incomplete round to the workers that it waits for."""
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
