"""The two ends of a stream of numbered packets. Pure: no clock, no sockets.

Sun et al. (LuWu), section 3.2.3: a sender sends up to its credit; the receiver's heartbeats carry
the next number it expects (Ack) and the greatest it has room for (Credit). Beyond the paper a
heartbeat also says which later numbers have come (`have`), so that a sender goes back to what is
missing, not to all that follows it: a receiver puts each packet where it belongs, in any order.

Note "Sets of numbers": a set of numbers is an int, whose bit i stands for number `ack + i`. All
operations are linear in the window, over 64.
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
    """Invariants: credit >= ack - 1; bit 0 of `have` is never set (else ack would be greater)."""

    ack: int  # all numbers below it have come
    credit: int  # the greatest number that there is room for
    have: int = 0  # bit i: number ack + i has come

    @property
    def end(self) -> int:
        """The number after the greatest that has come."""
        return self.ack + self.have.bit_length()


PROBE = 8  # packets that go again when nothing comes; doubles each time
NOTHING = Heartbeat(0, -1)  # before anybody has spoken: nothing may be sent


def merged(beats: list[Heartbeat]) -> Heartbeat:
    """What all of several receivers have: the least ack and credit, the numbers that all have."""
    ack = min(beat.ack for beat in beats)
    have = -1
    for beat in beats:
        ahead = beat.ack - ack
        have &= (beat.have << ahead) | ((1 << ahead) - 1)
    return Heartbeat(ack, min(beat.credit for beat in beats), have)


def heard(last: Heartbeat, beat: Heartbeat) -> Heartbeat:
    """All that two heartbeats of one origin say. What has come stays so, hence their order, and one
    that comes late or twice, make no difference."""
    ack = max(last.ack, beat.ack)
    have = (last.have >> (ack - last.ack)) | (beat.have >> (ack - beat.ack))
    # A restarted switch can merge heartbeats that are older than what it merged before. So the one
    # with the lesser ack may know number `ack` to have come.
    ahead = _ones(have)
    return Heartbeat(ack + ahead, max(last.credit, beat.credit), have >> ahead)


@dataclass(slots=True)
class NumberRun:
    """Consecutive numbers, which stand for consecutive packets of one thing."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


Run = TypeVar("Run", bound=NumberRun)


def overlapping(runs: Sequence[Run], first: int, stop: int) -> Iterator[tuple[Run, int, int]]:
    """(run, its first packet there, how many) of the runs with numbers in [first, stop). `runs`:
    in order, without overlaps."""
    at = bisect_right(runs, first, key=lambda run: run.first) - 1
    for run in runs[max(at, 0) :]:
        if run.first >= stop:
            return
        begin, end = max(first, run.first), min(stop, run.end)
        if begin < end:
            yield run, begin - run.first, end - begin


@dataclass(frozen=True, slots=True)
class Resend:
    """When a number went again, the last time."""

    before: int  # what was `next` then: this and greater numbers were sent later
    order: int  # running, over all resends


