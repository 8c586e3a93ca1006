"""Outgoing: the stream of parameters and maxima that leaves the end of a fan-in. Which bytes a
number stands for, until all workers have it. No threads, no sockets.

    add (a run of numbers, its bytes) -> fill (packets of some of them, also again) -> acknowledged

A run's bytes are read whenever its packets are made, so they must not change until its `done` is
called. Does NOT send.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roadtrain.switch import packets
from roadtrain.switch.packets import PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey

MODULUS = 1 << 32  # of versions and rounds in a packet


@dataclass(frozen=True, slots=True)
class OutgoingBytes:
    """What one run of packets carries."""

    kind: Kind  # PARAMETERS or MAXIMA
    chunk: int
    count_of: int  # the version of parameters, the round of maxima
    bytes: np.ndarray  # uint8
    granted: int = 0  # with maxima: the first number of the gradient packets that follow


@dataclass(frozen=True, slots=True)
class OutgoingRun:
    first: int
    count: int
    carried: OutgoingBytes
    done: Callable[[], None]  # all workers have it

    @property
    def end(self) -> int:
        return self.first + self.count


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
        made, stop = 0, first + count
        with self._lock:
            at = max(bisect_right(self._runs, first, key=lambda run: run.first) - 1, 0)
            for run in self._runs[at:]:
                low, high = max(first, run.first), min(stop, run.end)
                if low >= stop:
                    break
                if low < high:
                    self._write(run, low, high - low, staging[made * PACKET_NBYTES :])
                    made += high - low
        packets.seal(staging, PACKET_NBYTES, made, self._key)
        return made

    def _write(self, run: OutgoingRun, number: int, count: int, into: np.ndarray) -> None:
        carried, packet = run.carried, number - run.first
        packets.write_headers(
            into,
            PACKET_NBYTES,
            count,
            kind=carried.kind,
            job=self._job,
            first=number,
            a=carried.chunk,
            b=carried.count_of % MODULUS,
            c=packet,
            credit=carried.granted,
        )
        packets.copy_in(into, PACKET_NBYTES, count, carried.bytes, packet)

    def check(self) -> None:
        """Assert every invariant."""
        for run, following in zip(self._runs, self._runs[1:]):
            assert run.end == following.first
        assert not self._runs or self._runs[-1].end == self.end
