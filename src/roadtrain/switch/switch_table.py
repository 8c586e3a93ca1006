"""The table of a switch: packets of a window, added up over the switch's children.

    came (who is in the sum), number, done, payload      one slot for each number modulo `slots`

Sun et al. (LuWu), section 3.2.3, with the repair of resends that switch/protocol/switch.py
describes: a slot keeps its number and its sum until a greater number takes it, a packet below the
acknowledged number or the slot's is dropped, and one for a sum that is complete is answered with
it. So the sum of a number is made once, of one packet of each child, whatever is lost, doubled or
late.

GRADIENT payloads are added as integers of the packet's width, of EXPONENTS the greater bytes are
kept. Memory is that of the arrays, whatever comes. A new table is what a restarted switch has.
Assumes packets whose tag was verified. Does NOT verify, seal or lock: one thread calls it.
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
_FREE = -1  # the number of a slot that none took yet
_MOST_NUMBER = np.uint64((1 << 62) - 1)  # a greater one is no number of a session

SLOT = np.dtype(
    [
        ("number", "<i8"),  # or _FREE
        ("came", "<u8"),  # bit i: child i's packet is in the sum
        ("began", "<i8"),  # `now` of its first packet
        ("kind", "u1"),
        ("width", "u1"),
        ("done", "u1"),  # 1: all children's are
    ],
    align=True,
)
COUNTERS = ("added", "completed", "dropped_old", "repeated", "answered", "mismatched")
_ADDED, _COMPLETED, _OLD, _REPEATED, _ANSWERED, _MISMATCHED = range(len(COUNTERS))


@dataclass(frozen=True, slots=True)
class StuckSlot:
    """A number whose sum lacks packets."""

    number: int
    missing: tuple[int, ...]  # children whose packet has not come
    age: int  # ticks since its first packet


class Table(Protocol):
    """A job's table: SwitchTable, which describes the methods, or one outside this process."""

    now: int

    @property
    def counters(self) -> dict[str, int]: ...
    def add(self, run: np.ndarray, ok: np.ndarray, out: np.ndarray, child: int) -> int: ...
    def snoop(self, ack: int) -> None: ...
    def stuck(self, older_than: int = 0) -> list[StuckSlot]: ...
    def close(self) -> None: ...


class TableDevice(Protocol):
    """A network device that sums packets in place of this process (switch_command.py finds it)."""

    name: str
    mode: str  # for people: how it takes packets

    def table(self, hello: SwitchHello, port: int, key: PacketKey, parent: Address) -> Table:
        """A job's table. Raises RoadtrainError or OSError where the device cannot have it.

        Args:
            port: UDP port where the job's packets arrive
            parent: where sums go, in numbers
        """

    def close(self) -> None: ...


@kernel
def _add(payload: Any, total: Any) -> Any:
    for i in range(payload.size):
        total[i] += payload[i]


@kernel
def _greatest(payload: Any, total: Any) -> Any:
    for i in range(payload.size):
        total[i] = max(total[i], payload[i])


@kernel
def _combine(kind: Any, width: Any, payload: Any, total: Any) -> Any:
    if kind == _EXPONENTS:
        _greatest(payload, total)
    elif width == 4:
        _add(payload.view(np.int32), total.view(np.int32))
    elif width == 2:
        _add(payload.view(np.int16), total.view(np.int16))
    else:
        _add(payload.view(np.int8), total.view(np.int8))


@kernel
def _possible(header: Any, child: Any, children: Any) -> Any:
    """Whether a switch adds such packets."""
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
    """Which counter the packet belongs to; its payload is in the table then if to _ADDED or
    _COMPLETED."""
    number = np.int64(header.number)
    at = number % slots.size
    slot = slots[at]
    if number < acked or number < slot.number:
        return _OLD
    if number > slot.number:
        slot.number, slot.came, slot.done, slot.began = number, np.uint64(0), np.uint8(0), now
        slot.kind, slot.width = header.kind, header.width
    if slot.kind != header.kind or slot.width != header.width:
        return _MISMATCHED
    if slot.done:
        return _ANSWERED
    if slot.came & bit:
        return _REPEATED
    if slot.came == 0:
        copy_bytes(payload, sums[at])
    else:
        _combine(slot.kind, slot.width, payload, sums[at])
    slot.came |= bit
    if slot.came != all_bits:
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
    """Of one job at one switch.

    Invariants (`check`): a slot's number is the slot's modulo `slots`; done means that the bits of
    all children are set; a slot that a number took has a bit; `acked` never falls.
    """

    def __init__(self, slots: int, children: int, first: int = 0) -> None:
        """`first`: what child 0 calls itself in packets, the next child one more."""
        assert slots > 0 and 1 <= children <= MOST_CHILDREN
        self.children, self._first = children, first
        self.acked = 0  # the receiver of the sums has all below it
        self.now = 0  # ticks of any clock, which the owner sets
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
        """Packets by what became of them. added: into a sum that others are missing of; completed:
        the last of a sum; dropped_old: below what is acknowledged, or whose slot has a greater
        number; repeated: in the sum already; answered: with the complete sum; mismatched: not of
        the slot's kind and width, or none that can be added."""
        return dict(zip(COUNTERS, self._counters.tolist()))

    def add(self, run: np.ndarray, ok: np.ndarray, out: np.ndarray, child: int) -> int:
        """Take GRADIENT and EXPONENTS packets, of the senders that their headers name. Complete
        sums, and answers to what came again, go to `out` as whole packets of sender `child`,
        without tags; returns how many. run: uint8, bulk packets; ok: bool, one a packet, which of
        them to take; out: uint8 with room for as many."""
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
        """The receiver of the sums has all numbers below `ack`."""
        self.acked = max(self.acked, ack)

    def stuck(self, older_than: int = 0) -> list[StuckSlot]:
        """Sums that lack packets and began at least so many ticks before `now`, by number."""
        slots = self._slots
        partial = (slots["number"] >= self.acked) & (slots["came"] != 0) & (slots["done"] == 0)
        found = slots[partial & (self.now - slots["began"] >= older_than)]
        return [
            StuckSlot(int(one["number"]), self._missing(int(one["came"])), self.now - one["began"])
            for one in np.sort(found, order="number")
        ]

    def _missing(self, came: int) -> tuple[int, ...]:
        return tuple(child for child in range(self.children) if not came >> child & 1)

    def close(self) -> None:
        """Nothing is held outside this process's memory."""

    def check(self) -> None:
        """Assert every invariant."""
        taken = self._slots[self._slots["number"] != _FREE]
        places = np.flatnonzero(self._slots["number"] != _FREE)
        assert (taken["number"] % self.slots == places).all()
        assert (taken["came"] != 0).all() and (taken["came"] <= self._all).all()
        assert ((taken["done"] == 1) == (taken["came"] == self._all)).all()
        assert not self._slots["came"][self._slots["number"] == _FREE].any()
