"""State machines for the sender and the receiver of a stream of numbered packets. No clock, no I/O.

The receiver's heartbeats carry the next number that it expects (Ack) and the greatest number for
which it has room (Credit), as in LuWu (section 3.2.3). Beyond the paper, a heartbeat has a bitmap
of later numbers that have arrived, so the sender resends only missing packets.

NOTE sets. A set of numbers is an int. Bit i of the int stands for the number `ack + i`. All
operations take time proportional to window / 64.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from roadtrain.errors import WireError


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An acknowledgement by a receiver. Bit 0 of `have` is never set, and credit >= ack - 1."""

    ack: int  # all numbers below it have arrived
    credit: int  # the greatest number that there is room for
    have: int = 0  # bit i: number ack + i has arrived

    @property
    def end(self) -> int:
        """The number after the greatest number that has arrived."""
        return self.ack + self.have.bit_length()

    @property
    def count(self) -> int:
        """How many numbers have arrived."""
        return self.ack + self.have.bit_count()

    def has(self, number: int) -> bool:
        """Return whether a number has arrived."""
        return number < self.ack or bool(self.have >> (number - self.ack) & 1)


NOTHING = Heartbeat(0, -1)  # before the first heartbeat: nothing may be sent


def merged(beats: list[Heartbeat]) -> Heartbeat:
    """Merge the heartbeats of several receivers: minimum ack, minimum credit, intersection of
    `have`.
    """
    ack = min(beat.ack for beat in beats)
    have = -1
    for beat in beats:
        ahead = beat.ack - ack
        have &= (beat.have << ahead) | ((1 << ahead) - 1)
    return Heartbeat(ack, min(beat.credit for beat in beats), have)


def combined(last: Heartbeat, beat: Heartbeat) -> Heartbeat:
    """Combine two heartbeats of the same receiver: maximum ack, maximum credit, union of `have`.
    Their order does not matter.
    """
    ack = max(last.ack, beat.ack)
    have = (last.have >> (ack - last.ack)) | (beat.have >> (ack - beat.ack))
    # A restarted switch may send older merged heartbeats than before. So number `ack` can be in the
    # `have` of the heartbeat with the smaller ack.
    ahead = _ones(have)
    return Heartbeat(ack + ahead, max(last.credit, beat.credit), have >> ahead)


@dataclass(slots=True)
class NumberRun:
    """A range of consecutive packet numbers, whose packets carry consecutive bytes of the same
    data.
    """

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


Run = TypeVar("Run", bound=NumberRun)


def overlapping(runs: Sequence[Run], first: int, stop: int) -> Iterator[tuple[Run, int, int]]:
    """Find the packets of `runs` within [first, stop). `runs` must be sorted and must not overlap.

    Yields:
        For each run: (run, first packet within the run, number of packets).
    """
    at = bisect_right(runs, first, key=lambda run: run.first) - 1
    for run in runs[max(at, 0) :]:
        if run.first >= stop:
            return
        begin, end = max(first, run.first), min(stop, run.end)
        if begin < end:
            yield run, begin - run.first, end - begin


@dataclass(frozen=True, slots=True)
class Resend:
    """The last time that a number was resent."""

    before: int  # `next` at that time: this and greater numbers were sent later
    order: int  # counts all resends of the sender


