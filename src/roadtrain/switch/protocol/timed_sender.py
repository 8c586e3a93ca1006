"""The timer and the window of a sender of numbered packets. No clock, no I/O: callers pass the
time, in seconds of any monotonic clock.

    timer     RFC 6298: SRTT and RTTVAR from one sample per round trip, never of a resent number
              (Karn's rule); doubles with each timeout until the next sample
    probe     before the first timeout, the last missing number is resent. If it arrives, the
              receiver's bitmap shows which others were lost (RFC 8985, section 7)
    window    packets in flight: GAIN x delivery rate x least round trip, as in BBR (Cardwell et
              al., 2016), and LEAST_WINDOW more. The credit, and so the slots of the switches, bound
              it from above.

A wrong estimate costs time or packets that arrive twice. It cannot change a sum, because the window
only delays numbers that the credit allows, and a resent packet has the same bytes.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from roadtrain.switch.protocol.numbered import Heartbeat, NumberedSender

BEAT_S = 0.01  # interval between two heartbeats while packets arrive
FIRST_TIMEOUT_S = 1.0  # before the first sample (RFC 6298, 2.1)
# Below the 1 s and 60 s of RFC 6298, which is for strangers: one lost packet must not stop all
# workers for a second, and the return of a switch must be noticed in seconds (Rule 5).
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.2, 2.0
STUCK = 5  # timers that expire without progress, after which the sender counts as stuck
GAIN = 2.0
# A round trip counts as at least as long. Even where no queue is full, an acknowledgement waits for
# the next heartbeat (10 ms), for hosts that gather packets (16 ms) and switches (4 ms).
LEAST_TRIP_S = 0.03
# Packets in flight at first, and in addition to those of the rate. Without the addition, a stream
# whose heartbeats wait in the queue of the opposite stream could stay below the rate of its link.
LEAST_WINDOW = 32
MEMORY_S = 5.0  # age at which the greatest rate and the least round trip are measured again


class RetransmissionTimer:
    """The retransmission timeout of RFC 6298."""

    def __init__(self) -> None:
        self._srtt_s = self._rttvar_s = 0.0  # no sample if 0
        self.doublings = 0  # timeouts since the last sample

    def sample(self, rtt_s: float) -> None:
        """Process the round trip of a number that was sent once."""
        if self._srtt_s:
            self._rttvar_s += (abs(self._srtt_s - rtt_s) - self._rttvar_s) / 4
            self._srtt_s += (rtt_s - self._srtt_s) / 8
        else:
            self._srtt_s, self._rttvar_s = rtt_s, rtt_s / 2
        self.doublings = 0

    def timeout_s(self, least_s: float = LEAST_TIMEOUT_S) -> float:
        """Return SRTT + max(G, 4 RTTVAR) seconds, at least `least_s`. G is BEAT_S."""
        estimated_s = self._srtt_s + max(BEAT_S, 4 * self._rttvar_s)
        timeout_s = max(estimated_s, least_s) if self._srtt_s else FIRST_TIMEOUT_S
        return min(timeout_s * 2**self.doublings, MOST_TIMEOUT_S)


class TimedNumber(NamedTuple):
    """The number in flight whose round trip is measured."""

    number: int
    sent_s: float
    arrived: int  # numbers that had arrived at `sent_s`
    arrived_s: float  # when the last of them arrived
    before_s: float  # when the previous timed number was sent


class TimedSender:
    """A NumberedSender with a timer and a window."""

    def __init__(self) -> None:
        self.numbers = NumberedSender()
        self.timer = RetransmissionTimer()
        self._timed: TimedNumber | None = None
        self._starved = False  # whether `ready` limited the sender since `_timed` was sent
        # When numbers last arrived, when a timed number was last sent, and when the timer began.
        # All three begin anew when the first packet after an idle time is sent.
        self._arrived_s = self._timed_s = self._began_s = 0.0
        self._expired = 0  # timers that have expired without progress
        # Greatest rates (packets/s): in MEMORY_S or more until `_rates_s`, and since then
        self._rates, self._rates_s = (0.0, 0.0), 0.0
        self._trip_s, self._trip_at_s = FIRST_TIMEOUT_S, 0.0  # the least round trip
        self._draining = False  # no queue may build, so that the least round trip can be measured

    @property
    def window(self) -> int:
        """The most packets in flight, apart from the credit."""
        trip_s = 0.0 if self._draining else max(self._trip_s, LEAST_TRIP_S)
        return int(GAIN * max(self._rates) * trip_s) + LEAST_WINDOW

    @property
    def stuck(self) -> bool:
        """True if packets have been resent for some seconds without progress."""
        return self._expired >= STUCK and not self.numbers.idle

    def next_numbers(self, most: int, now_s: float) -> range:
        """Return at most `most` consecutive numbers to send now. They count as sent."""
        sender, new = self.numbers, self.numbers.next
        if not sender.in_flight:
            self._arrived_s = self._timed_s = self._began_s = now_s
        numbers = self._expire(now_s) if self.wait_s(now_s) <= 0 else range(0)
        room = self.window - sender.in_flight
        numbers = numbers or sender.next_numbers(min(most, room))
        if self._timed is not None and self._timed.number in numbers:
            self._timed = None
        if self._timed is None and numbers.stop > new:
            timed = now_s, sender.beat.count, self._arrived_s, self._timed_s
            self._timed, self._timed_s = TimedNumber(new, *timed), now_s
            self._starved = False
        self._starved |= sender.next == sender.ready and len(numbers) < room
        return numbers

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the timer expires; infinity if no packet is in flight."""
        if not self.numbers.in_flight:
            return inf
        timeout_s = self.timer.timeout_s() if self._expired else self.timer.timeout_s(0.0)
        return self._began_s + timeout_s - now_s

    def heartbeat(self, beat: Heartbeat, now_s: float) -> int:
        """Process a heartbeat. Returns the number below which all packets are acknowledged. Raises
        WireError for an acknowledgement of unsent numbers.
        """
        before = self.numbers.beat.count
        self.numbers.heartbeat(beat)
        if self.numbers.beat.count > before:
            if self._timed is not None and self.numbers.beat.has(self._timed.number):
                self._sample(self._timed, now_s)
                self._timed = None
            self._arrived_s, self._began_s, self._expired = now_s, now_s, 0
        return self.numbers.ack

    def _expire(self, now_s: float) -> range:
        """Handle a timeout. Returns the number to send as a probe, if any."""
        self._began_s, self._expired = now_s, self._expired + 1
        if self._expired == 1:
            return self.numbers.probe()
        self.numbers.silent()
        self.timer.doublings += 1
        self._rates = 0.0, 0.0
        return range(0)

    def _sample(self, timed: TimedNumber, now_s: float) -> None:
        rtt_s = now_s - timed.sent_s
        self.timer.sample(rtt_s)
        # The longer of the times in which the packets were sent and acknowledged, so that neither
        # packets nor heartbeats that gather somewhere look like a faster link
        took_s = max(timed.sent_s - timed.before_s, now_s - timed.arrived_s, LEAST_TRIP_S)
        rate = (self.numbers.beat.count - timed.arrived) / took_s
        if not self._starved or rate > max(self._rates):
            if now_s - self._rates_s > MEMORY_S:
                self._rates, self._rates_s = (self._rates[1], 0.0), now_s
            self._rates = self._rates[0], max(self._rates[1], rate)
        if self._draining or rtt_s <= self._trip_s:
            self._trip_s, self._trip_at_s, self._draining = rtt_s, now_s, False
        else:
            self._draining = now_s - self._trip_at_s > 2 * MEMORY_S
