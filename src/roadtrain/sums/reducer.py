"""Reducer: adds the parts of tensors that workers push, and returns the sums (BytePS's summation
service). Does NOT divide the sums by the number of workers, and keeps no parameters or files.

    part of worker 0 --+                                              +--> all workers
    part of worker 1 --+--> one buffer each ------> one pass, fp32 ---+--> (accumulate: the sender)

The thread of the link on which the last part arrives does the addition. protocol/reducer.py makes
the decisions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
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
# A function that sums this host's sum with the sums of other hosts. Arguments: where, dtype, this
# host's sum, callback for the total, callback for an error.
Above = Callable[
    [Where, str, memoryview, Callable[[memoryview], None], Callable[[BaseException], None]], None
]


def _nbytes(elements: int, format: str, summed: int) -> int:
    """Return the number of bytes of a part on the wire."""
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
        self.coming: set[Where] = set()  # parts that are being received into their buffers

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        try:
            return super().room(kind, header, nbytes)
        except RoadtrainError as error:
            self.session.end(error)
            return Buffer(nbytes).view[:nbytes]  # the frame is discarded; `end` sends the error

    def find_room(self, kind: int, fields: Any, nbytes: int) -> memoryview:
        if kind != sum_frames.PART or nbytes != _nbytes(*fields[3:]):
            raise WireError(
                f"worker {self.rank} sent a payload of {nbytes} bytes in a frame of kind {kind},"
                f" which does not fit the header (elements, format, is a sum): {fields[3:]}"
            )
        where = fields.key, fields.start
        buffer = self.buffers.get(where)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self.buffers[where] = self.session.buffer(nbytes, buffer)
        self.coming.add(where)
        return buffer.view[:nbytes]


class Reducer(HostedSession[_ReducerConnection]):
    """The reducer of one job on one host.

    Args:
        rule: "sum" (all workers get the sum of a round) or "accumulate" (each part is added at
            once, and its sender gets the new value).
        reserve: Reserves bytes of the host's budget. Raises BudgetError.
        forget: Called once, when the last worker has left or the reducer has failed.
        above: Adds the sums of other hosts to a sum of this host, before the workers get the total.
            None if this host does not sum with other hosts.
    """

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
        self._left: dict[int, PeerError] = {}  # workers that have left -> why
        self._machine = ReducerStateMachine(workers, rule)
        self._results: dict[Where, Buffer] = {}
        self._residuals: dict[Where, tuple[Buffer, np.ndarray]] = {}  # errors of encoded sums
        self._accumulating = threading.Lock()  # held while a part is added to an accumulated value

    def takes(self, rank: int) -> bool:
        return not self.lost_ranks and super().takes(rank)

    def busy(self) -> BaseException:
        if self.over is None or isinstance(self.over, (LostError, BudgetError)):
            return super().busy()
        return self.over  # the error that the other workers got

    def buffer(self, nbytes: int, instead: Buffer | None = None) -> Buffer:
        """Allocate a buffer of `nbytes` bytes of the budget, which gets back the bytes of the old
        buffer `instead`. Raises BudgetError."""
        more = Buffer(nbytes)
        self._take(more.nbytes - (instead.nbytes if instead is not None else 0))
        return more

    def _take(self, nbytes: int) -> None:
        with self.lock:
            if not self.over:  # at the end, all bytes were given back to the budget
                self._reserve(nbytes)
                self.reserved += nbytes

    def take(self, worker: _ReducerConnection, kind: int, fields: Any, payload: memoryview) -> None:
        match kind:
            case sum_frames.MOVED | sum_frames.GIVEN_UP:
                self._moved(worker, given_up=kind == sum_frames.GIVEN_UP)
            case sum_frames.PART:
                self._arrived(worker, fields, len(payload))
            case _:
                raise WireError(f"a reducer received an unexpected frame of kind {kind}")

    def _arrived(self, worker: _ReducerConnection, part: Arrived, nbytes: int) -> None:
        where = part.key, part.start
        if not nbytes or nbytes != _nbytes(part.elements, part.format, part.summed):
            raise WireError(
                f"worker {worker.rank} sent {nbytes} bytes for {part.elements} {part.format} values"
            )
        worker.coming.discard(where)
        with self.lock:
            if self.over:
                return
            complete = self._machine.arrived(worker.rank, part)
            if complete is not None:
                all_ranks = range(self.workers) if self.rule == "sum" else (worker.rank,)
                workers = [self.connections[rank] for rank in all_ranks]
                views = [each.buffers[where].view for each in workers]
        if complete is not None:
            with nullcontext() if self.rule == "sum" else self._accumulating:
                self._add(workers, views, part, complete)
        self._end_if_lost()

    def _moved(self, worker: _ReducerConnection, given_up: bool) -> None:
        """Release the buffers, and if `given_up` is True the rounds, that `worker` does not use any
        more."""
        with self.lock:
            if given_up:
                self._machine.give_up(worker.rank)
            busy = worker.coming | {
                where for where, current in self._machine.rounds.items() if current.here
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
        """Return the workers for which other workers wait: name of each worker -> (seconds since
        the worker's last frame, the part that is missing, as text)."""
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
        """Handle the loss of a worker. The reducer ends when another worker waits for a part of the
        lost worker, or when all workers have left."""
        with self.lock:
            self._left[rank] = error
        self._end_if_lost()
        if all_gone:
            self.end(LostError(f"worker {rank} has left: {error}"))

    def _end_if_lost(self) -> None:
        """End the reducer if a worker waits for a part of a worker that has left (Rule 5: nothing
        hangs)."""
        with self.lock:
            if not self._left:
                return
            awaited = {rank for ranks in self._machine.missing().values() for rank in ranks}
            lost = sorted(awaited & self._left.keys())
        if lost:
            self.end(LostError(f"worker {lost[0]} has left: {self._left[lost[0]]}"))

    def ended(self, error: BaseException) -> None:
        self.dismiss(error)
        self._forget(self)

    def _add(
        self,
        workers: list[_ReducerConnection],
        views: list[memoryview],
        part: Arrived,
        complete: PartRound,
    ) -> None:
        n, raw = part.elements, part.format if part.format in TRAINABLE else ""
        result = self._result((part.key, part.start), 4 * n)
        if complete.summed:
            rank, itemsize = next(iter(complete.summed.items()))
            have = [worker for worker in workers if worker.rank in complete.summed]
            lack = [worker for worker in workers if worker.rank not in complete.summed]
            # copied, because a worker that has the sum goes on, and its next part is received into
            # this buffer
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
            # copied, because the next part may be added while the payload is being sent
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
            found = self.buffer(nbytes)  # all zeros, with which `accumulate` begins
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
        """Send the sum `payload` to `workers`, or, if it is None, the notice that all workers have
        the sum."""
        header = m.encode((part.key, part.start, part.round, summed))
        for worker in workers:
            with suppress(PeerError):  # handled by `one_left`
                worker.link.send(sum_frames.SUM, header, [] if payload is None else [payload])


def _decoded(
    format: str, encoded: Sequence[memoryview], total: np.ndarray
) -> Iterator[tuple[np.ndarray, str]]:
    """Yield (values, dtype) for each encoded part, whose values are valid until the next one is
    yielded."""
    scratch = np.empty_like(total)
    for rank, raw in enumerate(encoded):
        into = scratch if rank else total
        formats.decode(format, raw, into)
        yield into, "fp32"
