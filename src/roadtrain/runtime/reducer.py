"""Reducer: adds up what the workers push and gives it back, on a worker's own host or on a spare
one (BytePS's summation service). It keeps no parameters, no optimizer, nothing on files.

    part of worker 0 --+                                              +--> all workers
    part of worker 1 --+--> buffers of their own --> one pass, fp32 --+--> (accumulate: the sender)

Buffers are made when a part comes for the first time and used again in every round, until parts go
elsewhere. Encoded parts (runtime/formats.py) are decoded one by one, their sum is encoded. One
thread adds; links have theirs. Assumes what protocol/reducer.py says. Does NOT know layers, models
or who divides by the number of workers.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from roadtrain.chunks import ITEMSIZE, TRAINABLE
from roadtrain.device.buffers import Buffer, array_in
from roadtrain.errors import (
    BudgetError,
    BusyError,
    ConfigError,
    LostError,
    PeerError,
    RoadtrainError,
    WireError,
)
from roadtrain.kernels.sum import accumulate, sum_k
from roadtrain.protocol.reducer import RULES, Arrived, PartRound, ReducerStateMachine
from roadtrain.runtime import agreement, formats, health
from roadtrain.runtime import frames as m
from roadtrain.runtime.agreement import AgreementCoordinator
from roadtrain.runtime.compress import recast
from roadtrain.runtime.membership import Control
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.tcp import Address, TcpOptions, listen
from roadtrain.units import show_bytes

END_S = 10.0  # for threads to end
Where = tuple[int, int]  # tensor, first element
# its place, dtype, bytes, who takes the whole sum, who takes an error
Above = Callable[
    [Where, str, memoryview, Callable[[memoryview], None], Callable[[BaseException], None]], None
]


def _nbytes(elements: int, format: str, summed: int) -> int:
    """Of a part that travels. WireError for a format unknown here."""
    if format in TRAINABLE or summed:
        return elements * (summed or ITEMSIZE[format])
    try:
        return formats.format_of(format).nbytes(elements)
    except ConfigError as error:
        raise WireError(str(error)) from error


class _ReducerConnection:
    """One worker's place: the Receiver of its link."""

    def __init__(self, reducer: Reducer, rank: int, link: Link) -> None:
        self.reducer, self.rank, self.link = reducer, rank, link
        self.buffers: dict[Where, Buffer] = {}
        self.coming: set[Where] = set()  # parts whose bytes are on their way into their buffer
        self.heard = time.monotonic()  # when its last part came

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        try:
            fields = m.header(kind, header)
            if kind != m.PART or nbytes != _nbytes(*fields[3:]):
                raise WireError(
                    f"a frame of kind {kind} with {nbytes} bytes {fields[3:]} came to a reducer"
                )
            buffer = self.buffers.get(fields[:2])
            if buffer is None or buffer.nbytes < nbytes:
                buffer = self.buffers[fields[:2]] = self.reducer.buffer(nbytes, buffer)
            self.coming.add(fields[:2])
        except RoadtrainError as error:
            self.reducer.end(error)
            buffer = Buffer(nbytes)  # this frame goes nowhere, the worker hears why
        return buffer.view[:nbytes]

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self.heard = time.monotonic()
        try:
            if kind in (m.MOVED, m.GIVEN_UP):
                self.reducer.moved(self, given_up=kind == m.GIVEN_UP)
            else:
                part = Arrived(*m.header(m.PART, header))
                if not payload or len(payload) != _nbytes(part.elements, part.format, part.summed):
                    raise WireError(
                        f"a part of {part.elements} elements of {part.format} came as"
                        f" {len(payload)} bytes"
                    )
                self.coming.discard((part.key, part.start))
                self.reducer.arrived(self, part)
        except RoadtrainError as error:
            self.reducer.end(error)

    def lost(self, error: PeerError) -> None:
        self.reducer.left(self, error)


