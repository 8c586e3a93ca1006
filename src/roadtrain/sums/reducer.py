"""Reducer: adds up what the workers push and gives it back, on a worker's own host or on a spare
one (BytePS's summation service). It keeps no parameters, no optimizer, nothing on files.

    part of worker 0 --+                                              +--> all workers
    part of worker 1 --+--> buffers of their own --> one pass, fp32 --+--> (accumulate: the sender)

Buffers are made when a part comes for the first time and used again in every round, until parts go
elsewhere. Encoded parts (sums/formats.py) are decoded one by one, their sum is encoded. One
thread adds; links have theirs. Assumes what sums/protocol/reducer.py says. Does NOT know layers,
models or who divides by the number of workers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from roadtrain.chunks import ITEMSIZE, TRAINABLE
from roadtrain.device.buffers import Buffer, array_in
from roadtrain.errors import (
    BudgetError,
    ConfigError,
    LostError,
    PeerError,
    RoadtrainError,
    WireError,
)
from roadtrain.kernels.cast import cast_in_place
from roadtrain.kernels.sum import sum_in_order
from roadtrain.servers import frames as m
from roadtrain.servers.connection import HostedSession, WorkerConnection
from roadtrain.sums import formats, sum_frames
from roadtrain.sums.protocol.reducer import Arrived, PartRound, ReducerStateMachine
from roadtrain.transport.link import Link

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


class _ReducerConnection(WorkerConnection):
    session: Reducer

    def __init__(self, reducer: Reducer, rank: int, link: Link) -> None:
        super().__init__(reducer, rank, link)
        self.buffers: dict[Where, Buffer] = {}
        self.coming: set[Where] = set()  # parts whose bytes are on their way into their buffer

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        try:
            return super().room(kind, header, nbytes)
        except RoadtrainError as error:
            self.session.end(error)
            return Buffer(nbytes).view[:nbytes]  # this frame goes nowhere, the worker hears why

    def find_room(self, kind: int, fields: Any, nbytes: int) -> memoryview:
        if kind != sum_frames.PART or nbytes != _nbytes(*fields[3:]):
            raise WireError(
                f"a frame of kind {kind} with {nbytes} bytes {fields[3:]} came to a reducer"
            )
        where = fields.key, fields.start
        buffer = self.buffers.get(where)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self.buffers[where] = self.session.buffer(nbytes, buffer)
        self.coming.add(where)
        return buffer.view[:nbytes]


class Reducer(HostedSession[_ReducerConnection]):
    """Of one job. `above`: who adds other hosts' sums before the workers here get theirs.
    `forget` is called once, when the last worker has left or something failed."""

    connection_class = _ReducerConnection

    def __init__(
        self,
        rule: str,
        workers: int,
        reserve: Callable[[int], None],
        forget: Callable[[Reducer], None],
        above: Above | None = None,
    ) -> None:
        super().__init__(workers)
        self.rule = rule
        self.reserved = 0  # bytes
        self._reserve, self._forget, self._above = reserve, forget, above
        self._why_gone: dict[int, PeerError] = {}  # of each worker that has left
        self._machine = ReducerStateMachine(workers, rule)
        self._results: dict[Where, Buffer] = {}
        self._residuals: dict[Where, tuple[Buffer, np.ndarray]] = {}  # what encoding the sum lost
        self._work = queue.SimpleQueue[Any]()
        self.threads.append(threading.Thread(target=self._add_all, name="reducer", daemon=True))
        self.threads[0].start()

    def takes(self, rank: int) -> bool:
        return not self.lost_ranks and super().takes(rank)

    def busy(self) -> BaseException:
        if self.over is None or isinstance(self.over, (LostError, BudgetError)):
            return super().busy()
        return self.over  # what the others have been told

    def buffer(self, nbytes: int, instead: Buffer | None = None) -> Buffer:
        """BudgetError where the host's budget does not hold one more."""
        more = Buffer(nbytes)
        self._take(more.nbytes - (instead.nbytes if instead is not None else 0))
        return more

    def _take(self, nbytes: int) -> None:
        with self.lock:
            if not self.over:  # else all has been given back
                self._reserve(nbytes)
                self.reserved += nbytes

    def take(self, worker: _ReducerConnection, kind: int, fields: Any, payload: memoryview) -> None:
        match kind:
            case sum_frames.MOVED | sum_frames.GIVEN_UP:
                self._moved(worker, given_up=kind == sum_frames.GIVEN_UP)
            case sum_frames.PART:
                self._arrived(worker, fields, len(payload))
            case _:
                raise WireError(f"a frame of kind {kind} came to a reducer")

    def _arrived(self, worker: _ReducerConnection, part: Arrived, nbytes: int) -> None:
        where = part.key, part.start
        if not nbytes or nbytes != _nbytes(part.elements, part.format, part.summed):
            raise WireError(
                f"a part of {part.elements} elements of {part.format} came as {nbytes} bytes"
            )
        worker.coming.discard(where)
        with self.lock:
            if self.over:
                return
            meeting = self._machine.arrived(worker.rank, part)
            if meeting is not None:
                self._sum_soon(worker, part, meeting)
        self._end_where_one_gone_is_awaited()

    def _sum_soon(self, worker: _ReducerConnection, part: Arrived, meeting: PartRound) -> None:
        """Under the lock: hands a part that is complete to the thread that adds."""
        alone = self.rule == "accumulate"
        workers = [worker] if alone else [self.connections[rank] for rank in range(self.workers)]
        views = [one.buffers[part.key, part.start].view for one in workers]
        self._work.put((workers, views, part, meeting))

    def _moved(self, worker: _ReducerConnection, given_up: bool) -> None:
        """Parts go elsewhere from now on, or have other keys (`given_up`, with what is not
        summed): the memory of those that nobody waits for is given back. What is still in use
        lives as long as that."""
        with self.lock:
            if given_up:
                self._machine.given_up(worker.rank)
            busy = worker.coming | {
                where for where, meeting in self._machine.meetings.items() if meeting.here
            }
            dropped = [
                worker.buffers.pop(where) for where in [*worker.buffers] if where not in busy
            ]
            if worker.rank == 0:
                dropped += [self._results.pop(where) for where in [*self._results]]
            if worker.rank == 0 and given_up:
                dropped += [self._residuals.pop(where)[0] for where in [*self._residuals]]
        self._take(-sum(buffer.nbytes for buffer in dropped))

    def waits(self) -> dict[str, tuple[float, str]]:
        """Who keeps the others waiting, for what and since when its last word came."""
        with self.lock:
            missing, now = self._machine.missing(), time.monotonic()
        late = {rank: key for key, ranks in reversed(missing.items()) for rank in ranks}
        return {
            f"worker {rank}": (
                now - self.connections[rank].last_seen if rank in self.connections else 0.0,
                f"its part of tensor {key}, round {number}",
            )
            for rank, (key, _, number) in late.items()
        }

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        """Others may be leaving too: it is over where somebody waits for this one, now or later,
        or when all have gone."""
        with self.lock:
            self._why_gone[rank] = error
        self._end_where_one_gone_is_awaited()
        if all_gone:
            self.end(LostError(f"worker {rank} has gone: {error}"))

    def _end_where_one_gone_is_awaited(self) -> None:
        """A part of a worker that has left never comes, whether it left before or after others
        pushed theirs (Rule 5)."""
        with self.lock:
            if not self._why_gone:
                return
            awaited = {rank for ranks in self._machine.missing().values() for rank in ranks}
            gone = sorted(awaited & self._why_gone.keys())
        if gone:
            self.end(LostError(f"worker {gone[0]} has gone: {self._why_gone[gone[0]]}"))

    def ended(self, error: BaseException) -> None:
        self._work.put(None)
        self.dismiss(error)
        self._forget(self)

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
        workers: list[_ReducerConnection],
        views: list[memoryview],
        part: Arrived,
        meeting: PartRound,
    ) -> None:
        n, raw = part.elements, part.format if part.format in TRAINABLE else ""
        result = self._result((part.key, part.start), 4 * n)
        if meeting.summed:
            rank, itemsize = next(iter(meeting.summed.items()))
            have = [one for one in workers if one.rank in meeting.summed]
            lack = [one for one in workers if one.rank not in meeting.summed]
            # who has it goes on, and fills its buffer anew
            payload = result[: n * itemsize]
            payload[:] = views[rank][: n * itemsize]
            self._send(lack, part, payload, True)
            self._send(have, part, None, True)
            return
        payload = result[: 4 * n]
        total = array_in(result, "fp32", 0, n)
        if not raw:
            self._send(workers, part, self._encoded(part, total, views), False)
            return
        grads = [(array_in(view, raw, 0, n), raw) for view in views]
        if self.rule == "sum":
            sum_in_order(total, grads)
        else:
            sum_in_order(total, [(total, "fp32"), *grads])
            # the next part is added while this is still being sent
            payload = memoryview(bytearray(payload))
        if raw != "fp32":
            payload = cast_in_place(payload, n, "fp32", raw).view(np.uint8).data
        if self._above is None:
            self._send(workers, part, payload, False)
        else:
            self._above(
                (part.key, part.start),
                raw,
                payload,
                lambda sum: self._send(workers, part, sum, False),
                self.end,
            )

    def _result(self, where: Where, nbytes: int) -> memoryview:
        with self.lock:
            found = self._results.get(where)
        if found is None:
            found = self.buffer(nbytes)  # zeros: where sums of `accumulate` begin
            with self.lock:
                self._results[where] = found
        return found.view

    def _encoded(self, part: Arrived, total: np.ndarray, views: list[memoryview]) -> memoryview:
        form = formats.format_of(part.format)
        nbytes = form.nbytes(part.elements)
        sum_in_order(total, _decoded(part.format, [view[:nbytes] for view in views], total))
        where, out = (part.key, part.start), np.empty(nbytes, np.uint8).data
        residual = None
        if form.feedback:
            if where not in self._residuals:
                kept = self.buffer(4 * part.elements)
                self._residuals[where] = kept, array_in(kept.view, "fp32", 0, part.elements)
            residual = self._residuals[where][1]
        formats.encode(
            part.format, total, residual, out, formats.seed_of(-1, part.key, part.start, part.round)
        )
        return out

    def _send(
        self,
        workers: list[_ReducerConnection],
        part: Arrived,
        payload: memoryview | None,
        summed: bool,
    ) -> None:
        """Without a payload: that all have the sum."""
        header = m.encode((part.key, part.start, part.round, summed))
        for one in workers:
            with suppress(PeerError):  # who has left is noticed elsewhere
                one.link.send(sum_frames.SUM, header, [] if payload is None else [payload])


def _decoded(
    format: str, encoded: Sequence[memoryview], total: np.ndarray
) -> Iterator[tuple[np.ndarray, str]]:
    """One after another; the first in `total`."""
    scratch = np.empty_like(total)
    for rank, raw in enumerate(encoded):
        into = scratch if rank else total
        formats.decode(format, raw, into)
        yield into, "fp32"
