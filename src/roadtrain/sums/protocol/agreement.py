"""Whether all workers mean the same by an operation: what the coordinator (at worker 0) makes of
what they say.

    Say (an operation is new to a worker) ------> Agreed, to all: all have said the same
    Stall (it waits since a second, for this) --> Differ, to all: two said different things, or wait
    for each other
    Ask, Has: whether a worker that is blocked has begun what another one waits for

An operation is the `use`-th of an identity (a name, or "an unnamed sum"), with a signature: type,
shape, what is done. Those of an identity and signature that all have said once need no word any
more, but for those that are agreed each time. A Differ begins a new epoch: what is not complete is
given up by all, all numbers begin anew.

NOTE cycles. Worker A is blocked on X; worker B, blocked on Y, had not begun X when it was asked: it
cannot begin X before Y is done. A ring of such facts can never be undone, whenever each of them was
true: an operation has one number, and who is blocked begins nothing. So no common moment is needed.

Pure. Assumes that a worker which says it is blocked begins nothing until that operation is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Operation:
    """`each`: agreed every time, not once for its identity and signature."""

    identity: str
    use: int
    signature: str
    each: bool = False

    @property
    def place(self) -> tuple[str, int]:
        return self.identity, self.use

    def __str__(self) -> str:
        return f"{self.identity!r} ({self.signature})"


@dataclass(frozen=True, slots=True)
class Agreed:
    """To all workers, or to the one that did not know it yet."""

    operation: Operation
    to: int | None = None


@dataclass(frozen=True, slots=True)
class Differ:
    """To all workers: one sentence, and the epoch that begins."""

    epoch: int
    words: str


@dataclass(frozen=True, slots=True)
class AskWhetherBegun:
    """To a worker that is blocked: has it begun that?"""

    to: int
    place: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Gone:
    """What waits for a worker that has gone never comes. To all workers, or to the one that
    asks for it."""

    words: str
    to: int | None = None


Said = Agreed | Differ | AskWhetherBegun | Gone


@dataclass(slots=True)
class _Worker:
    """What it said last when it waited for a second."""

    pending: Sequence[Operation] = ()
    blocked: Operation | None = None
    # had not begun these when blocked on that
    lacks: set[tuple[str, int]] = field(default_factory=set)


class AgreementStateMachine:
    """`waits` False: asynchronous training, nobody waits for others but where an operation is
    agreed each time.
    Invariants (`check`): said by fewer than all workers, with one signature; nobody is blocked in
    another epoch.
    """

    def __init__(self, workers: int, waits: bool = True) -> None:
        self.workers, self.waits, self.epoch = workers, waits, 0
        self.said: dict[tuple[str, int], dict[int, Operation]] = {}
        self.agreed: set[tuple[str, str]] = set()
        self.gone: dict[int, str] = {}
        self._workers = [_Worker() for _ in range(workers)]

    def say(self, worker: int, epoch: int, operation: Operation) -> list[Said]:
        if epoch != self.epoch:
            return []  # a Differ is on its way to it
        if not operation.each and (operation.identity, operation.signature) in self.agreed:
            return [Agreed(operation, worker)]
        waits = self.waits or operation.each
        if waits and self.gone:
            rank, why = next(iter(self.gone.items()))
            return [Gone(f"worker {rank} has gone, {operation} waits for it: {why}", worker)]
        place = operation.place if waits else (operation.identity, 0)
        said = self.said.setdefault(place, {})
        said[worker] = operation
        if found := self._differ(place):
            return found
        if not waits or len(said) < self.workers:
            return []
        del self.said[place]
        if not operation.each:
            self.agreed.add((operation.identity, operation.signature))
        return [Agreed(operation)]

    def stall(
        self, worker: int, epoch: int, pending: Sequence[Operation], blocked: Operation | None
    ) -> list[Said]:
        """`pending`: what this worker has waited for since a second; `blocked`: what its thread
        waits for."""
        if epoch != self.epoch or not self.waits:
            return []
        mine = self._workers[worker]
        if mine.blocked is None or blocked is None or mine.blocked.place != blocked.place:
            mine.lacks = set()
        mine.pending, mine.blocked = pending, blocked
        for operation in pending:
            if found := self._differ(operation.place):
                return found
        others = [
            (rank, one)
            for rank, one in enumerate(self._workers)
            if rank != worker and one.blocked is not None
        ]
        if blocked is None:
            return []
        return [
            AskWhetherBegun(rank, blocked.place)
            for rank, one in others
            if blocked.place not in one.lacks
        ]

    def has(
        self,
        worker: int,
        epoch: int,
        place: tuple[str, int],
        began: bool,
        blocked: tuple[str, int] | None,
    ) -> list[Said]:
        mine = self._workers[worker]
        if epoch != self.epoch or began or mine.blocked is None or mine.blocked.place != blocked:
            return []
        mine.lacks.add(place)
        ring = self._ring(worker, [])
        if not ring:
            return []
        parts = [
            f"worker {rank} waits for {self._workers[rank].blocked}, which worker"
            f" {ring[(i + 1) % len(ring)]} has not begun"
            for i, rank in enumerate(ring)
        ]
        return self._verdict("workers wait for each other: " + "; ".join(parts))

    def left(self, worker: int, why: str) -> list[Said]:
        """Its link has ended."""
        self.gone[worker] = why
        self._workers[worker] = _Worker()
        for said in self.said.values():
            operation = next(iter(said.values()))
            if worker not in said and (self.waits or operation.each):
                return [Gone(f"worker {worker} has gone, {operation} waits for it: {why}")]
        return []

    def _differ(self, place: tuple[str, int]) -> list[Said]:
        """Whether two workers mean different things by it."""
        meant = {rank: one.signature for rank, one in self.said.get(place, {}).items()}
        for rank, one in enumerate(self._workers):
            for operation in one.pending:
                if operation.place == place:
                    meant[rank] = operation.signature
        if len(set(meant.values())) < 2:
            return []
        ranks: dict[str, list[int]] = {}
        for rank in sorted(meant):
            ranks.setdefault(meant[rank], []).append(rank)
        parts = [
            f"worker{'s' * (len(own) > 1)} {', '.join(map(str, own))}: {signature}"
            for signature, own in ranks.items()
        ]
        return self._verdict(f"workers differ about {place[0]!r}: " + "; ".join(parts))

    def _ring(self, worker: int, path: list[int]) -> list[int]:
        """Workers of which each waits for what the next one lacks, from `worker` back to it."""
        if path and worker == path[0]:
            return path
        mine = self._workers[worker]
        if mine.blocked is None or worker in path:
            return []
        for rank, other in enumerate(self._workers):
            if (
                rank != worker
                and mine.blocked.place in other.lacks
                and (ring := self._ring(rank, [*path, worker]))
            ):
                return ring
        return []

    def _verdict(self, words: str) -> list[Said]:
        self.epoch += 1
        self.said.clear()
        self.agreed.clear()
        self._workers = [_Worker() for _ in range(self.workers)]
        return [Differ(self.epoch, words)]

    def check(self) -> None:
        for said in self.said.values():
            assert 0 < len(said) < self.workers or not self.waits
            assert len({operation.signature for operation in said.values()}) == 1
        assert all(one.blocked is not None or not one.lacks for one in self._workers)
