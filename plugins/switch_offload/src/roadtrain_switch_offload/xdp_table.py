"""The user-space side of a job's table in the kernel. xdp_switch.bpf.c is the kernel's side; the
numpy dtypes of this module mirror its structs. xdp.py loads and attaches the program."""

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

MOST_JOBS = 64  # most jobs of a device
LOOK_S = 1.0  # seconds between two lookups of the parent's hardware address
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
    """The parameters of a job for the kernel program. Raises ConfigError if there are no children,
    more than 64, or no slot."""

    job: int  # job number in packets
    port: int  # UDP port of this job's datagrams
    children: int
    child: int  # this switch's number at its parent
    slots: int
    key: PacketKey
    parent: Address  # destination of the sums
    live: int  # index of the job in the program's map `live`, which holds values that change
    first: int = 0  # number of child 0 in packets

    def __post_init__(self) -> None:
        if self.slots < 1 or not 1 <= self.children <= MOST_CHILDREN:
            raise ConfigError(
                f"a switch's table cannot have {self.slots} slots for {self.children} children",
                hint=f"use at least 1 slot and 1 to {MOST_CHILDREN} children",
            )

    def record(self) -> bytes:
        row = np.zeros(1, JOB)
        row["job"], row["slots"], row["live"] = self.job, self.slots, self.live
        row["children"], row["child"] = self.children, self.child
        # numpy strips trailing zero bytes of S4, but tobytes() restores them
        row["parent_host"] = socket.inet_aton(ipv4(self.parent[0]))
        row["parent_port"], row["first"] = self.parent[1], self.first
        row["sip"], row["words"] = self.key.sip, self.key.words
        return row.tobytes()


class XdpTable:
    """The table of one job in the kernel, with the interface of SwitchTable, but the kernel sends
    the sums. The owner sets `now`, the time in ticks of any clock. Not thread-safe."""

    def __init__(
        self,
        program: BpfObject,
        device: str,
        job: XdpJob,
        live: np.ndarray,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the table and register the job with the program.

        Args:
            program: The loaded program.
            device: Name of the network device.
            job: Parameters of the job.
            live: The values of this job that change, such as its counters: an array of one element,
                of
                dtype LIVE, that shares the memory of the kernel.
            closed: Called once, when the table is closed.
        """
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
        self._table: int | None = (
            self._begin()
        )  # done last, so that an earlier failure leaves nothing in the kernel

    def _begin(self) -> int:
        """Make the kernel's table and register the job. Return the descriptor of the table."""
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
        """The number of bytes of kernel memory that the table uses."""
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
        """The counters of SwitchTable, which include the packets that the kernel received.
        `handed_up`: the number of sums that the kernel left to user space to send."""
        return {name: int(self._live[name][0]) for name in (*COUNTERS, "handed_up")}

    def add(self, run: np.ndarray, ok: np.ndarray, out: np.ndarray, child: int) -> int:
        """Add packets that the program had passed to user space to the table in the kernel, like
        SwitchTable.add. Raises LostError after `close`."""
        count = check_bulk(run)
        if self._table is None:
            raise LostError(f"the table of job {self.job.job} on {self._device} is closed")
        if child != self.job.child or out.size < count * PACKET_NBYTES or ok.size < count:
            raise WireError(
                f"cannot add {count} packets. Required: at least {count * PACKET_NBYTES} bytes in"
                f" `out`, at least {count} elements in `ok`, and {self.job.child} as `child`."
                f" Given: {out.size} bytes, {ok.size} elements, and {child}"
            )
        made, packet = 0, self._frame[UDP_HEADER.size :]
        for i in np.flatnonzero(ok[:count]):
            packet[:] = run[i * PACKET_NBYTES : (i + 1) * PACKET_NBYTES]
            if self._add()[0] == XDP_TX:
                out[made * PACKET_NBYTES : (made + 1) * PACKET_NBYTES] = packet
                made += 1
        return made

    def snoop(self, ack: int) -> None:
        """Record that the receiver of the sums has all sums with packet numbers below `ack`."""
        if ack > self.acked:
            self._live["acked"] = ack
        if time.monotonic() - self._looked_s > LOOK_S:
            self.look()

    def look(self) -> None:
        """Look up the parent's hardware address. Until the address is known, user space must send
        the sums."""
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
        """Return the incomplete sums that began at least `older_than` ticks before `now`, sorted by
        packet number."""
        assert self._table is not None, "closed"
        found: list[StuckSlot] = []
        for some in self._program.elements(self._table, ENTRY, self.slots):
            partial = (some["number"] >= self.acked) & (some["came"] != 0) & (some["done"] == 0)
            for slot in some[["number", "came", "began"]][partial]:
                number, arrived, began = slot.tolist()
                if self.now - began >= older_than:
                    missing = (child for child in range(self.children) if not arrived >> child & 1)
                    found.append(StuckSlot(number, tuple(missing), self.now - began))
        return sorted(found, key=lambda slot: slot.number)

    def close(self) -> None:
        """Remove the job from the kernel. Packets that arrive later go to user space."""
        if self._table is None:
            return
        self._program.delete("jobs", self.job.port)
        self._program.delete("tables", self.job.port)
        os.close(self._table)
        self._table = None
        self._closed()
