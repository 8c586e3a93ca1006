"""A slow switch table in numpy, for tests of the compiled table (switch/switch_table.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from roadtrain.switch.packets import HEADER, HEADER_NBYTES, PACKET_NBYTES, Kind
from roadtrain.switch.protocol.numbered import Heartbeat
from roadtrain.switch.protocol.switch import Packet, SwitchStateMachine

Payload = np.ndarray  # uint8 [PAYLOAD_NBYTES]
WIDTHS = {1: np.int8, 2: np.int16, 4: np.int32}


@cache
def operation(kind: Kind, width: int) -> Callable[[Payload, Payload], Payload]:
    """Return the function that sums two payloads of a kind; the same function object for equal
    arguments.
    """
    if kind is Kind.EXPONENTS:
        return np.maximum
    dtype = WIDTHS[width]

    def add(first: Payload, second: Payload) -> Payload:
        return (first.view(dtype) + second.view(dtype)).view(np.uint8)

    return add


class PlainTable:
    def __init__(
        self, slots: int, children: int, machine: type[SwitchStateMachine] = SwitchStateMachine
    ) -> None:
        self.machine = machine(slots, children)

    def add(self, run: np.ndarray, ok: np.ndarray, out: np.ndarray, child: int) -> int:
        """Add packets like SwitchTable.add, write complete sums to `out`, and return their
        number.
        """
        packets = run.reshape(-1, PACKET_NBYTES)
        answers = out[: run.size].reshape(-1, PACKET_NBYTES)
        made = 0
        for packet in packets[ok]:
            header = packet[:HEADER_NBYTES].view(HEADER)[0]
            sum_ = self._sum(header, packet[HEADER_NBYTES:].copy())
            if sum_ is not None:
                answers[made] = packet
                answers[made, :HEADER_NBYTES].view(HEADER)["sender"] = child
                answers[made, HEADER_NBYTES:] = sum_
                made += 1
        self.machine.check()
        return made

    def snoop(self, ack: int) -> None:
        self.machine.parent_beat(Heartbeat(ack, ack - 1))

    def check(self) -> None:
        self.machine.check()

    def _sum(self, header: np.void, payload: Payload) -> Payload | None:
        op = operation(Kind(header["kind"]), int(header["width"]))
        sender = int(header["sender"])
        packet = Packet(int(header["number"]), payload, op, sender)
        sum_ = self.machine.packet(packet)
        return None if sum_ is None else sum_.data
