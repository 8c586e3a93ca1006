"""What a reducer does with a part that arrives: waits for all workers' of the round, has them
summed, begins again.

Rule `sum`: the sum of one round's parts, in the order of the workers, goes to all of them. Rule
`accumulate`: every part is added to what is there, and the new value goes back to its sender alone;
nobody waits (asynchronous training). A spare host that dies leaves parts to another: every worker
pushes such a part of the round again, or, if it has that sum already, the sum. One sum among them
is the answer to those who lack it: as it was added up once, it stays.

Pure. A worker pushes round r of a part after it has the sum of round r - 1, or has been told that
all who lack that have it, so a part is in one round at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from roadtrain.errors import LoopError

RULES = ("sum", "accumulate")


class Arrived(NamedTuple):
    """Worker -> reducer: a part of a tensor, or the sum of that part."""

    key: int  # of the tensor
    start: int  # its first element
    round: int
    elements: int
    format: str  # that they travel in
    summed: int = 0  # of the sum: the bytes of an element; 0: it is the worker's own part


@dataclass(slots=True)
class PartRound:
    """One round of a part."""

    round: int
    elements: int
    format: str
    here: set[int] = field(default_factory=set)  # workers whose part has come: some, not all
    summed: dict[int, int] = field(default_factory=dict)  # who has pushed the sum -> `Arrived`'s


class ReducerStateMachine:
    def __init__(self, workers: int, rule: str = "sum") -> None:
        assert rule in RULES
        self.workers, self.rule = workers, rule
        # (tensor, first element) -> the round it is in. Rounds only grow.
        self.meetings: dict[tuple[int, int], PartRound] = {}

    def arrived(self, worker: int, part: Arrived) -> PartRound | None:
        """What is to be added up now, if anything. Raises LoopError where workers do not do the
        same."""
        where = part.key, part.start
        meeting = self.meetings.get(where)
        if meeting is None or (meeting.round < part.round and not meeting.here):
            meeting = self._begin(part, meeting)
        if self.rule == "accumulate":
            meeting.round = max(meeting.round, part.round)
            return meeting
        if (meeting.round, meeting.elements, meeting.format) != (
            part.round,
            part.elements,
            part.format,
        ):
            raise LoopError(
                f"worker {worker} pushes {part.elements} elements of {part.format} of tensor"
                f" {part.key} in round {part.round}; worker(s) {sorted(meeting.here)}"
                f" {meeting.elements} of {meeting.format} in round {meeting.round}",
                hint="every worker runs the same loop over the same model",
            )
        if worker in meeting.here:
            raise LoopError(f"worker {worker} pushes round {part.round} of tensor {part.key} twice")
        meeting.here.add(worker)
        if part.summed:
            meeting.summed[worker] = part.summed
        if len(meeting.here) < self.workers:
            return None
        self.meetings[where] = PartRound(part.round, part.elements, part.format)
        return meeting

    def _begin(self, part: Arrived, before: PartRound | None) -> PartRound:
        """The part's next round."""
        if before is not None and (before.elements, before.format) != (part.elements, part.format):
            raise LoopError(
                f"tensor {part.key} had {before.elements} elements of {before.format} from"
                f" {part.start} on, and has {part.elements} of {part.format} in round"
                f" {part.round}",
                hint="give a tensor of another size or format another name",
            )
        begun = PartRound(part.round, part.elements, part.format)
        self.meetings[part.key, part.start] = begun
        return begun

    def given_up(self, worker: int) -> None:
        """It waits for no sum of what it has pushed. So do all soon, and go on with other keys;
        worker 0's word is also that for what is complete."""
        for where, meeting in list(self.meetings.items()):
            if worker in meeting.here or (worker == 0 and not meeting.here):
                del self.meetings[where]

    def missing(self) -> dict[tuple[int, int, int], list[int]]:
        """(key, start, round) that some have pushed -> the workers that have not."""
        return {
            (key, start, m.round): [w for w in range(self.workers) if w not in m.here]
            for (key, start), m in self.meetings.items()
            if m.here
        }

    def check(self) -> None:
        """Assert every invariant."""
        for meeting in self.meetings.values():
            assert len(meeting.here) < self.workers
            assert set(meeting.summed) <= meeting.here
