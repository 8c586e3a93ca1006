"""Courier: one thread in which a rank's collective operations begin and end, in one order, beside
the thread that computes. SideStream: that thread's work on the device.

All ranks of a group must begin the same operations in the same order: whoever hands jobs in sees to
that. A few jobs are under way at once; they end in the order in which they began. After an error
nothing more begins, and everybody who waits or hands in a job gets it (Rule 5).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from roadtrain.errors import DeadlineError, LoopError, LostError, RoadtrainError

UNDER_WAY = 2  # jobs at once: one that sends while the next begins
# what errors of gloo and NCCL say that are about a peer; some do not name their library
OF_PEERS = ("gloo", "nccl", "pair closure", "connection", "timed out")
PATIENCE = 2.0  # deadlines without any progress before whoever waits gives up


class Pending(Protocol):
    """An operation that has begun: torch's Work."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class CourierJob:
    """`what` stands in errors. `run` may compute, yields the operation that it started (None: there
    is none to wait for), and goes on once that is done. `alone`: it begins when all before it have
    ended."""

    what: str
    run: Iterator[Pending | None]
    alone: bool = False


class Courier:
    """`deadline_s`: of one operation, kept by the groups; here it says how long nothing at all
    may end. `running`: a context that the thread is in."""

    def __init__(
        self,
        name: str,
        deadline_s: float,
        running: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self.name, self.deadline_s = name, deadline_s
        self._running = running or contextlib.nullcontext()
        self.error: BaseException | None = None
        self._reported = False
        self._now = ""  # what is waited for
        self._ended = 0  # jobs
        self._closing = False
        self._jobs: deque[CourierJob] = deque()
        self._under_way: deque[tuple[CourierJob, Pending | None]] = deque()  # the thread's own
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"courier of {name}", daemon=True)
        self._thread.start()

    def do(self, job: CourierJob) -> None:
        """Hand in a job. Raises what went wrong with one before, LoopError after the end."""
        with self._changed:
            self.check()
            if self._closing:
                raise LoopError(f"{self.name}: {job.what} after close()")
            self._jobs.append(job)
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Returns when `until()`, which the ends of jobs make true. Raises what went wrong,
        DeadlineError when nothing ends for long."""
        with self._changed:
            while True:
                self.check()  # first: an error ends all jobs, which may make `until()` true
                if until():
                    return
                ended = self._ended
                moved = self._changed.wait(PATIENCE * self.deadline_s) or self._ended > ended
                if not moved:
                    raise DeadlineError(
                        f"{self.name}: {what} is not here after {PATIENCE * self.deadline_s:g} s"
                        f" without progress in {self._now or 'anything'}"
                    )

    def wait_all(self, what: str) -> None:
        """Every job that was handed in has ended."""
        self.wait(lambda: not self._jobs and not self._under_way and not self._now, what)

    def abandon(self) -> None:
        """No further job begins; nobody waits for those that are under way."""
        with self._changed:
            self._jobs.clear()
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends what was handed in, and the thread. Raises what went wrong, if nobody heard."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(PATIENCE * self.deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"{self.name}: {self._now} does not end within {PATIENCE * self.deadline_s:g} s"
            )
        with self._changed:
            if not self._reported:
                self.check()

    def check(self) -> None:
        """Raises what went wrong."""
        if self.error is None:
            return
        self._reported = True
        if isinstance(self.error, RoadtrainError):
            raise type(self.error)(str(self.error)) from self.error
        raise self.error

    def _run(self) -> None:
        with self._running:
            self._work()

    def _work(self) -> None:
        while self.error is None:
            with self._changed:
                self._now = ""
                self._changed.notify_all()
                while not self._jobs and not self._under_way and not self._closing:
                    self._changed.wait()
                if not self._jobs and not self._under_way:
                    return
                job = self._take()
            try:
                if job is None:
                    self._end_oldest()
                else:
                    self._begin(job)
            except BaseException as error:
                self._fail(error)

    def _take(self, done: int = 0) -> CourierJob | None:
        """The next job, if it may begin. `done`: jobs under way whose operations are done."""
        busy = len(self._under_way)
        if not self._jobs or busy - done >= UNDER_WAY or (self._jobs[0].alone and busy):
            return None
        self._now = self._jobs[0].what
        return self._jobs.popleft()

    def _begin(self, job: CourierJob) -> None:
        work = next(job.run)
        with self._changed:
            self._under_way.append((job, work))

    def _end_oldest(self) -> None:
        job, work = self._under_way[0]
        self._now = job.what
        if work is not None:
            work.wait()
        with self._changed:
            following = self._take(done=1)
        if following is not None:  # it travels while this one's end computes
            self._begin(following)
        self._now = job.what
        next(job.run, None)
        with self._changed:
            self._under_way.popleft()
            self._ended += 1
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = typed(error, f"{self.name}: {self._now}", self.deadline_s)
            self._jobs.clear()
            self._under_way.clear()
            self._now = ""
            self._changed.notify_all()


def typed(error: BaseException, what: str, deadline_s: float) -> BaseException:
    """torch's words for a peer that is late or gone, as ours; other errors as they are."""
    said = " ".join(str(error).split())
    of_group = isinstance(error, dist.DistError) or any(w in said.lower() for w in OF_PEERS)
    if isinstance(error, RoadtrainError) or not (of_group and isinstance(error, RuntimeError)):
        return error
    late = "timed out" in said.lower() or "timeout" in said.lower()
    told = (DeadlineError if late else LostError)(
        f"{what} failed" + (f" after {deadline_s:g} s" if late else "") + f": {said[:300]}",
        hint="a rank of the group has ended or is unreachable; its own log says why",
    )
    told.__cause__ = error
    return told


class SideStream:
    """The device's work of another thread, in order with that of the thread that computes.

    On the host all of it is nothing: there what has ended is there. On an accelerator the thread of
    `running` has a stream of its own; marks say from when on what it needs is made, and from when
    on what it makes may be used.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        # number -> what the other thread made is there after this
        self.marks: dict[int, torch.Event] = {}

    @property
    def running(self) -> contextlib.AbstractContextManager[object]:
        """In which the other thread runs."""
        return contextlib.nullcontext() if self.stream is None else self.stream

    def mark(self) -> torch.Event | None:
        """Of the computing thread: what it has made so far."""
        if self.stream is None:
            return None
        return torch.accelerator.current_stream(self.stream.device).record_event()

    def after(self, mark: torch.Event | None) -> None:
        """Of the other thread: what follows needs what was marked."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)

    def leave_mark(self, number: int) -> None:
        """Of the other thread: `number` is made, once what was begun has run."""
        if self.stream is not None:
            self.marks[number] = self.stream.record_event()

    def wait_for(self, numbers: Collection[int]) -> None:
        """Of the computing thread: what follows needs these."""
        if self.stream is None:
            return
        for number in numbers:
            if (mark := self.marks.pop(number, None)) is not None:
                torch.accelerator.current_stream(self.stream.device).wait_event(mark)

    def join(self) -> None:
        """Of the computing thread: what follows needs all that the other thread began."""
        if self.stream is not None:
            torch.accelerator.current_stream(self.stream.device).wait_stream(self.stream)
