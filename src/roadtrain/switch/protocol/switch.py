"""What a switch does that sums what goes up and copies what goes down. Pure: no clock, no sockets.

    child 0 --packet 7-->            --sum of 7-->          up: integers are added; of exponents
    child 1 --packet 7-->   switch                 parent       the greatest are taken
    child 0 <--copy------            <--packet----          down: parameters, as they are
    child 1 <--copy------

Sun et al. (LuWu), section 3.2.3 and appendix A: an entry of the switch's window adds up the packets
of a number of all children and sends the sum on; heartbeats that come from children are merged. A
child is a worker, or a switch with all that is below it; the parent is a switch or the server.

As printed, an entry is cleared when it is complete though resends are answered from it, and a late
resend can poison the number that takes its slot (L10 in the paper's inconsistencies). Here an entry
keeps its number and its sum until a greater number takes the slot, and the switch reads the
acknowledgements that pass, so that a late packet is dropped. A restarted switch is a new machine:
as a number's data never change, what it makes of resends are the same sums.

Does NOT look at data, but through a packet's `op`; does not tell jobs apart: a machine is one
job's. `switch/switch_table.py` is the same table compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roadtrain.switch.protocol.numbered import NOTHING, Heartbeat, heard, merged

T = TypeVar("T")
Op = Callable[[Any, Any], Any]  # of two data; associative and commutative


@dataclass(frozen=True, slots=True)
class Packet:
    """What a child sends up, or a switch to its parent."""

    number: int  # running, one sequence for all that goes up
    data: Any
    op: Op  # how the data of this number are summed
    child: int = 0  # its sender, at the receiver


@dataclass(slots=True)
class Entry:
    """The number that took a slot. Invariants: `came` is not empty; done = all children came."""

    number: int
    op: Op
    came: set[int] = field(default_factory=set)  # children whose packet is in the sum, each once
    data: Any = None  # their sum
    done: bool = False  # all have come; `data` stays as it is until another number takes the slot


class SwitchStateMachine:
    """child: which one it is, at its parent."""

    def __init__(self, slots: int, children: int, child: int = 0) -> None:
        assert slots > 0 and children > 0
        self.slots, self.children, self.child = slots, children, child
        # Slot -> the greatest number that took it. Numbers that are equal modulo `slots` share one;
        # as at most `slots` numbers are under way, an entry that is replaced was acknowledged, or
        # is made of packets that were sent before that and came late.
        self.table: dict[int, Entry] = {}
        self.acked = 0  # the receiver of the sums has all below it; never falls
        # Child -> all that it has said of what goes down. Who has not spoken is not there.
        self.beats: dict[int, Heartbeat] = {}

    def packet(self, packet: Packet) -> Packet | None:
        """What goes on to the parent: the sum, once all have come, and again for a resend."""
        entry = self._entry(packet)
        if entry is None or entry.op != packet.op:
            return None
        if not entry.done:
            if packet.child in entry.came:
                return None
            entry.data = packet.op(entry.data, packet.data) if entry.came else packet.data
            entry.came.add(packet.child)
            entry.done = len(entry.came) == self.children
        return Packet(entry.number, entry.data, entry.op, self.child) if entry.done else None

    def down(self, what: T) -> Mapping[int, T]:
        """A packet from the parent, as it is, for each child."""
        return dict.fromkeys(range(self.children), what)

    def parent_beat(self, beat: Heartbeat) -> Mapping[int, Heartbeat]:
        """What the receiver of the sums has, for each child."""
        self.acked = max(self.acked, beat.ack)
        return self.down(beat)

    def child_beat(self, child: int, beat: Heartbeat) -> Heartbeat | None:
        """What a child has of what goes down. What all have is for the parent; before all have
        spoken there is nothing to say."""
        self.beats[child] = heard(self.beats.get(child, NOTHING), beat)
        return merged(list(self.beats.values())) if len(self.beats) == self.children else None

    def check(self) -> None:
        """Assert every invariant."""
        for slot, entry in self.table.items():
            assert slot == entry.number % self.slots
            assert entry.came and entry.came <= set(range(self.children))
            assert entry.done == (len(entry.came) == self.children)
        assert self.beats.keys() <= set(range(self.children))
        for beat in self.beats.values():
            assert beat.credit >= beat.ack - 1 and not beat.have & 1

    def _entry(self, packet: Packet) -> Entry | None:
        """The packet's number's; none where it comes too late."""
        slot = packet.number % self.slots
        entry = self.table.get(slot)
        if packet.number < self.acked or (entry is not None and packet.number < entry.number):
            return None
        if entry is None or packet.number > entry.number:
            entry = self.table[slot] = Entry(packet.number, packet.op)
        return entry
