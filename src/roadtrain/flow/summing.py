"""What a summer does with a part that arrives: waits for all workers' of the round, has them summed, begins again.

Rule `sum`: the sum of one round's parts, in the order of the workers, goes to all of them. Rule `accumulate`: every
part is added to what is there, and the new value goes back to its sender alone; nobody waits (asynchronous training).
Pure. A worker pushes round r of a part after it has the sum of round r - 1, so a part is in one round at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roadtrain.errors import LoopError

RULES = ("sum", "accumulate")


@dataclass(frozen=True, slots=True)
class Arrived:
    """Worker -> summer. `key`, `start` name the part; `elements` of `dtype`."""

    key: int
    start: int
    round: int
    elements: int
    dtype: str


@dataclass(slots=True)
class Meeting:
    """Of one part. `here`: whose has come in `round`."""

    round: int
    elements: int
    dtype: str
    here: set[int] = field(default_factory=set)


class SumDecider:
    """Invariants (`check`): a meeting is of fewer than all workers; rounds of a part only grow."""

    def __init__(self, workers: int, rule: str = "sum") -> None:
        assert rule in RULES
        self.workers, self.rule = workers, rule
        self.meetings: dict[tuple[int, int], Meeting] = {}

    def arrived(self, worker: int, part: Arrived) -> bool:
        """Whether there is something to add up now. Raises LoopError where workers do not do the same."""
        where = part.key, part.start
        meeting = self.meetings.get(where)
        if meeting is None or (meeting.round < part.round and not meeting.here):
            same = meeting is None or (meeting.elements, meeting.dtype) == (part.elements, part.dtype)
            if not same:
                assert meeting is not None
                raise LoopError(f"tensor {part.key} had {meeting.elements} elements of {meeting.dtype} from "
                                f"{part.start} on, and has {part.elements} of {part.dtype} in round {part.round}",
                                hint="give a tensor of another size another name")
            meeting = self.meetings[where] = Meeting(part.round, part.elements, part.dtype)
        if self.rule == "accumulate":
            meeting.round = max(meeting.round, part.round)
            return True
        if (meeting.round, meeting.elements, meeting.dtype) != (part.round, part.elements, part.dtype):
            raise LoopError(
                f"worker {worker} pushes {part.elements} elements of {part.dtype} of tensor {part.key} in round "
                f"{part.round}; worker(s) {sorted(meeting.here)} {meeting.elements} of {meeting.dtype} in round "
                f"{meeting.round}", hint="every worker runs the same loop over the same model")
        if worker in meeting.here:
            raise LoopError(f"worker {worker} pushes round {part.round} of tensor {part.key} twice")
        meeting.here.add(worker)
        if len(meeting.here) < self.workers:
            return False
        meeting.here.clear()
        return True

    def missing(self) -> dict[tuple[int, int, int], list[int]]:
        """(key, start, round) that some have pushed -> the workers that have not."""
        return {(key, start, m.round): [w for w in range(self.workers) if w not in m.here]
                for (key, start), m in self.meetings.items() if m.here}

    def check(self) -> None:
        assert all(len(meeting.here) < self.workers for meeting in self.meetings.values())
