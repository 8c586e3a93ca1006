"""The thread of a switch that serves the sockets of all jobs in turn, without blocking.

If the send buffer of a job is full, its packets are not read until the buffer has room. An
exception while a job is served ends only this job. Jobs may be added and removed from any thread.
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

RUNS = 4  # runs of packets read per turn of a job: about 200 packets at most
TICK_S = 0.002  # minimum interval between two ticks of the jobs
SLEEP_S = 0.02  # longest sleep, so that heartbeats are sent and requests handled in time
END_S = 5.0  # timeout for the thread to close a job, or to end

Ended = Callable[[SwitchJob, BaseException | None], None]


class PacketLoop:
    """Serves jobs in a thread of its own.

    Args:
        ended: Called by the thread as ended(job, error) after a job was closed. `error` is None if
            the job was closed by `remove`.
        failed: Called by the thread with the error if the packet loop itself fails.
    """

    def __init__(self, ended: Ended, failed: Callable[[BaseException], None]) -> None:
        self._ended, self._failed = ended, failed
        self._jobs: set[SwitchJob] = set()
        # jobs to add (None) or to remove (an event to set once the job is closed)
        self._requests = queue.SimpleQueue[tuple[SwitchJob, threading.Event | None]]()
        self._over = False
        self._stopped = False  # whether the thread has ended; callers then handle requests
        self._selector = selectors.DefaultSelector()
        self._buffers = Buffers()
        self._thread = threading.Thread(target=self._work, name="switch packets", daemon=True)
        self._thread.start()

    def add(self, job: SwitchJob) -> None:
        self._request(job, None)

    def remove(self, job: SwitchJob, wait: bool) -> None:
        """Close a job. If `wait`, block until it is closed. Raises DeadlineError after 5 s."""
        closed = threading.Event()
        self._request(job, closed)
        if wait and not closed.wait(END_S):
            raise DeadlineError(f"switch: job {job.name} was not closed within {END_S:.0f} s")

    def close(self) -> None:
        """End the thread and all jobs. Idempotent."""
        self._over = True
        self._thread.join(END_S)
        self._stopped = True
        self._close_unhandled()

    def _request(self, job: SwitchJob, closed: threading.Event | None) -> None:
        self._requests.put((job, closed))
        if self._stopped:
            self._close_unhandled()

    def _close_unhandled(self) -> None:
        """Close the jobs of requests that the ended thread has not handled."""
        with suppress(queue.Empty):
            while True:
                job, closed = self._requests.get_nowait()
                job.close()
                if closed is not None:
                    closed.set()

    def _work(self) -> None:
        try:
            ticked = 0.0
            while not self._over:
                self._handle_requests()
                for key, _ in self._selector.select(SLEEP_S):
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

    def _handle_requests(self) -> None:
        while not self._requests.empty():
            job, closed = self._requests.get()
            if closed is None:
                self._jobs.add(job)
                self._selector.register(job.socket, selectors.EVENT_READ, job)
            else:
                self._drop(job, None)
                closed.set()

    def _guarded(self, job: SwitchJob, do: Callable[[SwitchJob], None]) -> None:
        try:
            do(job)
        except Exception as error:  # ends this job only
            self._drop(job, error)

    def _turn(self, job: SwitchJob) -> None:
        if job.out.waits:
            job.out.resume()
        for _ in range(RUNS):
            if job.out.waits or not job.take(self._buffers):
                break
        self._select_for(job)

    def _tick(self, job: SwitchJob) -> None:
        job.tick(time.monotonic())
        self._select_for(job)

    def _select_for(self, job: SwitchJob) -> None:
        """Wait for room in the job's send buffer if it has unsent packets, otherwise for arriving
        packets.
        """
        events = selectors.EVENT_WRITE if job.out.waits else selectors.EVENT_READ
        if self._selector.get_key(job.socket).events != events:
            self._selector.modify(job.socket, events, job)

    def _drop(self, job: SwitchJob, error: BaseException | None) -> None:
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self._selector.unregister(job.socket)
        job.close()
        self._ended(job, error)
