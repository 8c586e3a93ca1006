"""CollectiveQueue: a thread that runs a rank's collective operations in order, while another thread
computes. SideStream: the GPU stream of this thread.

All ranks of a group must queue the same operations in the same order. At most two operations are in
flight. After an error, the queue starts no further operation, and raises the error in every waiting
thread and in every later `put` (Rule 5).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from roadtrain.device.accelerator import accelerator_of
from roadtrain.errors import DeadlineError, LoopError, LostError, RoadtrainError

DEPTH = 2  # most jobs in flight: one job sends while the next job starts
# an error about a peer has one of these words; not every such error names gloo or NCCL
PEER_WORDS = ("gloo", "nccl", "pair closure", "connection", "timed out")
PATIENCE = 2.0  # a wait times out after this many deadlines without any progress
# NCCL ends the process when its own timeout expires, so that timeout is this many deadlines
BACKSTOP = PATIENCE + 1.0
HINT = "a rank of the group has ended or is unreachable; read its log to find out why"


class Pending(Protocol):
    """An operation in flight, such as torch's Work."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class QueuedCollective:
    """A job of the queue. `what`: the job's name in errors. `run`: a generator that starts an
    operation and yields it (or None), and finishes the job when the operation is done. `alone`:
    whether the job starts only after all earlier jobs have ended."""

    what: str
    run: Iterator[Pending | None]
    alone: bool = False