class NumberedSender:
    """What to send next, of numbers that are sent in order and, where they are lost, again.

    Numbers below `ready` may be sent. `next_numbers` gives lost ones before new ones.
    """

    def __init__(self) -> None:
        self.beat = NOTHING  # all that the receivers have said
        self.ready = 0  # the numbers below it exist
        self.next = 0  # the first number that was never sent
        # Numbers below it that have not come were found lost once. ack <= judged <= next.
        self.judged = 0
        # Those to be sent again (note "Sets of numbers"). Below `judged`, not come.
        self.lost = 0
        # Those that went again since they were found lost. Below `judged`, not come, not lost.
        self.resent: dict[int, Resend] = {}
        self.probe = PROBE  # how many go again when nothing comes
        self.sent = 0  # packets, those that went again included
        self.again = 0  # those that went again

    @property
    def ack(self) -> int:
        return self.beat.ack

    @property
    def credit(self) -> int:
        return self.beat.credit

    def may_send(self, below: int) -> None:
        """The numbers below `below` exist."""
        self.ready = max(self.ready, below)

    def next_numbers(self, most: int) -> range:
        """A run of numbers to be sent now, at most so many, empty where there are none. They count
        as sent."""
        if self.lost and most > 0:
            numbers = self._take_lost(most)
            self.again += len(numbers)
        else:
            numbers = range(self.next, max(self.next, self._limit(most)))
            self.next = numbers.stop
        self.sent += len(numbers)
        return numbers

    def heartbeat(self, beat: Heartbeat) -> None:
        """What the receivers say. What was sent before a number that has come, and has not come
        itself, is lost, and goes again; once, until something sent after that has come.

        Raises WireError when numbers have come that were never sent."""
        if max(beat.ack, beat.end) > self.next:
            raise WireError(
                f"a heartbeat says that {max(beat.ack, beat.end)} packets have come, {self.next}"
                " were sent",
                hint="the two ends are of different jobs or versions",
            )
        last, self.beat = self.beat, heard(self.beat, beat)
        if self.beat.ack > last.ack or self.beat.have != last.have:
            if self._first_time_came(last):
                self.probe = PROBE
            self.lost >>= self.beat.ack - last.ack
            self.lost &= ~self.beat.have
            self._find_lost()

    def silent(self) -> None:
        """Time has passed without progress: the first `probe` of what has not come go again, and
        twice as many the next time, until something comes that was sent once only. So who waits
        for a slow receiver, or for others that send the same numbers, fills no link meanwhile."""
        missing, count = self._missing(self.next), 0
        while missing and count < self.probe:
            low = missing & -missing
            self.lost |= low
            self.judged = max(self.judged, self.ack + low.bit_length())
            self.resent.pop(self.ack + low.bit_length() - 1, None)
            missing, count = missing ^ low, count + 1
        self.probe *= 2

    @property
    def idle(self) -> bool:
        """All that may be sent has come."""
        return self.ack >= self.ready

    def check(self) -> None:
        """Assert every invariant."""
        assert self.ack <= self.judged <= self.next <= max(self.ready, self.ack)
        assert self.next <= self.credit + 1 and self.beat.end <= self.next
        missing = self._missing(self.judged)
        assert self.lost & ~missing == 0
        for number in self.resent:
            assert (missing & ~self.lost) >> (number - self.ack) & 1

    def _first_time_came(self, last: Heartbeat) -> bool:
        """Whether a number has come since `last` that was not sent again."""
        missing = self._missing(self.next)
        before = ~last.have & ((1 << (self.next - last.ack)) - 1)
        again = sum(not self._holds(missing, number) for number in self.resent)
        return before.bit_count() - missing.bit_count() > again

    def _limit(self, most: int) -> int:
        """Where a run of new numbers ends."""
        return min(self.next + most, self.ready, self.credit + 1)

    def _missing(self, below: int) -> int:
        """The numbers below `below` that have not come."""
        return ~self.beat.have & ((1 << max(0, below - self.ack)) - 1)

    def _take_lost(self, most: int) -> range:
        low = (self.lost & -self.lost).bit_length() - 1
        count = min(most, _ones(self.lost >> low))
        self.lost &= ~(((1 << count) - 1) << low)
        numbers = range(self.ack + low, self.ack + low + count)
        for order, number in enumerate(numbers, self.again):
            self.resent[number] = Resend(self.next, order)
        return numbers

    def _find_lost(self) -> None:
        """After something has come: what was sent before that."""
        end = self.beat.end
        if end > self.judged:
            self.lost |= self._missing(end) & ~self._missing(self.judged)
            self.judged = end
        if self.resent:
            missing = self._missing(self.next)
            waiting = {n: r for n, r in self.resent.items() if self._holds(missing, n)}
            came = [r.order for n, r in self.resent.items() if n not in waiting]
            latest = max(came, default=-1)
            again = [n for n, r in waiting.items() if r.before < end or r.order < latest]
            for number in again:
                del waiting[number]
                self.lost |= 1 << (number - self.ack)
            self.resent = waiting

    def _holds(self, numbers: int, number: int) -> bool:
        return number >= self.ack and bool(numbers >> (number - self.ack) & 1)


class NumberedReceiver:
    """Which numbers have come, in a window of `depth`."""

    def __init__(self, depth: int) -> None:
        assert depth > 0
        self.depth = depth  # packets that there is room for, from `ack` on
        self.ack = 0  # all numbers below it have come
        # Those that have come (note "Sets of numbers"). Bit 0 is never set, nor a bit >= depth.
        self.have = 0

    def came(self, number: int) -> bool:
        """Whether it is new and there is room for it; else it is to be dropped."""
        return bool(self._came_run(number, 1))

    def came_many(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`came` of each, in order. Fast where they are few runs of consecutive numbers."""
        new = np.empty(len(numbers), np.bool_)
        if not len(numbers):
            return new
        starts = np.flatnonzero(np.diff(numbers) != 1) + 1
        edges = [0, *starts.tolist(), len(numbers)]
        for start, stop in pairwise(edges):
            bits = self._came_run(int(numbers[start]), stop - start)
            new[start:stop] = _bools(bits, stop - start)
        return new

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.ack, self.ack + self.depth - 1, self.have)

    def check(self) -> None:
        """Assert every invariant."""
        assert self.ack >= 0 and self.have >= 0
        assert not self.have & 1 and self.have.bit_length() <= self.depth

    def _came_run(self, first: int, count: int) -> int:
        """The numbers of a run that are new: bit i stands for first + i. They come one after the
        other, so that the first ones may make room for later ones."""
        new = 0
        done = max(0, min(count, self.ack - first))  # of the run, that is below the window
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
    """How many of the lowest bits are set without a gap."""
    return (~numbers & (numbers + 1)).bit_length() - 1


def _bools(bits: int, count: int) -> npt.NDArray[np.bool_]:
    """Bit i as element i."""
    if bits == (1 << count) - 1:
        return np.ones(count, np.bool_)
    octets = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(octets, count=count, bitorder="little").astype(np.bool_)
