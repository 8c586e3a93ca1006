"""State machine of a switch: sum packets going up, copy packets going down. No clock, no I/O.

    child 0 --packet 7-->            --sum of 7-->          up: gradients are added, exponents
    child 1 --packet 7-->   switch                 parent       combined by maximum
    child 0 <--copy------            <--packet----          down: parameters, unchanged
    child 1 <--copy------

An entry of the switch's window adds up the packets of all children with the same number, and sends
the sum to the parent (LuWu, section 3.2.3 and appendix A). A child is a worker or another switch;
the parent is a switch or the server.

In the paper, a late resent packet can corrupt the sum of the next number in the same slot. So an
entry keeps its number and sum until a greater number takes the slot, and late packets are dropped.
The data of a number never change, so after a restart resent packets produce the same sums again.

One state machine serves one job. `switch/switch_table.py` is the compiled version of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roadtrain.switch.protocol.numbered import NOTHING, Heartbeat, combined, merged

T = TypeVar("T")
Op = Callable[[Any, Any], Any]  # combines the data of two packets; associative and commutative


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet going up, from a child to a switch or from a switch to its parent."""

    number: int  # sequence number, shared by all packets going up
    data: Any
    op: Op  # combines the data of this number
    child: int = 0  # number of the sender among the receiver's children


@dataclass(slots=True)
class Entry:
    """The content of a slot. `done` is set if and only if all children are in `seen`."""

    number: int
    op: Op
    seen: set[int] = field(default_factory=set)  # children whose packet is in the sum
    data: Any = None  # the sum
    done: bool = False  # the sum is complete; `data` does not change any more


class SwitchStateMachine:
    """The state of a switch for one job. `child` is the number of this switch among its parent's
    children.
    """

    def __init__(self, slots: int, children: int, child: int = 0) -> None:
        assert slots > 0 and children > 0
        self.slots, self.children, self.child = slots, children, child
        # Slot -> entry of the greatest number so far. Numbers that are equal modulo `slots` share a
        # slot. As at most `slots` numbers are in flight, a replaced entry was acknowledged, or has
        # only packets that were sent before the acknowledgement and arrived late.
        self.table: dict[int, Entry] = {}
        self.acked = 0  # the receiver of the sums has all numbers below it; never decreases
        # Child -> its heartbeats, combined. A child without a heartbeat is absent.
        self.beats: dict[int, Heartbeat] = {}

    def packet(self, packet: Packet) -> Packet | None:
        """Process a packet of a child. Returns a packet for the parent if the sum is complete, else
        None.
        """
        entry = self._entry(packet)
        if entry is None or entry.op != packet.op:
            return None
        if not entry.done:
            if packet.child in entry.seen:
                return None
            entry.data = packet.op(entry.data, packet.data) if entry.seen else packet.data
            entry.seen.add(packet.child)
            entry.done = len(entry.seen) == self.children
        return Packet(entry.number, entry.data, entry.op, self.child) if entry.done else None

    def down(self, packet: T) -> Mapping[int, T]:
        """Copy a packet from the parent to each child."""
        return dict.fromkeys(range(self.children), packet)

    def parent_beat(self, beat: Heartbeat) -> Mapping[int, Heartbeat]:
        """Process the parent's acknowledgement of sums, and copy it to each child."""
        self.acked = max(self.acked, beat.ack)
        return self.down(beat)

    def child_beat(self, child: int, beat: Heartbeat) -> Heartbeat | None:
        """Process a child's acknowledgement. Returns the merged heartbeat of all children for the
        parent, or None until each has sent one.
        """
        self.beats[child] = combined(self.beats.get(child, NOTHING), beat)
        return merged(list(self.beats.values())) if len(self.beats) == self.children else None

    def check(self) -> None:
        """Assert every invariant."""
        for slot, entry in self.table.items():
            assert slot == entry.number % self.slots
            assert entry.seen and entry.seen <= set(range(self.children))
            assert entry.done == (len(entry.seen) == self.children)
        assert self.beats.keys() <= set(range(self.children))
        for beat in self.beats.values():
            assert beat.credit >= beat.ack - 1 and not beat.have & 1

    def _entry(self, packet: Packet) -> Entry | None:
        """Find or make the entry of a packet's number. Returns None for a late packet."""
        slot = packet.number % self.slots
        entry = self.table.get(slot)
        if packet.number < self.acked or (entry is not None and packet.number < entry.number):
            return None
        if entry is None or packet.number > entry.number:
            entry = self.table[slot] = Entry(packet.number, packet.op)
        return entry