class CollectiveQueue:
    """A thread that runs jobs in order. `deadline_s`: the timeout of one operation in seconds,
    which the process groups enforce. `running`: a context manager that is active while the thread
    runs."""

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
        self._now = ""  # the job that the thread works on
        self._ended = 0  # number of jobs that have ended
        self._closing = False
        self._jobs: deque[QueuedCollective] = deque()  # jobs that have not started
        # jobs in flight; only the thread changes this queue
        self._in_flight: deque[tuple[QueuedCollective, Pending | None]] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"collectives {name}", daemon=True)
        self._thread.start()

    def put(self, job: QueuedCollective) -> None:
        """Queue a job. Raises the error of a failed earlier job, and LoopError after `close`."""
        with self._changed:
            self.check()
            if self._closing:
                raise LoopError(f"{self.name}: {job.what} was queued after close()")
            self._jobs.append(job)
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Wait until `until()`, which is called whenever a job ends, returns true. `what`: the
        event for which the caller waits, for errors. Raises the error of a failed job, and
        DeadlineError if no job ends for twice `deadline_s`."""
        with self._changed:
            while True:
                # must precede `until()`, which may return true because an error clears all jobs
                self.check()
                if until():
                    return
                ended = self._ended
                moved = self._changed.wait(PATIENCE * self.deadline_s) or self._ended > ended
                if not moved:
                    raise DeadlineError(
                        f"{self.name}: waited for {what}, but no operation ended for"
                        f" {PATIENCE * self.deadline_s:g} s; in progress: {self._now or 'nothing'}",
                        hint=HINT,
                    )

    def wait_all(self, what: str) -> None:
        """Wait until every queued job has ended. Raises the errors of `wait`."""
        self.wait(lambda: not self._jobs and not self._in_flight and not self._now, what)

    def abandon(self) -> None:
        """Drop all jobs that have not started, without waiting for jobs in flight."""
        with self._changed:
            self._jobs.clear()
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Finish all queued jobs and end the thread. Raises the error of a failed job if it was not
        raised before, and DeadlineError if the thread does not end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(PATIENCE * self.deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"{self.name}: {self._now} did not end within {PATIENCE * self.deadline_s:g} s",
                hint=HINT,
            )
        with self._changed:
            if not self._reported:
                self.check()

    def check(self) -> None:
        """Raise the error of a failed job, if any."""
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
                while not self._jobs and not self._in_flight and not self._closing:
                    self._changed.wait()
                if not self._jobs and not self._in_flight:
                    return
                job = self._take()
            try:
                if job is None:
                    self._end_oldest()
                else:
                    self._begin(job)
            except BaseException as error:
                self._fail(error)

    def _take(self, done: int = 0) -> QueuedCollective | None:
        """Remove the next job from the queue and return it, or return None if no job may start now.
        `done`: the number of jobs in flight whose operations are done."""
        busy = len(self._in_flight)
        if not self._jobs or busy - done >= DEPTH or (self._jobs[0].alone and busy):
            return None
        self._now = self._jobs[0].what
        return self._jobs.popleft()

    def _begin(self, job: QueuedCollective) -> None:
        work = next(job.run)
        with self._changed:
            self._in_flight.append((job, work))

    def _end_oldest(self) -> None:
        job, work = self._in_flight[0]
        self._now = job.what
        if work is not None:
            work.wait()
        with self._changed:
            following = self._take(done=1)
        # the operation of the following job runs while the end of this job computes
        if following is not None:
            self._begin(following)
        self._now = job.what
        next(job.run, None)
        with self._changed:
            self._in_flight.popleft()
            self._ended += 1
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = typed(error, f"{self.name}: {self._now}", self.deadline_s)
            self._jobs.clear()
            self._in_flight.clear()
            self._now = ""
            self._changed.notify_all()


def typed(error: BaseException, what: str, deadline_s: float) -> BaseException:
    """Return a LostError or a DeadlineError for torch's error about a lost peer, and any other
    error unchanged."""
    text = " ".join(str(error).split())
    of_group = isinstance(error, dist.DistError) or any(w in text.lower() for w in PEER_WORDS)
    if isinstance(error, RoadtrainError) or not (of_group and isinstance(error, RuntimeError)):
        return error
    late = "timed out" in text.lower() or "timeout" in text.lower()
    peer_error = (DeadlineError if late else LostError)(
        f"{what} failed" + (f" after {deadline_s:g} s" if late else "") + f": {text[:300]}",
        hint=HINT,
    )
    peer_error.__cause__ = error
    return peer_error


class SideStream:
    """A GPU stream for the queue's thread. Marks (events) make this stream and the stream of the
    computing thread wait for each other's results.

    On the CPU, all methods do nothing, because results are complete when an operation has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerator_of(device)
        self.stream = None if self._accelerator is None else self._accelerator.new_stream()
        # bucket number -> event after which the queue's thread has written the bucket
        self.marks: dict[int, Any] = {}

    @property
    def running(self) -> contextlib.AbstractContextManager[object]:
        """The context manager that must be active while the queue's thread runs."""
        if self._accelerator is None:
            return contextlib.nullcontext()
        return self._accelerator.on(self.stream)

    def mark(self) -> Any:
        """Return an event that occurs when all work that the computing thread has started so far is
        done. Called by the computing thread."""
        return None if self._accelerator is None else self._recorded(self._accelerator.current())

    def _recorded(self, stream: Any) -> Any:
        assert self._accelerator is not None
        event = self._accelerator.new_event()
        event.record(stream)
        return event

    def after(self, mark: Any) -> None:
        """Make the side stream wait for an event that `mark` returned. Called by the queue's
        thread."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)

    def leave_mark(self, number: int) -> None:
        """Record that bucket `number` is written when the side stream has done all work started so
        far. Called by the queue's thread."""
        if self.stream is not None:
            self.marks[number] = self._recorded(self.stream)

    def wait_for(self, numbers: Collection[int]) -> None:
        """Make the computing stream wait until these buckets are written. Called by the computing
        thread."""
        for number in numbers:
            if (mark := self.marks.pop(number, None)) is not None and self._accelerator is not None:
                self._accelerator.current().wait_event(mark)

    def join(self, deadline_s: float) -> bool:
        """Wait until all work of the side stream has ended, and return whether it has within
        `deadline_s`. Called by the computing thread."""
        if self._accelerator is None:
            return True
        return self._accelerator.reaches(self._recorded(self.stream), deadline_s)
