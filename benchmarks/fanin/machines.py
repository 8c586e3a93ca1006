"""Step functions of the fan-in's state machines, for the exploration. A step builds a machine from
a state, lets the machine process an event, and returns the machine's new state.

A state is hashable and does NOT include the machine's counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roadtrain.switch.protocol.numbered import Heartbeat, NumberedReceiver, NumberedSender, Resend
from roadtrain.switch.protocol.switch import Entry, Packet, SwitchStateMachine

Data = tuple[tuple[int, int], ...]  # (worker, number) of every part of a sum, sorted
SEND, SILENT, RESTART = "send", "silent", "restart"


def collected(first: Data, second: Data) -> Data:
    """Combine two sums. A sum is a tuple of (worker, packet number) for each packet that
    was added.
    """
    return tuple(sorted(first + second))


class LiteralSwitch(SwitchStateMachine):
    """The switch as the paper of SwitchML describes it, which computes wrong sums after lost
    packets.
    """

    def packet(self, packet: Packet) -> Packet | None:
        slot = packet.number % self.slots
        entry = self.table.setdefault(slot, Entry(packet.number, packet.op))
        if packet.child in entry.seen:
            return None
        entry.data = packet.op(entry.data, packet.data) if entry.seen else packet.data
        entry.seen.add(packet.child)
        if len(entry.seen) < self.children:
            return None
        del self.table[slot]
        return Packet(packet.number, entry.data, packet.op, self.child)


# (ack, credit, have, ready, next, judged, lost, resent numbers in order)
SenderState = tuple[int, int, int, int, int, int, int, tuple[tuple[int, int], ...]]


def sender_state(sender: NumberedSender) -> SenderState:
    beat = sender.beat
    again = sorted(sender.resent.items(), key=lambda item: item[1].order)
    return (
        *(beat.ack, beat.credit, beat.have),
        *(sender.ready, sender.next, sender.judged, sender.lost),
        tuple((number, resend.before) for number, resend in again),
    )


def sender_step(state: SenderState, event: Heartbeat | str) -> tuple[SenderState, int]:
    """Apply an event to a sender. Returns (new state, number of the sent packet or -1)."""
    sender, sent = NumberedSender(), -1
    ack, credit, have, sender.ready, sender.next, sender.judged, sender.lost, again = state
    sender.beat = Heartbeat(ack, credit, have)
    sender.resent = {number: Resend(before, i) for i, (number, before) in enumerate(again)}
    sender.resends = len(again)  # the order of the next resend
    if isinstance(event, Heartbeat):
        sender.heartbeat(event)
    elif event == SILENT:
        sender.silent()
    else:
        sent = next(iter(sender.next_numbers(1)), -1)
    sender.check()
    return sender_state(sender), sent


def eager_step(state: SenderState, event: Heartbeat | str) -> tuple[SenderState, int]:
    """Apply an event to a sender that answers a heartbeat with all packets that it may send.
    Returns the same as sender_step.
    """
    state, sent = sender_step(state, event)
    more = isinstance(event, Heartbeat)
    while more:
        state, number = sender_step(state, SEND)
        more = number >= 0
    return state, sent


ReceiverState = tuple[int, int]  # ack, have


@dataclass(frozen=True)
class ReceiverStep:
    depth: int

    def __call__(self, state: ReceiverState, number: int) -> tuple[ReceiverState, bool]:
        receiver = NumberedReceiver(self.depth)
        receiver.ack, receiver.have = state
        had = number < receiver.ack or receiver.have >> (number - receiver.ack) & 1
        new = receiver.accept(number)
        assert not (new and had), f"{number} was accepted twice"
        receiver.check()
        return (receiver.ack, receiver.have), new


def beat_of(state: ReceiverState, depth: int) -> Heartbeat:
    return Heartbeat(state[0], state[0] + depth - 1, state[1])


def earlier_beats(state: ReceiverState, depth: int) -> list[Heartbeat]:
    """List all heartbeats that a receiver in this state may have sent before, for every order of
    arrival. `depth`: window of the receiver.
    """
    ack, have = state
    arrived = [n for n in range(ack + have.bit_length()) if n < ack or have >> (n - ack) & 1]
    found = []
    for first in range(ack + 1):
        later = [n for n in arrived if first < n < first + depth]
        for choice in range(1 << len(later)):
            bits = sum(1 << (n - first) for i, n in enumerate(later) if choice >> i & 1)
            found.append(Heartbeat(first, first + depth - 1, bits))
    return found


# acked; (slot, number, children, data, done) of each entry; (child, its heartbeat)
SwitchState = tuple[int, tuple[tuple[int, int, tuple[int, ...], Data, bool], ...], Any]


@dataclass(frozen=True)
class SwitchStep:
    """The step function of a switch. A step returns (new state, (output, lost)).

    The output is the packet or heartbeat that the switch sends up, or None. `lost` is the number of
    a packet whose slot a later packet took, or -1.
    """

    machine: type[SwitchStateMachine]
    slots: int
    children: int

    @property
    def first(self) -> SwitchState:
        return self._state(self.machine(self.slots, self.children))

    def __call__(
        self, state: SwitchState, event: Any
    ) -> tuple[SwitchState, tuple[Packet | Heartbeat | None, int]]:
        if event == RESTART:
            return self.first, (None, -1)
        switch, lost = self._machine(state), -1
        out: Packet | Heartbeat | None = None
        match event:
            case Packet():
                slot = event.number % self.slots
                old = switch.table[slot].number if slot in switch.table else -1
                out = switch.packet(event)
                if slot in switch.table and old >= 0 and switch.table[slot].number != old:
                    lost = old
            case Heartbeat():
                switch.parent_beat(event)
            case (child, beat):
                out = switch.child_beat(child, beat)
        switch.check()
        return self._state(switch), (out, lost)

    def _machine(self, state: SwitchState) -> SwitchStateMachine:
        switch = self.machine(self.slots, self.children)
        switch.acked = state[0]
        switch.table = {
            slot: Entry(number, collected, set(children), data, done)
            for slot, number, children, data, done in state[1]
        }
        switch.beats = dict(state[2])
        return switch

    def _state(self, switch: SwitchStateMachine) -> SwitchState:
        entries = tuple(
            (slot, entry.number, tuple(sorted(entry.seen)), entry.data, entry.done)
            for slot, entry in sorted(switch.table.items())
        )
        return switch.acked, entries, tuple(sorted(switch.beats.items()))