class NumberedSender:
    """Decides which numbers to send next: first lost numbers, then new numbers below `ready`."""

    def __init__(self) -> None:
        self.beat = NOTHING  # all heartbeats so far, combined
        self.ready = 0  # the numbers below it may be sent
        self.next = 0  # the first number that was never sent
        # Every number below it has arrived or was considered lost at least once. ack <= judged <=
        # next.
        self.judged = 0
        # Numbers to resend (NOTE sets). Below `judged`, not arrived.
        self.lost = 0
        # Numbers resent since they were found lost. Below `judged`, not arrived, not in `lost`.
        self.resent: dict[int, Resend] = {}
        self.sent = 0  # packets sent, including resends
        self.resends = 0

    @property
    def ack(self) -> int:
        return self.beat.ack

    def may_send(self, below: int) -> None:
        """Allow packets with numbers less than `below` to be sent."""
        self.ready = max(self.ready, below)

    def next_numbers(self, most: int) -> range:
        """Return at most `most` consecutive numbers to send now. They count as sent."""
        if self.lost and most > 0:
            numbers = self._take_lost(most)
            self.resends += len(numbers)
        else:
            end = min(self.next + most, self.ready, self.beat.credit + 1)
            numbers = range(self.next, max(self.next, end))
            self.next = numbers.stop
        self.sent += len(numbers)
        return numbers

    def heartbeat(self, beat: Heartbeat) -> None:
        """Process a heartbeat. A missing packet counts as lost once a packet that was sent later
        has arrived. Raises WireError for an acknowledgement of unsent numbers.
        """
        if max(beat.ack, beat.end) > self.next:
            raise WireError(
                f"{max(beat.ack, beat.end)} packets are acknowledged, but {self.next} were sent",
                hint="do both ends run the same job and version?",
            )
        last, self.beat = self.beat, combined(self.beat, beat)
        if self.beat.ack > last.ack or self.beat.have != last.have:
            self.lost >>= self.beat.ack - last.ack
            self.lost &= ~self.beat.have
            self._find_lost()

    def probe(self) -> range:
        """Return the last missing number, to be sent once more. If it arrives, the heartbeat shows
        which earlier numbers were lost. Until then, it does not count as lost.
        """
        last = self.ack + self._missing(self.next).bit_length()
        count = int(last > self.ack)
        self.sent, self.resends = self.sent + count, self.resends + count
        return range(last - count, last)

    def silent(self) -> None:
        """Handle a timeout without progress: all missing packets count as lost."""
        self.lost, self.judged, self.resent = self._missing(self.next), self.next, {}

    @property
    def in_flight(self) -> int:
        """How many packets are on their way, unless they were lost or their heartbeat was."""
        return (self._missing(self.next) & ~self.lost).bit_count()

    @property
    def idle(self) -> bool:
        """True if all numbers that may be sent have arrived."""
        return self.ack >= self.ready

    def check(self) -> None:
        """Assert every invariant."""
        assert self.ack <= self.judged <= self.next <= max(self.ready, self.ack)
        assert self.next <= self.beat.credit + 1 and self.beat.end <= self.next
        missing = self._missing(self.judged)
        assert self.lost & ~missing == 0
        for number in self.resent:
            assert (missing & ~self.lost) >> (number - self.ack) & 1

    def _missing(self, below: int) -> int:
        """Return the set of the numbers less than `below` that have not arrived. The int encodes
        the set (see NOTE sets).
        """
        return ~self.beat.have & ((1 << max(0, below - self.ack)) - 1)

    def _take_lost(self, most: int) -> range:
        low = (self.lost & -self.lost).bit_length() - 1
        count = min(most, _ones(self.lost >> low))
        self.lost &= ~(((1 << count) - 1) << low)
        numbers = range(self.ack + low, self.ack + low + count)
        for order, number in enumerate(numbers, self.resends):
            self.resent[number] = Resend(self.next, order)
        return numbers

    def _find_lost(self) -> None:
        """Mark each missing number as lost if a number that was sent later has arrived."""
        end = self.beat.end
        if end > self.judged:
            self.lost |= self._missing(end) & ~self._missing(self.judged)
            self.judged = end
        if self.resent:
            waiting = {n: r for n, r in self.resent.items() if not self.beat.has(n)}
            arrived = [r.order for n, r in self.resent.items() if n not in waiting]
            latest = max(arrived, default=-1)
            again = [n for n, r in waiting.items() if r.before < end or r.order < latest]
            for number in again:
                del waiting[number]
                self.lost |= 1 << (number - self.ack)
            self.resent = waiting


class NumberedReceiver:
    """Tracks which packet numbers have arrived, in a window of `depth` numbers."""

    def __init__(self, depth: int) -> None:
        assert depth > 0
        self.depth = depth  # packets that there is room for, from `ack` on
        self.ack = 0  # all numbers below it have arrived
        # Numbers that have arrived (NOTE sets). Bit 0 and bits >= depth are never set.
        self.have = 0

    def accept(self, number: int) -> bool:
        """Mark a number as arrived. Returns False if it has arrived before or is outside the
        window, so the packet must be dropped.
        """
        return bool(self._accept_run(number, 1))

    def accept_many(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Call `accept` for each number in order, and return the results. Fast for few consecutive
        ranges.
        """
        new = np.empty(len(numbers), np.bool_)
        if not len(numbers):
            return new
        starts = np.flatnonzero(np.diff(numbers) != 1) + 1
        edges = [0, *starts.tolist(), len(numbers)]
        for start, stop in pairwise(edges):
            bits = self._accept_run(int(numbers[start]), stop - start)
            new[start:stop] = _bools(bits, stop - start)
        return new

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.ack, self.ack + self.depth - 1, self.have)

    def check(self) -> None:
        """Assert every invariant."""
        assert self.ack >= 0 and self.have >= 0
        assert not self.have & 1 and self.have.bit_length() <= self.depth

    def _accept_run(self, first: int, count: int) -> int:
        """Accept consecutive numbers. Returns a bitmap: bit i is set if first + i was accepted."""
        new = 0
        done = max(0, min(count, self.ack - first))  # numbers of the run below the window
        while done < count:
            start = first + done - self.ack
            fitting = min(count - done, self.depth - start)
            if fitting <= 0:
                break
            run = ((1 << fitting) - 1) << start
            new |= ((run & ~self.have) >> start) << done
            self.have |= run
            ahead = _ones(self.have)
            self.ack += ahead
            self.have >>= ahead
            done += fitting
        return new


def _ones(numbers: int) -> int:
    """Count the one bits at the low end of `numbers`, up to the first zero bit."""
    return (~numbers & (numbers + 1)).bit_length() - 1


def _bools(bits: int, count: int) -> npt.NDArray[np.bool_]:
    """Convert a bitmap to an array: bit i becomes element i."""
    if bits == (1 << count) - 1:
        return np.ones(count, np.bool_)
    octets = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(octets, count=count, bitorder="little").astype(np.bool_)
