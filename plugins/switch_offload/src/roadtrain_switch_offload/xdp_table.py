"""A job's table in the kernel, as user space sees it. xdp_switch.bpf.c is the other side; the
records here are its structs.

Does NOT load or attach the program (xdp.py).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roadtrain.errors import ConfigError, LostError, WireError
from roadtrain.switch.options import MOST_CHILDREN
from roadtrain.switch.packets import PACKET_NBYTES, PAYLOAD_NBYTES, PacketKey, check_bulk
from roadtrain.switch.switch_table import COUNTERS, StuckSlot
from roadtrain.transport.tcp import Address
from roadtrain_switch_offload.bpf_object import BpfError, BpfObject
from roadtrain_switch_offload.next_hop import hardware_address, ipv4, neighbour, next_hop

MOST_JOBS = 64  # of a device
LOOK_S = 1.0  # between two looks for the parent's hardware address
XDP_DROP, XDP_PASS, XDP_TX = 1, 2, 3
UDP_HEADER = struct.Struct("!HHHH")  # source and destination port, bytes, checksum

JOB = np.dtype(
    [
        ("job", "<u4"),
        ("slots", "<u4"),
        ("live", "<u4"),
        ("children", "<u2"),
        ("child", "<u2"),
        ("parent_host", "S4"),
        ("parent_port", ">u2"),
        ("first", "<u2"),
        ("sip", "<u8", 2),
        ("words", "<u8", (PACKET_NBYTES - 8) // 8 + 1),
    ]
)
LIVE = np.dtype(
    [
        ("acked", "<u8"),
        ("now", "<u8"),
        *((name, "<u8") for name in COUNTERS),
        ("handed_up", "<u8"),
        ("found", "<u4"),
        ("parent", "u1", 6),
        ("own", "u1", 6),
    ]
)
ENTRY = np.dtype(
    [
        ("lock", "<u4"),
        ("done", "u1"),
        ("kind", "u1"),
        ("width", "u1"),
        ("unused", "u1"),
        ("number", "<u8"),
        ("came", "<u8"),
        ("began", "<u8"),
        ("payload", "u1", PAYLOAD_NBYTES),
    ]
)


@dataclass(frozen=True)
class XdpJob:
    """What the program is told of a job. Raises ConfigError for children that one word cannot name,
    and for less than one slot."""

    job: int  # of the packets
    port: int  # UDP, where this job's datagrams come
    children: int
    child: int  # this switch's number at its parent
    slots: int
    key: PacketKey
    parent: Address  # where sums go
    live: int  # its place in the map of what changes
    first: int = 0  # what child 0 calls itself in packets

    def __post_init__(self) -> None:
        if self.slots < 1 or not 1 <= self.children <= MOST_CHILDREN:
            raise ConfigError(
                f"a switch's table of {self.slots} slots for {self.children} children",
                hint=f"at least 1 slot, 1 to {MOST_CHILDREN} children",
            )

    def record(self) -> bytes:
        one = np.zeros(1, JOB)
        one["job"], one["slots"], one["live"] = self.job, self.slots, self.live
        one["children"], one["child"] = self.children, self.child
        # bytes that end in 0 are cut by numpy and come back as zeros: the same bytes
        one["parent_host"] = socket.inet_aton(ipv4(self.parent[0]))
        one["parent_port"], one["first"] = self.parent[1], self.first
        one["sip"], one["words"] = self.key.sip, self.key.words
        return one.tobytes()


class XdpTable:
    """Of one job; what SwitchTable does, and who is sent what is the kernel's. One thread calls it.

    `now`: ticks of any clock, which the owner sets.
    """

    def __init__(
        self,
        program: BpfObject,
        device: str,
        job: XdpJob,
        live: np.ndarray,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """live: LIVE [1], the element `job.live` of the program's map; closed: called once."""
        self.job = job
        self.children, self.slots = job.children, job.slots
        self._program, self._device, self._live, self._closed = program, device, live, closed
        self._live[:] = 0
        self._frame = np.zeros(UDP_HEADER.size + PACKET_NBYTES, np.uint8)
        header = UDP_HEADER.pack(0, job.port, self._frame.size, 0)
        self._frame[: UDP_HEADER.size] = np.frombuffer(header, np.uint8)
        self._add = program.prepared(program.program("add_packet"), self._frame)
        self._next_hop = next_hop(job.parent[0], device)
        self.look()
        self._table: int | None = self._begin()  # last: what fails before leaves nothing there

    def _begin(self) -> int:
        """The table's descriptor, once the program takes the job's packets."""
        table = self._program.array_like("table_pattern", ENTRY.itemsize, self.slots)
        try:
            self._program.update("tables", self.job.port, struct.pack("=I", table))
            self._program.update("jobs", self.job.port, self.job.record())
        except BpfError:
            os.close(table)
            raise
        return table

    @property
    def nbytes(self) -> int:
        """Of the kernel's memory."""
        return self.slots * ENTRY.itemsize + JOB.itemsize + LIVE.itemsize

    @property
    def acked(self) -> int:
        return int(self._live["acked"][0])

    @property
    def now(self) -> int:
        return int(self._live["now"][0])

    @now.setter
    def now(self, ticks: int) -> None:
        self._live["now"] = ticks

    @property
    def counters(self) -> dict[str, int]:
        """SwitchTable's, of what the kernel and `add` took together, and `handed_up`: sums that the
        kernel left for user space to send."""
        return {name: int(self._live[name][0]) for name in (*COUNTERS, "handed_up")}

    def add(self, run: np.ndarray, ok: np.ndarray, out: np.ndarray, child: int) -> int:
        """SwitchTable.add, for what has come past the program. Raises LostError after `close`."""
        count = check_bulk(run)
        if self._table is None:
            raise LostError(f"the table of job {self.job.job} on {self._device} is closed")
        if child != self.job.child or out.size < count * PACKET_NBYTES or ok.size < count:
            raise WireError(
                f"{count} packets of child {child} into a buffer of {out.size} bytes; the table is"
                f" its parent's child {self.job.child}"
            )
        made, packet = 0, self._frame[UDP_HEADER.size :]
        for i in np.flatnonzero(ok[:count]):
            packet[:] = run[i * PACKET_NBYTES : (i + 1) * PACKET_NBYTES]
            if self._add()[0] == XDP_TX:
                out[made * PACKET_NBYTES : (made + 1) * PACKET_NBYTES] = packet
                made += 1
        return made

    def snoop(self, ack: int) -> None:
        """The receiver of the sums has all numbers below `ack`."""
        if ack > self.acked:
            self._live["acked"] = ack
        if time.monotonic() - self._looked_s > LOOK_S:
            self.look()

    def look(self) -> None:
        """For the parent's hardware address: without it user space sends the sums."""
        self._looked_s = time.monotonic()
        parent = neighbour(self._next_hop, self._device) if self._next_hop else None
        if parent is None:
            self._live["found"] = 0
            return
        if not self._live["found"][0] or bytes(self._live["parent"][0]) != parent:
            self._live["found"] = 0
            self._live["parent"] = np.frombuffer(parent, np.uint8)
            self._live["own"] = np.frombuffer(hardware_address(self._device), np.uint8)
            self._live["found"] = 1

    def stuck(self, older_than: int = 0) -> list[StuckSlot]:
        """Sums that lack packets and began at least so many ticks before `now`, by number."""
        assert self._table is not None, "closed"
        found: list[StuckSlot] = []
        for some in self._program.elements(self._table, ENTRY, self.slots):
            partial = (some["number"] >= self.acked) & (some["came"] != 0) & (some["done"] == 0)
            for one in some[["number", "came", "began"]][partial]:
                number, came, began = one.tolist()
                if self.now - began >= older_than:
                    missing = (child for child in range(self.children) if not came >> child & 1)
                    found.append(StuckSlot(number, tuple(missing), self.now - began))
        return sorted(found, key=lambda one: one.number)

    def close(self) -> None:
        """The kernel forgets the job: its packets go to user space from now on."""
        if self._table is None:
            return
        self._program.delete("jobs", self.job.port)
        self._program.delete("tables", self.job.port)
        os.close(self._table)
        self._table = None
        self._closed()
