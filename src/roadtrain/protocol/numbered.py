"""The two ends of a stream of numbered packets. Pure: no clock, no sockets.

Sun et al. (LuWu), section 3.2.3: a sender sends up to its credit; the receiver's heartbeats carry
the next number it expects (Ack) and the greatest it has room for (Credit). Beyond the paper a
heartbeat also says which later numbers have come (`have`), so that a sender goes back to what is
missing, not to all that follows it: a receiver puts each packet where it belongs, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Invariants: credit >= ack - 1; bit 0 of `have` is never set (else ack would be greater)."""

    ack: int  # all numbers below it have come
    credit: int  # the greatest number that there is room for
    have: int = 0  # bit i: number ack + i has come


NOTHING = Heartbeat(0, -1)  # before anybody has spoken: nothing may be sent


def merged(beats: list[Heartbeat]) -> Heartbeat:
    """What all of several receivers have: the least ack and credit, the numbers that all have."""
    ack = min(beat.ack for beat in beats)
    have = -1
    for beat in beats:
        ahead = beat.ack - ack
        have &= (beat.have << ahead) | ((1 << ahead) - 1)
    return Heartbeat(ack, min(beat.credit for beat in beats), have)


class NumberedSender:
    """What to send next, of numbers that are sent in order and, where they are lost, again.

    Numbers below `ready` may be sent. `next_numbers` gives lost ones before new ones.
    """

    ack: int
    next: int  # the first number that was never sent
    credit: int

    def may_send(self, below: int) -> None:
        """The numbers below `below` exist."""
        raise NotImplementedError

    def next_numbers(self, most: int) -> range:
        """A run of numbers to be sent now, at most so many, empty where there are none. They count
        as sent."""
        raise NotImplementedError

    def heartbeat(self, beat: Heartbeat) -> None:
        """What the receivers say. What was sent before a number that has come, and has not come
        itself, is lost, and goes again; once, until something sent after that has come."""
        raise NotImplementedError

    def silent(self) -> None:
        """Time has passed without progress: all that has not come goes again."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """All that may be sent has come."""
        raise NotImplementedError


class NumberedReceiver:
    """Which numbers have come, in a window of `depth`."""

    ack: int

    def came(self, number: int) -> bool:
        """Whether it is new and there is room for it; else it is to be dropped."""
        raise NotImplementedError

    def heartbeat(self) -> Heartbeat:
        raise NotImplementedError
