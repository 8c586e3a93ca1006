"""The table of a switch, which sums the packets of its children within a window (Sun et al., LuWu,
section 3.2.3).

    number, seen (bitmap of children in the sum), done, payload     slot index: number % slots

A slot keeps its number and sum until a packet with a greater number takes the slot. Late packets
are dropped, and packets of a complete sum are answered with the sum. So each sum has exactly one
packet of each child, even if packets are lost, duplicated or late.

GRADIENT payloads are added as integers of the packet's width; EXPONENTS payloads are combined by a
bytewise maximum. The packets must have been verified. Does NOT compute tags. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from roadtrain.kernels.cast import kernel
from roadtrain.switch.options import MOST_CHILDREN
from roadtrain.switch.packets import (
    HEADER,
    HEADER_NBYTES,
    PACKET_NBYTES,
    PAYLOAD_NBYTES,
    Kind,
    PacketKey,
    check_bulk,
    copy_bytes,
)
from roadtrain.switch.switch_frames import SwitchHello
from roadtrain.transport.tcp import Address

_GRADIENT, _EXPONENTS = np.uint8(Kind.GRADIENT), np.uint8(Kind.EXPONENTS)
_FREE = -1  # number of an unused slot
_MOST_NUMBER = np.uint64((1 << 62) - 1)  # no session gets beyond it

SLOT = np.dtype(
    [
        ("number", "<i8"),  # or _FREE
        ("seen", "<u8"),  # bit i: child i's packet is in the sum
        ("began", "<i8"),  # `now` of its first packet
        ("kind", "u1"),
        ("width", "u1"),
        ("done", "u1"),  # 1: the packets of all children are in the sum
    ],
    align=True,
)
COUNTERS = ("added", "completed", "dropped_old", "repeated", "answered", "mismatched")
_ADDED, _COMPLETED, _OLD, _REPEATED, _ANSWERED, _MISMATCHED = range(len(COUNTERS))


@dataclass(frozen=True, slots=True)
class StuckSlot:
    """An incomplete sum in a slot of a table."""

    number: int
    missing: tuple[int, ...]  # children whose packet has not arrived
    age: int  # ticks since its first packet


class Table(Protocol):
    """The interface of a job's table; SwitchTable documents the methods."""

    now: int

    @property
    def counters(self) -> dict[str, int]: ...
    def add(self, run: np.ndarray, ok: np.ndarray, out: np.ndarray, child: int) -> int: ...
    def snoop(self, ack: int) -> None: ...
    def stuck(self, older_than: int = 0) -> list[StuckSlot]: ...
    def close(self) -> None: ...


class TableDevice(Protocol):
    """A network device that sums packets in place of this process; see switch_command.py."""

    name: str
    mode: str  # how its driver runs the program; shown to users

    def table(self, hello: SwitchHello, port: int, key: PacketKey, parent: Address) -> Table:
        """Make a job's table. Raises RoadtrainError or OSError if that is impossible.

        Args:
            port: UDP port of the job at this switch.
            parent: Numeric address to which sums are sent.
        """

    def close(self) -> None: ...


@kernel
def _add(payload: Any, total: Any) -> Any:
    for i in range(payload.size):
        total[i] += payload[i]


@kernel
def _combine(kind: Any, width: Any, payload: Any, total: Any) -> Any:
    if kind == _EXPONENTS:
        for i in range(payload.size):
            total[i] = max(total[i], payload[i])
    elif width == 4:
        _add(payload.view(np.int32), total.view(np.int32))
    elif width == 2:
        _add(payload.view(np.int16), total.view(np.int16))
    else:
        _add(payload.view(np.int8), total.view(np.int8))


@kernel
def _possible(header: Any, child: Any, children: Any) -> Any:
    """Return whether a packet with this header can be summed."""
    if not 0 <= child < children or header.number > _MOST_NUMBER:
        return False
    if header.kind == _EXPONENTS:
        return header.width == 0
    return header.kind == _GRADIENT and (
        header.width == 1 or header.width == 2 or header.width == 4
    )


@kernel
def _take(
    slots: Any, sums: Any, header: Any, bit: Any, payload: Any, acked: Any, now: Any, all_bits: Any
) -> Any:
    """Add a new packet to the sum of its slot. Returns the index of the counter to increment."""
    number = np.int64(header.number)
    at = number % slots.size
    slot = slots[at]
    if number < acked or number < slot.number:
        return _OLD
    if number > slot.number:
        slot.number, slot.seen, slot.done, slot.began = number, np.uint64(0), np.uint8(0), now
        slot.kind, slot.width = header.kind, header.width
    if slot.kind != header.kind or slot.width != header.width:
        return _MISMATCHED
    if slot.done:
        return _ANSWERED
    if slot.seen & bit:
        return _REPEATED
    if slot.seen == 0:
        copy_bytes(payload, sums[at])
    else:
        _combine(slot.kind, slot.width, payload, sums[at])
    slot.seen |= bit
    if slot.seen != all_bits:
        return _ADDED
    slot.done = np.uint8(1)
    return _COMPLETED


