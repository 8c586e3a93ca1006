"""The order of operations at a server: DeviceQueue chooses the next operation of a storage device,
and Turns chooses the next pull to answer. The caller must hold a lock.

Parameters are read first, then state is read, then state is written. In mixed mode, reads and
writes of state run concurrently. In burst mode, only one direction runs at a time, which makes some
devices faster.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
READ_PARAMETERS, READ_STATE, WRITE_STATE = 0, 1, 2


@dataclass
class DeviceQueue:
    """The waiting operations of a storage device. At most `limit` operations of each priority run
    at once.

    Call `done` once for each operation that `next` returned. In burst mode, reads and writes of
    state never run at the same time.
    """

    burst: bool = False
    burst_ops: int = 8
    limit: int = 2
    waiting: dict[int, list[tuple[int, int, Any]]] = field(
        default_factory=lambda: {0: [], 1: [], 2: []}
    )
    running: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0, 2: 0})
    _direction: int = READ_STATE
    _left: int = 0
    _count: int = 0

    def push(self, priority: int, order: int, item: Any) -> None:
        """Add an operation. Within a priority, the smallest `order` is next, then the earliest."""
        self._count += 1
        heapq.heappush(self.waiting[priority], (order, self._count, item))

    def next(self) -> tuple[int, Any] | None:
        """Return the next (priority, item) that may start now, or None."""
        directions = self._burst_directions() if self.burst else (READ_STATE, WRITE_STATE)
        for priority in (READ_PARAMETERS, *directions):
            if self.waiting[priority] and self.running[priority] < self.limit:
                self._left -= priority != READ_PARAMETERS
                self.running[priority] += 1
                return priority, heapq.heappop(self.waiting[priority])[2]
        return None

    def _burst_directions(self) -> tuple[int, ...]:
        other = WRITE_STATE if self._direction == READ_STATE else READ_STATE
        if self.waiting[other] and (self._left <= 0 or not self.waiting[self._direction]):
            if self.running[self._direction]:
                return ()
            self._direction, self._left = other, self.burst_ops
        return (self._direction,)

    def done(self, priority: int) -> None:
        self.running[priority] -= 1

    @property
    def at_work(self) -> int:
        return sum(self.running.values())

    def check(self) -> None:
        assert all(n >= 0 for n in self.running.values())
        if self.burst:
            assert not (self.running[READ_STATE] and self.running[WRITE_STATE])


@dataclass
class Trial:
    """The choice between mixed mode and burst mode, based on rates measured in the first steps."""

    TRIED = 2
    MARGIN = 1.1  # bursts must be faster by this factor, because they delay parameter reads
    LEAST = 64 << 20  # a step that moves fewer bytes is not measured

    steps: int = 0
    # burst mode (True) or mixed mode (False) -> measured rates in bytes/s
    rates: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    def stepped(self, burst: bool, nbytes: int, busy_s: float) -> bool:
        """Record a step, in which the storage device moved `nbytes` in `busy_s` seconds. Returns
        the mode of the next step (True for burst mode).
        """
        if self.chosen or nbytes < self.LEAST or busy_s <= 0:
            return burst
        self.steps += 1
        if self.steps > 1:
            self.rates[burst].append(nbytes / busy_s)
        bursts, mixed = self.rates[True], self.rates[False]
        return max(bursts) > self.MARGIN * max(mixed) if self.chosen else len(bursts) < len(mixed)

    @property
    def chosen(self) -> bool:
        return all(len(rates) >= self.TRIED for rates in self.rates.values())


class Turns(Generic[T]):
    """The order in which a server answers pulls, so that fast workers do not delay the slowest.

    A worker has at most `most` answers in progress. It gets at most `most` answers more than any
    other worker that waits at the same time.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most  # None if there is no limit
        self.waiting: dict[int, deque[T]] = {}  # worker -> its waiting pulls, in order
        # Counts of begun and completed answers, from the time at which the worker began to wait:
        # done <= begun <= done + most.
        self.begun: dict[int, int] = {}
        self.done: dict[int, int] = {}

    def ask(self, worker: int, pull: T) -> None:
        if not self._wants(worker):
            self.begun[worker] = self.done[worker] = min(self._others(worker), default=0)
        self.waiting.setdefault(worker, deque()).append(pull)

    def next(self) -> T | None:
        """Return a pull to answer now, or None. Call `answered` when the answer is complete."""
        for worker, pulls in self.waiting.items():
            if pulls and self._its_turn(worker):
                self.begun[worker] += 1
                return pulls.popleft()
        return None

    def _its_turn(self, worker: int) -> bool:
        if self.most is None:
            return True
        done = min(self._others(worker), default=self.done[worker])
        return self.begun[worker] < min(done, self.done[worker]) + self.most

    def answered(self, worker: int) -> None:
        self.done[worker] += 1

    def _others(self, worker: int) -> Iterator[int]:
        return (done for other, done in self.done.items() if other != worker and self._wants(other))

    def _wants(self, worker: int) -> bool:
        return bool(self.waiting.get(worker)) or self.begun.get(worker, 0) > self.done.get(
            worker, 0
        )

    def check(self) -> None:
        """Assert every invariant."""
        assert set(self.waiting) == set(self.begun) == set(self.done)
        for worker, done in self.done.items():
            assert done <= self.begun[worker]
            assert self.most is None or self.begun[worker] <= done + self.most
