"""The two streams at the end of a fan-in: which bytes a number stands for. No threads, no sockets.

Incoming: exponents and gradients; sums become fp32 in the buffer that waits for them.

    expect (numbers were granted) -> take (packets) -> ... -> Whole: all of a run has come

Assumes that one thread takes. Does NOT know who sends, or when.

Outgoing: parameters and maxima, until all workers have them.

    add (a run of numbers, its bytes) -> fill (packets of some of them, also again) -> acknowledged

A run's bytes are read whenever its packets are made, so they must not change until its `done` is
called. Does NOT send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from roadtrain.chunks import ChunkTable, Record
from roadtrain.errors import WireError
from roadtrain.options.budgets import buffer_for
from roadtrain.switch import fixed_point, packets
from roadtrain.switch.packets import PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import (
    Heartbeat,
    NumberedReceiver,
    NumberRun,
    overlapping,
)
from roadtrain.switch.streams import Batch

MODULUS = 1 << 32  # of versions and rounds in a packet


@dataclass(frozen=True)
class FanInBudgets:
    """Memory of the end of a fan-in in front of a server."""

    buffers: int  # of parameters on their way to workers, and as many of sums on their way here
    piece_bytes: int  # of a buffer of parameters
    scratch_bytes: int  # of a buffer of sums

    @property
    def total(self) -> int:
        """Bytes that may be in use at once."""
        return self.buffers * (self.piece_bytes + self.scratch_bytes)


# One is filled while another is sent.
LEAST_BUFFERS, MOST_BUFFERS = 2, 6


def derive_fan_in(
    table: ChunkTable, records: Mapping[int, Record], host_bytes: int
) -> FanInBudgets:
    """Of a server's `host_bytes` a quarter at most, or the least that does; what is left is the
    server's (`derive_server`, which refuses). `records`: the server's own."""
    mine = [table.chunks[number] for number in sorted(records)]
    piece = buffer_for(chunk.weights_nbytes for chunk in mine)
    scratch = buffer_for(chunk.numel * 4 for chunk in mine if chunk.trainable)
    least = LEAST_BUFFERS * (piece + scratch)
    more = max(host_bytes // 4 - least, 0) // (piece + scratch)
    return FanInBudgets(min(LEAST_BUFFERS + more, MOST_BUFFERS), piece, scratch)


@dataclass(slots=True)
class ExpectedRun(NumberRun):
    """The packets of one kind of a round, in order."""

    kind: Kind  # EXPONENTS or GRADIENT
    chunk: int
    round: int
    maxima: np.ndarray  # uint8 [blocks]: the greatest exponents; where EXPONENTS go
    sum: np.ndarray  # fp32 [elements]: where GRADIENT goes; empty for EXPONENTS
    missing: int  # packets that have not come


class Incoming:
    """Invariants: `_runs` are in the order of their numbers, without gaps between those that were
    there at once; a run without anything missing is not in it. `_lock` guards it."""

    def __init__(self, window: int, width: int, workers: int) -> None:
        """`width`: bytes of an element of a gradient on its way; `workers`: that are summed."""
        self._receiver = NumberedReceiver(window)
        self._width, self._workers = width, workers
        self._runs: list[ExpectedRun] = []
        self._end = 0  # the number after the last that was granted
        self._lock = threading.Lock()
        self.packets = 0  # that came, again or not
        self.repeated = 0  # that came and were not needed

    def expect_exponents(self, chunk: int, round: int, first: int, blocks: int) -> None:
        maxima = np.zeros(blocks, np.uint8)
        count = -(-blocks // PAYLOAD_NBYTES)
        none = np.empty(0, np.float32)
        self._expect(ExpectedRun(first, count, Kind.EXPONENTS, chunk, round, maxima, none, count))

    def expect_gradient(
        self, chunk: int, round: int, first: int, maxima: np.ndarray, into: np.ndarray
    ) -> None:
        """into: fp32 [elements]."""
        count = fixed_point.packets_of(into.size, self._width)
        self._expect(ExpectedRun(first, count, Kind.GRADIENT, chunk, round, maxima, into, count))

    def _expect(self, run: ExpectedRun) -> None:
        with self._lock:
            assert run.first == self._end, "numbers are granted in order"
            self._end = run.end
            self._runs.append(run)

    def take(self, batch: Batch) -> list[ExpectedRun]:
        """Those that are whole now. Raises WireError for packets that nobody was granted."""
        numbers = batch.numbers
        if batch.segment != PACKET_NBYTES:
            raise WireError(f"packets of {batch.segment} bytes came, {PACKET_NBYTES} have a sum")
        with self._lock:
            end = self._end
        ok = np.flatnonzero(batch.ok)
        if int(numbers[ok].max()) >= end:
            raise WireError(f"packet {int(numbers[ok].max())} came, {end} were granted")
        new = np.zeros(batch.count, np.bool_)
        new[ok] = self._receiver.came_many(numbers[ok])
        self.packets += len(ok)
        self.repeated += len(ok) - int(np.count_nonzero(new))
        return [run for run in self._runs_of(numbers[new]) if self._took(run, batch, numbers, new)]

    def _runs_of(self, numbers: np.ndarray) -> list[ExpectedRun]:
        if not numbers.size:
            return []
        low, high = int(numbers.min()), int(numbers.max())
        with self._lock:
            return [run for run, _, _ in overlapping(self._runs, low, high + 1)]

    def _took(self, run: ExpectedRun, batch: Batch, numbers: np.ndarray, new: np.ndarray) -> bool:
        """Whether the run is whole with these packets; it is forgotten here then."""
        ours = new & (numbers >= run.first) & (numbers < run.end)
        count = int(np.count_nonzero(ours))
        if not count:
            return False
        if batch.kind is not run.kind:
            raise WireError(
                f"a packet of {batch.kind.name} came with a number of {run.kind.name}, chunk"
                f" {run.chunk}"
            )
        index = numbers - run.first
        if run.kind is Kind.EXPONENTS:
            at = np.where(ours, index, 0).astype(np.uint32)
            packets.copy_out(batch.buffer, ours, at, run.maxima)
        else:
            fixed_point.dequantize(
                batch.buffer,
                ours,
                index,
                self._width,
                self._workers,
                run.maxima,
                run.sum,
            )
        run.missing -= count
        if run.missing:
            return False
        with self._lock:
            self._runs.remove(run)
        return True

    def heartbeat(self) -> Heartbeat:
        """By the thread that takes."""
        return self._receiver.heartbeat()

    def check(self) -> None:
        """Assert every invariant."""
        for run, following in zip(self._runs, self._runs[1:]):
            assert run.end <= following.first
        assert all(0 < run.missing <= run.count for run in self._runs)
        assert not self._runs or self._runs[-1].end <= self._end


@dataclass(frozen=True, slots=True)
class OutgoingBytes:
    """What one run of packets carries."""

    kind: Kind  # PARAMETERS or MAXIMA
    chunk: int
    count_of: int  # the version of parameters, the round of maxima
    bytes: np.ndarray  # uint8
    granted: int = 0  # with maxima: the first number of the gradient packets that follow


@dataclass(slots=True)
class OutgoingRun(NumberRun):
    carried: OutgoingBytes
    done: Callable[[], None]  # all workers have it


class Outgoing:
    """Invariant: `_runs` are in the order of their numbers, without gaps; the last ends at `end`.
    `_lock` guards them, and is held while a packet's bytes are copied: so nobody changes them
    then."""

    def __init__(self, job: int, key: PacketKey) -> None:
        self._job, self._key = job, key
        self._runs: list[OutgoingRun] = []
        self.end = 0  # the number after the last
        self._lock = threading.Lock()

    def add(self, carried: OutgoingBytes, done: Callable[[], None] = lambda: None) -> int:
        """Numbers for it. Returns the one after its last: all below may be sent."""
        with self._lock:
            count = -(-carried.bytes.size // PAYLOAD_NBYTES)
            self._runs.append(OutgoingRun(self.end, count, carried, done))
            self.end += count
            return self.end

    def acknowledged(self, below: int) -> None:
        """All workers have the numbers below it."""
        with self._lock:
            whole = 0
            while whole < len(self._runs) and self._runs[whole].end <= below:
                whole += 1
            done, self._runs = self._runs[:whole], self._runs[whole:]
        for run in done:
            run.done()

    def fill(self, first: int, count: int, staging: np.ndarray) -> int:
        """Whole, sealed packets of those of `count` numbers from `first` on that are not
        acknowledged, one after the other. Returns how many."""
        made = 0
        with self._lock:
            for run, packet, number in overlapping(self._runs, first, first + count):
                self._write(run, packet, number, staging[made * PACKET_NBYTES :])
                made += number
        packets.seal(staging, PACKET_NBYTES, made, self._key)
        return made

    def _write(self, run: OutgoingRun, packet: int, count: int, into: np.ndarray) -> None:
        carried = run.carried
        packets.write_headers(
            into,
            PACKET_NBYTES,
            count,
            kind=carried.kind,
            job=self._job,
            first=run.first + packet,
            a=carried.chunk,
            b=carried.count_of % MODULUS,
            c=packet,
            credit=carried.granted,
        )
        packets.copy_in(into[: count * PACKET_NBYTES], carried.bytes, packet)

    def check(self) -> None:
        """Assert every invariant."""
        for run, following in zip(self._runs, self._runs[1:]):
            assert run.end == following.first
        assert not self._runs or self._runs[-1].end == self.end