@kernel
def _add_packets(
    slots: Any,
    sums: Any,
    run: Any,
    ok: Any,
    out: Any,
    child: Any,
    first: Any,
    children: Any,
    acked: Any,
    now: Any,
    all_bits: Any,
    counters: Any,
) -> Any:
    made = 0
    for i in range(run.size // PACKET_NBYTES):
        if not ok[i]:
            continue
        packet = run[i * PACKET_NBYTES : (i + 1) * PACKET_NBYTES]
        header = packet[:HEADER_NBYTES].view(HEADER)[0]
        its = np.int64(header.sender) - first
        if not _possible(header, its, children):
            counters[_MISMATCHED] += 1
            continue
        bit, payload = np.uint64(1) << np.uint64(its), packet[HEADER_NBYTES:]
        what = _take(slots, sums, header, bit, payload, acked, now, all_bits)
        counters[what] += 1
        if what in (_COMPLETED, _ANSWERED):
            answer = out[made * PACKET_NBYTES : (made + 1) * PACKET_NBYTES]
            copy_bytes(packet[:HEADER_NBYTES], answer[:HEADER_NBYTES])
            answer[:HEADER_NBYTES].view(HEADER)[0].sender = child
            copy_bytes(sums[np.int64(header.number) % slots.size], answer[HEADER_NBYTES:])
            made += 1
    return made


class SwitchTable:
    """The table of one job at one switch."""

    def __init__(self, slots: int, children: int, first: int = 0) -> None:
        """
        Args:
            first: The sender number of child 0. The other children have the following numbers.
        """
        assert slots > 0 and 1 <= children <= MOST_CHILDREN
        self.children, self._first = children, first
        self.acked = 0  # the receiver of the sums has every sum with a smaller sequence number
        self.now = 0  # set by the owner, in ticks of any clock
        self._all = np.uint64((1 << children) - 1)
        self._slots = np.zeros(slots, SLOT)
        self._slots["number"] = _FREE
        self._sums = np.zeros((slots, PAYLOAD_NBYTES), np.uint8)
        self._counters = np.zeros(len(COUNTERS), np.int64)

    @property
    def slots(self) -> int:
        return self._slots.size

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + self._sums.nbytes + self._counters.nbytes

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of packets that were added, answered or dropped, by counter:

        added: added to a sum that is still incomplete.
        completed: added to a sum as its last packet.
        dropped_old: dropped, because its number is below the acknowledged number, or below the
            slot's number.
        repeated: dropped, because the sum already contains the packet.
        answered: answered with the sum, because the sum was already complete.
        mismatched: dropped, because its kind or width cannot be summed or differs from the sum's.
        """
        return dict(zip(COUNTERS, self._counters.tolist()))

    def add(self, run: np.ndarray, ok: np.ndarray, out: np.ndarray, child: int) -> int:
        """Sum GRADIENT and EXPONENTS packets. Complete sums are written to `out`, as whole packets
        without tags.

        Args:
            run: uint8, bulk packets.
            ok: bool, one per packet: whether to use the packet.
            out: uint8, at least as large as `run`.
            child: The sender number of this switch, which is written into the packets in `out`.

        Returns:
            The number of packets in `out`.
        """
        assert out.size >= run.size and ok.size == check_bulk(run)
        made: int = _add_packets(
            self._slots,
            self._sums,
            run,
            ok,
            out,
            np.uint16(child),
            self._first,
            self.children,
            self.acked,
            self.now,
            self._all,
            self._counters,
        )
        return made

    def snoop(self, ack: int) -> None:
        """Record that the receiver of the sums has all sums with packet numbers below `ack`."""
        self.acked = max(self.acked, ack)

    def stuck(self, older_than: int = 0) -> list[StuckSlot]:
        """List the incomplete sums whose first packet is at least `older_than` old (in the unit of
        the attribute `now`), sorted by packet number.
        """
        slots = self._slots
        partial = (slots["number"] >= self.acked) & (slots["seen"] != 0) & (slots["done"] == 0)
        found = slots[partial & (self.now - slots["began"] >= older_than)]
        return [
            StuckSlot(int(s["number"]), self._missing(int(s["seen"])), self.now - s["began"])
            for s in np.sort(found, order="number")
        ]

    def _missing(self, seen: int) -> tuple[int, ...]:
        return tuple(child for child in range(self.children) if not seen >> child & 1)

    def close(self) -> None:
        """Do nothing, because the table has no resources except memory."""

    def check(self) -> None:
        """Assert every invariant."""
        used = self._slots[self._slots["number"] != _FREE]
        places = np.flatnonzero(self._slots["number"] != _FREE)
        assert (used["number"] % self.slots == places).all()
        assert (used["seen"] != 0).all() and (used["seen"] <= self._all).all()
        assert ((used["done"] == 1) == (used["seen"] == self._all)).all()
        assert not self._slots["seen"][self._slots["number"] == _FREE].any()
