"""The two streams at the fan-in end, which map packet numbers to bytes. No threads, no I/O.

Incoming has the summed gradients and the maxima of the workers' exponents. The same thread must
make all calls of `take`:

    expect (numbers were granted) -> take (packets) -> take -> ... -> the complete run

Outgoing has parameters and maxima for all workers:

    add (a run: numbers and bytes) -> fill (packets, for sending or resending) -> acknowledged

The bytes of a run must not change until the run's callback `done` is called.
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
    """Sizes of the buffers of a fan-in end."""

    buffers: int  # buffers for parameters, and as many for sums
    piece_bytes: int  # size of a buffer for parameters
    scratch_bytes: int  # size of a buffer for sums

    @property
    def total(self) -> int:
        """Total size of all buffers, in bytes."""
        return self.buffers * (self.piece_bytes + self.scratch_bytes)


# At least 2 buffers: one is filled while the other is sent.
LEAST_BUFFERS, MOST_BUFFERS = 2, 6


def derive_fan_in(
    table: ChunkTable, records: Mapping[int, Record], host_bytes: int
) -> FanInBudgets:
    """Derive the sizes of the buffers: together at most a quarter of the server's budget
    `host_bytes`, but at least the minimum that a fan-in end needs.

    `records` has the server's chunks by number.
    """
    mine = [table.chunks[number] for number in sorted(records)]
    piece = buffer_for(chunk.weights_nbytes for chunk in mine)
    scratch = buffer_for(chunk.numel * 4 for chunk in mine if chunk.trainable)
    least = LEAST_BUFFERS * (piece + scratch)
    more = max(host_bytes // 4 - least, 0) // (piece + scratch)
    return FanInBudgets(min(LEAST_BUFFERS + more, MOST_BUFFERS), piece, scratch)


@dataclass(slots=True)
class ExpectedRun(NumberRun):
    """A run of packets that carries the exponents or the gradient of one sum."""

    kind: Kind  # EXPONENTS or GRADIENT
    chunk: int
    round: int
    maxima: np.ndarray  # uint8 [blocks]: the largest exponents; the destination of EXPONENTS
    sum: np.ndarray  # fp32 [elements]: the destination of GRADIENT; empty for EXPONENTS
    missing: int  # packets that have not arrived


class Incoming:
    """The stream of exponents and sums to the fan-in end."""

    def __init__(self, window: int, width: int, workers: int) -> None:
        """
        Args:
            window: Maximum number of packets in flight.
            width: Number of bytes of an element on the wire.
            workers: Number of gradients in a sum.
        """
        self._receiver = NumberedReceiver(window)
        self._width, self._workers = width, workers
        self._runs: list[ExpectedRun] = []
        self._end = 0  # the number after the last granted one
        self._lock = threading.Lock()  # guards `_runs`
        self.packets = 0  # received, including duplicates
        self.repeated = 0  # duplicates

    def expect_exponents(self, chunk: int, round: int, first: int, blocks: int) -> None:
        maxima = np.zeros(blocks, np.uint8)
        count = -(-blocks // PAYLOAD_NBYTES)
        none = np.empty(0, np.float32)
        self._expect(ExpectedRun(first, count, Kind.EXPONENTS, chunk, round, maxima, none, count))

    def expect_gradient(
        self, chunk: int, round: int, first: int, maxima: np.ndarray, into: np.ndarray
    ) -> None:
        """Prepare to receive the packets of a sum.

        Args:
            first: Number of the first packet.
            maxima: uint8, the largest exponent of each block.
            into: fp32 [elements], the destination of the sum.
        """
        count = fixed_point.packets_of(into.size, self._width)
        self._expect(ExpectedRun(first, count, Kind.GRADIENT, chunk, round, maxima, into, count))

    def _expect(self, run: ExpectedRun) -> None:
        with self._lock:
            assert run.first == self._end, "numbers are granted in order"
            self._end = run.end
            self._runs.append(run)

    def take(self, batch: Batch) -> list[ExpectedRun]:
        """Process received packets, and return the runs that are complete now. Raises WireError for
        packets with numbers that were not granted.
        """
        numbers = batch.numbers
        if batch.segment != PACKET_NBYTES:
            raise WireError(f"a sum's packet has {batch.segment} bytes, expected {PACKET_NBYTES}")
        with self._lock:
            end = self._end
        ok = np.flatnonzero(batch.ok)
        if int(numbers[ok].max()) >= end:
            raise WireError(f"packet {int(numbers[ok].max())} arrived, but grants end before {end}")
        new = np.zeros(batch.count, np.bool_)
        new[ok] = self._receiver.accept_many(numbers[ok])
        self.packets += len(ok)
        self.repeated += len(ok) - int(np.count_nonzero(new))
        return [run for run in self._runs_of(numbers[new]) if self._put(run, batch, numbers, new)]

    def _runs_of(self, numbers: np.ndarray) -> list[ExpectedRun]:
        if not numbers.size:
            return []
        low, high = int(numbers.min()), int(numbers.max())
        with self._lock:
            return [run for run, _, _ in overlapping(self._runs, low, high + 1)]

    def _put(self, run: ExpectedRun, batch: Batch, numbers: np.ndarray, new: np.ndarray) -> bool:
        """Write the payloads of a run's packets to its destination. If it is complete, remove it
        and return True.
        """
        ours = new & (numbers >= run.first) & (numbers < run.end)
        count = int(np.count_nonzero(ours))
        if not count:
            return False
        if batch.kind is not run.kind:
            raise WireError(
                f"the fan-in end received a packet of kind {batch.kind.name}, but the packet's"
                f" number was granted for {run.kind.name} of chunk {run.chunk}"
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
        """Make a heartbeat that acknowledges the received packets. For the thread that calls
        `take`.
        """
        return self._receiver.heartbeat()

    def check(self) -> None:
        """Assert every invariant."""
        for run, following in zip(self._runs, self._runs[1:]):
            assert run.end <= following.first
        assert all(0 < run.missing <= run.count for run in self._runs)
        assert not self._runs or self._runs[-1].end <= self._end


@dataclass(frozen=True, slots=True)
class OutgoingBytes:
    """The content of a run of packets: parameters or maxima."""

    kind: Kind  # PARAMETERS or MAXIMA
    chunk: int
    count_of: int  # version of the parameters, or round of the maxima
    bytes: np.ndarray  # uint8
    granted: int = 0  # with maxima: number of the first gradient packet that they grant


@dataclass(slots=True)
class OutgoingRun(NumberRun):
    carried: OutgoingBytes
    done: Callable[[], None]  # called when all workers have received it


class Outgoing:
    """The stream of parameters and maxima from the fan-in end."""

    def __init__(self, job: int, key: PacketKey) -> None:
        self._job, self._key = job, key
        self._runs: list[OutgoingRun] = []
        self.end = 0  # the number after the last run
        # guards `_runs`; held while bytes are copied, so no run is acknowledged meanwhile
        self._lock = threading.Lock()

    def add(self, carried: OutgoingBytes, done: Callable[[], None] = lambda: None) -> int:
        """Append a run of packets, and return the number after its last packet. `done` is called
        when all workers have received the run.
        """
        with self._lock:
            count = -(-carried.bytes.size // PAYLOAD_NBYTES)
            self._runs.append(OutgoingRun(self.end, count, carried, done))
            self.end += count
            return self.end

    def acknowledged(self, below: int) -> None:
        """Remove the runs whose packets all have numbers less than `below`, and call their
        `done`.
        """
        with self._lock:
            whole = 0
            while whole < len(self._runs) and self._runs[whole].end <= below:
                whole += 1
            done, self._runs = self._runs[:whole], self._runs[whole:]
        for run in done:
            run.done()

    def fill(self, first: int, count: int, staging: np.ndarray) -> int:
        """Write the packets with unacknowledged numbers in [first, first + count) to `staging`,
        with tags. Returns their number.
        """
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