class Reducer:
    """Of one job. `above`: who adds other hosts' sums before the workers here get theirs.
    `ended` is called once, when the last worker has left or something failed."""

    def __init__(
        self,
        rule: str,
        workers: int,
        reserve: Callable[[int], None],
        ended: Callable[[Reducer], None],
        above: Above | None = None,
    ) -> None:
        self.rule, self.workers, self._reserve, self._ended, self._above = (
            rule,
            workers,
            reserve,
            ended,
            above,
        )
        self.seats: dict[int, _ReducerConnection] = {}
        self.reserved = 0  # bytes
        self._machine = ReducerStateMachine(workers, rule)
        self._results: dict[Where, Buffer] = {}
        self._residuals: dict[Where, tuple[Buffer, np.ndarray]] = {}  # what encoding the sum lost
        self._lock, self._work = threading.Lock(), queue.SimpleQueue[Any]()
        self._left = 0
        self._over: BaseException | None = None  # why it has ended
        self.threads = [threading.Thread(target=self._add_all, name="reducer", daemon=True)]
        self.threads[0].start()

    def join(self, rank: int, link: Link) -> _ReducerConnection:
        with self._lock:
            if self._over and not isinstance(self._over, (LostError, BudgetError)):
                raise self._over  # what the others have been told
            if self._over or self._left or rank in self.seats:
                raise BusyError("busy with another start of this job")
            seat = self.seats[rank] = _ReducerConnection(self, rank, link)
        return seat

    def buffer(self, nbytes: int, instead: Buffer | None = None) -> Buffer:
        """BudgetError where the host's budget does not hold one more."""
        more = Buffer(nbytes)
        self._take(more.nbytes - (instead.nbytes if instead is not None else 0))
        return more

    def _take(self, nbytes: int) -> None:
        with self._lock:
            if not self._over:  # else all has been given back
                self._reserve(nbytes)
                self.reserved += nbytes

    def arrived(self, seat: _ReducerConnection, part: Arrived) -> None:
        with self._lock:
            if not self._over and (meeting := self._machine.arrived(seat.rank, part)) is not None:
                seats = (
                    [seat]
                    if self.rule == "accumulate"
                    else [self.seats[rank] for rank in range(self.workers)]
                )
                self._work.put(
                    (
                        seats,
                        [one.buffers[part.key, part.start].view for one in seats],
                        part,
                        meeting,
                    )
                )

    def moved(self, seat: _ReducerConnection, given_up: bool = False) -> None:
        """Parts go elsewhere from now on, or have other keys (`given_up`, with what is not
        summed): the memory of those that nobody waits for is given back. What is still in use
        lives as long as that."""
        with self._lock:
            if given_up:
                self._machine.given_up(seat.rank)
            busy = seat.coming | {
                where for where, meeting in self._machine.meetings.items() if meeting.here
            }
            dropped = [seat.buffers.pop(where) for where in [*seat.buffers] if where not in busy]
            if seat.rank == 0:
                dropped += [self._results.pop(where) for where in [*self._results]]
            if seat.rank == 0 and given_up:
                dropped += [self._residuals.pop(where)[0] for where in [*self._residuals]]
        self._take(-sum(buffer.nbytes for buffer in dropped))

    def waits(self) -> dict[str, tuple[float, str]]:
        """Who keeps the others waiting, for what and since when its last word came."""
        with self._lock:
            missing, now = self._machine.missing(), time.monotonic()
        late = {rank: key for key, ranks in reversed(missing.items()) for rank in ranks}
        return {
            f"worker {rank}": (
                now - self.seats[rank].heard if rank in self.seats else 0.0,
                f"its part of tensor {key}, round {number}",
            )
            for rank, (key, _, number) in late.items()
        }

    def left(self, seat: _ReducerConnection, error: PeerError) -> None:
        """Others may be leaving too: it is over where somebody waits for this one, or when all
        have gone."""
        with self._lock:
            self._left += 1
            late = {key: gone for key, gone in self._machine.missing().items() if seat.rank in gone}
            last = self._left == len(self.seats)
        if late or last:
            self.end(LostError(f"worker {seat.rank} has gone: {error}"))

    def end(self, error: BaseException) -> None:
        with self._lock:
            first, self._over = self._over is None, self._over or error
            seats = list(self.seats.values())
        if not first:
            return
        self._work.put(None)
        for seat in seats:
            with suppress(PeerError):
                seat.link.send(m.FAILED, m.encode((type(error).__name__, str(error))), urgent=True)
            self.threads.append(threading.Thread(target=seat.link.close, name="close", daemon=True))
            self.threads[-1].start()  # this may be one of the link's own
        self._ended(self)

    def _add_all(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._add(*work)
            except BaseException as error:
                self.end(
                    error
                    if isinstance(error, RoadtrainError)
                    else LostError(f"a reducer stopped: {error!r}")
                )
                return

    def _add(
        self,
        seats: list[_ReducerConnection],
        views: list[memoryview],
        part: Arrived,
        meeting: PartRound,
    ) -> None:
        n, raw = part.elements, part.format if part.format in TRAINABLE else ""
        result = self._result((part.key, part.start), 4 * n)
        if meeting.summed:
            rank, itemsize = next(iter(meeting.summed.items()))
            # who has it goes on, and fills its buffer anew
            result[: n * itemsize] = views[rank][: n * itemsize]
            self._send(
                [seat for seat in seats if seat.rank not in meeting.summed],
                part,
                result[: n * itemsize],
                True,
            )
            self._send([seat for seat in seats if seat.rank in meeting.summed], part, None, True)
            return
        total = array_in(result, "fp32", 0, n)
        if not raw:
            self._send(seats, part, self._encoded(part, total, views), False)
            return
        arrays = [array_in(view, raw, 0, n) for view in views]
        if self.rule == "accumulate":
            accumulate(total, arrays[0], raw)
        else:
            sum_k(total, arrays, raw)
        if self.rule == "accumulate":  # the next part is added while this is still being sent
            result = memoryview(bytearray(result[: 4 * n]))
            total = array_in(result, "fp32", 0, n)
        narrow = raw != "fp32" and _narrow(total, raw)
        payload = narrow or result[: 4 * n]
        if self._above is None:
            self._send(seats, part, payload, False)
        else:
            self._above(
                (part.key, part.start),
                raw,
                payload,
                lambda sum: self._send(seats, part, sum, False),
                self.end,
            )

    def _result(self, where: Where, nbytes: int) -> memoryview:
        with self._lock:
            found = self._results.get(where)
        if found is None:
            found = self.buffer(nbytes)  # zeros: where sums of `accumulate` begin
            with self._lock:
                self._results[where] = found
        return found.view

    def _encoded(self, part: Arrived, total: np.ndarray, views: list[memoryview]) -> memoryview:
        form, scratch = formats.format_of(part.format), np.empty_like(total)
        nbytes = form.nbytes(part.elements)
        for rank, view in enumerate(views):
            formats.decode(part.format, view[:nbytes], scratch if rank else total)
            if rank:
                accumulate(total, scratch, "fp32")
        where, out = (part.key, part.start), np.empty(nbytes, np.uint8).data
        residual = None
        if form.feedback:
            if where not in self._residuals:
                kept = self.buffer(4 * part.elements)
                self._residuals[where] = kept, array_in(kept.view, "fp32", 0, part.elements)
            residual = self._residuals[where][1]
        formats.encode(
            part.format, total, residual, out, seed_of(-1, part.key, part.start, part.round)
        )
        return out

    def _send(
        self,
        seats: list[_ReducerConnection],
        part: Arrived,
        payload: memoryview | None,
        summed: bool,
    ) -> None:
        """Without a payload: that all have the sum."""
        header = m.encode((part.key, part.start, part.round, summed))
        for seat in seats:
            with suppress(PeerError):  # who has left is noticed elsewhere
                seat.link.send(m.SUM, header, [] if payload is None else [payload])


def seed_of(*numbers: int) -> int:
    """Other for every encoding, the same in every run."""
    return hash(numbers) & (1 << 64) - 1  # Python's, of integers: not randomized


def _narrow(total: np.ndarray, dtype: str) -> memoryview:
    """`total` as 16-bit values, in the first half of its own memory."""
    return recast(total.view(np.uint8).data, total.size, "fp32", dtype).view(np.uint8).data


class Reducers:
    """All jobs' reducers on one host, within `nbytes` together."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._used = nbytes, 0
        self.jobs: dict[str, Reducer] = {}
        self.control: Control | None = None  # at worker 0
        self.agreeing: AgreementCoordinator | None = None  # at worker 0
        self.above: Above | None = None  # of a host's own reducers
        self._lock = threading.Condition()
        self._ending: list[threading.Thread] = []

    def accept(self, link: Link, hello: bytes) -> Receiver:
        """A worker's link: the first of a job makes its reducer. Or who asks for the status.
        Raises WireError, BusyError."""
        if hello == health.HELLO:
            return health.answer(link, self.status())
        session, rank, workers, rule = m.decoded(
            m.SUM_HELLO, hello, "no greeting of a worker of a summation"
        )
        if rule == agreement.HELLO and self.agreeing is not None:
            return self.agreeing.join(session, rank, link)
        if not rule and self.control is not None:
            return self.control.join(session, rank, link)
        if not 0 <= rank < workers <= 1 << 16 or rule not in RULES:
            raise WireError(f"worker {rank} of {workers} with rule {rule!r} came to a reducer")
        with self._lock:
            reducer = self.jobs.get(session)
            if reducer is None:
                reducer = Reducer(
                    rule, workers, self._reserve, lambda one: self._forget(session, one), self.above
                )
                self.jobs[session] = reducer
        if (reducer.workers, reducer.rule) != (workers, rule):
            raise WireError(
                f"worker {rank} of {workers} with rule {rule}, the others are {reducer.workers}"
                f" with {reducer.rule}"
            )
        link.peer = f"worker {rank} ({link.peer})"
        return reducer.join(rank, link)

    def status(self) -> health.Said:
        with self._lock:
            jobs, used = list(self.jobs.values()), self._used
        waits = {name: what for job in jobs for name, what in job.waits().items()}
        return (
            f"sums for {len(jobs)} job(s), {show_bytes(used)} of {show_bytes(self.nbytes)}",
            waits,
            {},
        )

    def _reserve(self, nbytes: int) -> None:
        with self._lock:
            if self._used + nbytes > self.nbytes:
                raise BudgetError(
                    f"a reducer needs {show_bytes(self._used + nbytes)} for buffers of"
                    f" {len(self.jobs)} job(s), its budget is {show_bytes(self.nbytes)}",
                    hint="raise its budget, or give the job more spare hosts",
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
        """Waits so long for the workers of all jobs to leave by themselves."""
        if self.agreeing is not None:
            self.agreeing.close(wait_s)
        with self._lock:
            self._lock.wait_for(lambda: not self.jobs, wait_s)
            left = list(self.jobs.values())
        for reducer in left:
            reducer.end(LostError("the reducer stops"))
        for thread in self._ending:
            thread.join(END_S)


def serve_sums(
    address: Address,
    nbytes: int,
    options: TcpOptions,
    module: str | None,
    report: Callable[[str], None] = print,
) -> int:
    """`roadtrain serve HOST:PORT --sum`: until it is ended. `module`: of the user's own formats."""
    if module is not None:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"--formats {module}: {error}", hint="PYTHONPATH says where Python looks"
            ) from error
    reducers = Reducers(nbytes)
    listener = listen(address, reducers.accept, options, report, language=m.LANGUAGE)
    try:
        report(
            "summing at {}:{}, at most {}; nothing rests here".format(
                *listener.address, show_bytes(nbytes)
            )
        )
        threading.Event().wait()
    finally:
        reducers.close()
        listener.close()
    return 0
