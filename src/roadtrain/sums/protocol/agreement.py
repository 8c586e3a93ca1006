"""State machine of the coordinator at worker 0. It checks that all workers begin the same
operations. No I/O, no clock.

    Say (a worker begins a new operation) ----------> Agreed, to all: all workers have begun it
    Stall (a worker has waited for a second) -------> Mismatch, to all: two workers began different
                                                      operations, or workers wait for each other
    AskBegun (the question to a blocked worker) ----> Has (its answer): whether the blocked worker
                                                      has begun the operation that another worker
                                                      waits for

A Mismatch begins a new epoch: all workers abandon incomplete operations and count from 0 again.

NOTE cycles. If each worker of a cycle waits for an operation that the next worker has not begun,
the workers are deadlocked. This holds even if the workers answer at different times, because a
blocked worker begins no operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective operation that a worker begins."""

    identity: str
    use: int  # number of earlier operations with this identity in the epoch
    signature: str
    # True: the workers must agree on every such operation. False: they agree once for each identity
    # and signature.
    each: bool = False

    @property
    def place(self) -> tuple[str, int]:
        return self.identity, self.use

    def __str__(self) -> str:
        return f"{self.identity!r} ({self.signature})"


@dataclass(frozen=True, slots=True)
class Agreed:
    """Tell all workers, or only worker `to`, that all workers have begun the operation."""

    operation: Operation
    to: int | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Tell all workers to begin a new epoch: workers have begun different operations or wait for
    each other."""

    epoch: int  # number of the new epoch
    words: str  # describes the mismatch


@dataclass(frozen=True, slots=True)
class AskWhetherBegun:
    """Ask the blocked worker `to` whether it has begun the operation with the identity and number
    in `place`."""

    to: int
    place: tuple[str, int]


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Tell all workers, or only worker `to`, that an operation needs a worker that has left."""

    words: str
    to: int | None = None


AgreementAction = Agreed | Mismatch | AskWhetherBegun | WorkerLost


@dataclass(slots=True)
class _Worker:
    """The state of a worker that waits, as last reported by the worker."""

    pending: Sequence[Operation] = ()
    blocked: Operation | None = None  # the operation on which the worker is blocked
    # places of operations that the worker had not begun while it was blocked on `blocked`
    lacks: set[tuple[str, int]] = field(default_factory=set)


class AgreementStateMachine:
    """Checks the operations of all workers.

    Args:
        waits: Whether the workers wait for each other in every operation. False in asynchronous
            training, where they wait only in operations with `each=True`.

    Invariants (`check`): if `waits`, each operation in `begun` lacks at least one worker. All
    workers that have begun an operation gave the same signature. `lacks` is empty for workers that
    are not blocked.
    """

    def __init__(self, workers: int, waits: bool = True) -> None:
        self.workers, self.waits, self.epoch = workers, waits, 0
        # place -> the operations that workers have begun at this place, by worker
        self.begun: dict[tuple[str, int], dict[int, Operation]] = {}
        self.agreed: set[tuple[str, str]] = set()  # (identity, signature)
        self.lost: dict[int, str] = {}  # workers that have left -> why
        self._workers = [_Worker() for _ in range(workers)]

    def say(self, worker: int, epoch: int, operation: Operation) -> list[AgreementAction]:
        """Handle a Say: a worker has begun an operation."""
        if epoch != self.epoch:
            return []  # the worker has not received the last Mismatch yet
        if not operation.each and (operation.identity, operation.signature) in self.agreed:
            return [Agreed(operation, worker)]
        waits = self.waits or operation.each
        if waits and self.lost:
            rank, why = next(iter(self.lost.items()))
            return [WorkerLost(f"{operation} needs worker {rank}, which has left: {why}", worker)]
        place = operation.place if waits else (operation.identity, 0)
        begun = self.begun.setdefault(place, {})
        begun[worker] = operation
        if found := self._mismatch(place):
            return found
        if not waits or len(begun) < self.workers:
            return []
        del self.begun[place]
        if not operation.each:
            self.agreed.add((operation.identity, operation.signature))
        return [Agreed(operation)]

    def stall(
        self, worker: int, epoch: int, pending: Sequence[Operation], blocked: Operation | None
    ) -> list[AgreementAction]:
        """Handle a Stall: a worker reports operations that are not done after a second, and the
        operation, if any, on which it is blocked."""
        if epoch != self.epoch or not self.waits:
            return []
        mine = self._workers[worker]
        if mine.blocked is None or blocked is None or mine.blocked.place != blocked.place:
            mine.lacks = set()
        mine.pending, mine.blocked = pending, blocked
        for operation in pending:
            if found := self._mismatch(operation.place):
                return found
        if blocked is None:
            return []
        return [
            AskWhetherBegun(rank, blocked.place)
            for rank, other in enumerate(self._workers)
            if rank != worker and other.blocked is not None and blocked.place not in other.lacks
        ]

    def has(
        self,
        worker: int,
        epoch: int,
        place: tuple[str, int],
        began: bool,
        blocked: tuple[str, int] | None,
    ) -> list[AgreementAction]:
        """Handle a worker's answer to AskWhetherBegun about the operation `place`. `blocked` is the
        operation on which the worker is blocked, or None."""
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

    def left(self, worker: int, why: str) -> list[AgreementAction]:
        """Handle the loss of a worker. `why` is shown to workers that wait for the lost worker."""
        self.lost[worker] = why
        self._workers[worker] = _Worker()
        for begun in self.begun.values():
            operation = next(iter(begun.values()))
            if worker not in begun and (self.waits or operation.each):
                return [WorkerLost(f"{operation} needs worker {worker}, which has left: {why}")]
        return []

    def _mismatch(self, place: tuple[str, int]) -> list[AgreementAction]:
        """Return a Mismatch if workers gave different signatures to the operation `place`, else an
        empty list."""
        found = {rank: operation.signature for rank, operation in self.begun.get(place, {}).items()}
        for rank, worker in enumerate(self._workers):
            for operation in worker.pending:
                if operation.place == place:
                    found[rank] = operation.signature
        if len(set(found.values())) < 2:
            return []
        ranks: dict[str, list[int]] = {}
        for rank in sorted(found):
            ranks.setdefault(found[rank], []).append(rank)
        parts = [
            f"worker{'s' * (len(own) > 1)} {', '.join(map(str, own))}: {signature}"
            for signature, own in ranks.items()
        ]
        return self._verdict(f"workers differ about {place[0]!r}: " + "; ".join(parts))

    def _ring(self, worker: int, path: list[int]) -> list[int]:
        """Find a cycle of workers in which each waits for an operation that the next has not
        begun."""
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

    def _verdict(self, words: str) -> list[AgreementAction]:
        self.epoch += 1
        self.begun.clear()
        self.agreed.clear()
        self._workers = [_Worker() for _ in range(self.workers)]
        return [Mismatch(self.epoch, words)]

    def check(self) -> None:
        for begun in self.begun.values():
            assert 0 < len(begun) < self.workers or not self.waits
            assert len({operation.signature for operation in begun.values()}) == 1
        assert all(worker.blocked is not None or not worker.lacks for worker in self._workers)
