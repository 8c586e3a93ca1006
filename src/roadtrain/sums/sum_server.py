"""Reducers: the reducers of all jobs on one host, a worker's host or a spare host. `serve_sums` is
the process of a spare host (`roadtrain serve --sum`).

    listener: a link and its greeting --> Reducers.accept --> the job's Reducer (reducer.py), the
    coordinator (at worker 0), or the answer to a status request
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable

from roadtrain.errors import BudgetError, ConfigError, LostError, WireError
from roadtrain.options.budgets import host_bytes_of
from roadtrain.servers import frames as m
from roadtrain.servers import health
from roadtrain.servers.connection import MOST_WORKERS
from roadtrain.servers.prometheus import Expose
from roadtrain.sums import sum_frames
from roadtrain.sums.coordinator import TO_COORDINATOR, Coordinator
from roadtrain.sums.protocol.reducer import RULES
from roadtrain.sums.reducer import Above, Reducer
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.tcp import Address, TcpOptions, listen
from roadtrain.units import show_bytes

END_S = 10.0  # timeout for threads to end


class Reducers:
    """The reducers of all jobs on one host. The buffers of all reducers together use at most
    `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._used = nbytes, 0
        self.jobs: dict[str, Reducer] = {}
        self.coordinator: Coordinator | None = None  # only at worker 0
        self.above: Above | None = None  # set if this host's sums are summed with other hosts
        self._lock = threading.Condition()
        self._ending: list[threading.Thread] = []

    def accept(self, link: Link, hello: bytes) -> Receiver:
        """Accept the link of a worker or of a status request, and return its Receiver. Raises
        WireError if the greeting is invalid, and BusyError if the coordinator on this host serves
        another job."""
        if hello == health.HELLO:
            return health.answer(link, self.status())
        session, rank, workers, rule = m.decoded(
            sum_frames.SUM_HELLO, hello, "invalid greeting of a worker"
        )
        if rule == TO_COORDINATOR and self.coordinator is not None:
            if session != self.coordinator.name:
                raise self.coordinator.busy()
            return self.coordinator.join(rank, link)
        if not 0 <= rank < workers <= MOST_WORKERS or rule not in RULES:
            raise WireError(f"invalid greeting: worker {rank} of {workers}, rule {rule!r}")
        with self._lock:
            reducer = self.jobs.get(session)
            if reducer is None:
                reducer = Reducer(
                    rule, workers, self._reserve, lambda r: self._forget(session, r), self.above
                )
                self.jobs[session] = reducer
        if (reducer.workers, reducer.rule) != (workers, rule):
            raise WireError(
                f"worker {rank} expects {workers} workers and rule {rule}, but the first worker"
                f" expected {reducer.workers} and rule {reducer.rule}"
            )
        return reducer.join(rank, link)

    def status(self) -> health.Status:
        with self._lock:
            jobs, used = list(self.jobs.values()), self._used
        waits = {name: what for job in jobs for name, what in job.waits().items()}
        return (
            f"sums for {len(jobs)} job(s), {show_bytes(used)} of {show_bytes(self.nbytes)}",
            waits,
            {},
            m.Figures(
                workers=len(jobs),
                connected=sum(len(job.connections) for job in jobs),
                nbytes=used,
                budget=self.nbytes,
                late={name: seconds for name, (seconds, _) in waits.items()},
            ),
        )

    def _reserve(self, nbytes: int) -> None:
        with self._lock:
            if self._used + nbytes > self.nbytes:
                raise BudgetError(
                    f"reducers of {len(self.jobs)} job(s) need {show_bytes(self._used + nbytes)} of"
                    f" buffers, but the budget of this host is {show_bytes(self.nbytes)}",
                    hint="raise the budget, or give the job more spare hosts",
                )
            self._used += nbytes

    def _forget(self, session: str, reducer: Reducer) -> None:
        with self._lock:
            if self.jobs.get(session) is reducer:
                del self.jobs[session]
            self._used -= reducer.reserved
            self._ending = [
                *(thread for thread in self._ending if thread.is_alive()),
                *reducer.threads,
            ]
            self._lock.notify_all()

    def close(self, wait_s: float = 0.0) -> None:
        """Wait at most `wait_s` seconds for the workers of all jobs to leave. Then end all
        reducers."""
        if self.coordinator is not None:
            self.coordinator.close(wait_s)
        with self._lock:
            self._lock.wait_for(lambda: not self.jobs, wait_s)
            left = list(self.jobs.values())
        for reducer in left:
            reducer.end(LostError("the reducer was stopped"))
        for thread in self._ending:
            thread.join(END_S)


def serve_sums(
    address: Address,
    budget: str | None,
    options: TcpOptions,
    module: str | None,
    expose: Expose = contextlib.nullcontext,
    report: Callable[[str], None] = print,
) -> int:
    """Run `roadtrain serve HOST:PORT --sum`: sum gradients until the process is interrupted.

    Args:
        budget: Memory for the buffers, such as "8GiB". If None, half of the free memory is used.
        module: Name of a module that registers the user's own formats.
        expose: Called with the status; its context exposes the status to Prometheus.

    Returns:
        The exit code of the command.
    """
    nbytes = host_bytes_of(budget, whole=False)
    if module is not None:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"--formats {module}: {error}", hint="add the module's directory to PYTHONPATH"
            ) from error
    reducers = Reducers(nbytes)
    listener = listen(address, reducers.accept, options, report, language=m.LANGUAGE)
    try:
        report(
            "summing at {}:{}, at most {}; no state is kept on disk".format(
                *listener.address, show_bytes(nbytes)
            )
        )
        with expose(reducers.status):
            threading.Event().wait()
    finally:
        reducers.close()
        listener.close()
    return 0
