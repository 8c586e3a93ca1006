"""PacketLoop: the one thread of a switch, which serves the sockets of all jobs in turn.

    epoll: whose datagrams have come --> each of those jobs: at most RUNS runs --> epoll ...

A job gets its turn however much comes for others, and a turn is short: nothing in it waits. A job
whose own packets cannot leave is not read until they can. What goes wrong with one job ends that
job alone. Jobs are added and removed from any thread.
"""

from __future__ import annotations

import queue
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from roadtrain.errors import DeadlineError
from roadtrain.switch.switch_job import Buffers, SwitchJob

RUNS = 4  # that a job may have taken in one turn: about 200 packets at most
TICK_S = 0.002  # between two ticks of the jobs, at least
REST_S = 0.02  # the longest sleep: heartbeats are due by then, and jobs come and go
END_S = 5.0  # for the thread to do what it is told

Ended = Callable[[SwitchJob, BaseException | None], None]


class PacketLoop:
    """`ended(job, error)` is called from its thread once a job is closed; error: what went wrong
    with it, None where it was removed. `failed` is called where the loop itself ends."""

    def __init__(self, ended: Ended, failed: Callable[[BaseException], None]) -> None:
        self._ended, self._failed = ended, failed
        self._jobs: set[SwitchJob] = set()
        self._told: queue.SimpleQueue[tuple[SwitchJob, threading.Event | None]] = (
            queue.SimpleQueue()
        )
        self._over = False
        self._gone = False  # the thread has ended: who tells it something does that now
        self._selector = selectors.DefaultSelector()
        self._buffers = Buffers()
        self._thread = threading.Thread(target=self._work, name="switch packets", daemon=True)
        self._thread.start()

    def add(self, job: SwitchJob) -> None:
        self._tell(job, None)

    def remove(self, job: SwitchJob, wait: bool) -> None:
        """Close it. `wait`: until it is closed. Raises DeadlineError."""
        closed = threading.Event()
        self._tell(job, closed)
        if wait and not closed.wait(END_S):
            raise DeadlineError(f"switch: job {job.name} was not closed within {END_S:.0f} s")

    def close(self) -> None:
        """Ends the thread and all jobs. Idempotent."""
        self._over = True
        self._thread.join(END_S)
        self._gone = True
        self._close_rest()

    def _tell(self, job: SwitchJob, closed: threading.Event | None) -> None:
        self._told.put((job, closed))
        if self._gone:
            self._close_rest()

    def _close_rest(self) -> None:
        """Close the jobs that the thread was told of and did not see any more."""
        with suppress(queue.Empty):
            while True:
                job, closed = self._told.get_nowait()
                job.close()
                if closed is not None:
                    closed.set()

    def _work(self) -> None:
        try:
            ticked = 0.0
            while not self._over:
                self._obey()
                for key, _ in self._selector.select(REST_S):
                    if key.data in self._jobs:
                        self._guarded(key.data, self._turn)
                now = time.monotonic()
                if now - ticked >= TICK_S:
                    ticked = now
                    for job in list(self._jobs):
                        self._guarded(job, self._tick)
        except BaseException as error:
            self._failed(error)
        finally:
            for job in list(self._jobs):
                self._drop(job, None)
            self._selector.close()

    def _obey(self) -> None:
        while not self._told.empty():
            job, closed = self._told.get()
            if closed is None:
                self._jobs.add(job)
                self._selector.register(job.socket, selectors.EVENT_READ, job)
            else:
                self._drop(job, None)
                closed.set()

    def _guarded(self, job: SwitchJob, do: Callable[[SwitchJob], None]) -> None:
        try:
            do(job)
        except Exception as error:  # of this job: the others go on
            self._drop(job, error)

    def _turn(self, job: SwitchJob) -> None:
        if job.out.waits:
            job.out.go_on()
        for _ in range(RUNS):
            if job.out.waits or not job.take(self._buffers):
                break
        self._look_for(job)

    def _tick(self, job: SwitchJob) -> None:
        job.tick(time.monotonic())
        self._look_for(job)

    def _look_for(self, job: SwitchJob) -> None:
        """What the loop waits for: packets, or room for those that must leave first."""
        wanted = selectors.EVENT_WRITE if job.out.waits else selectors.EVENT_READ
        if self._selector.get_key(job.socket).events != wanted:
            self._selector.modify(job.socket, wanted, job)

    def _drop(self, job: SwitchJob, error: BaseException | None) -> None:
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self._selector.unregister(job.socket)
        job.close()
        self._ended(job, error)
