"""Item `rate` of `fanin`: measure the packets a second of a user-space switch on one core, in
memory and over loopback, and the memory of a switch with 1,000 stuck slots. In a stuck slot, the
packet of one child is missing.

Only the work of the switch is timed: receive, verify, add, seal and send. Over loopback, the switch
is compared with a plain forwarder.
"""

from __future__ import annotations

import time

import numpy as np
import psutil

from benchmarks.common.report import Row
from roadtrain.switch import packets
from roadtrain.switch.datagrams import RECEIVE_NBYTES, DatagramSocket
from roadtrain.switch.packets import PACKET_NBYTES, Kind, PacketKey
from roadtrain.switch.switch_table import SwitchTable
from roadtrain.units import MIB

KEY, JOB, CHILDREN, SLOTS, RUN = PacketKey.derive(b"benchmark", bytes(16)), 1, 2, 2048, 44
STUCK, WAIT_S = 1000, 1.0


class Ends:
    """The packets of a switch's children, and the table to which the switch adds these packets."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.table = SwitchTable(SLOTS, CHILDREN)
        self.runs = rng.integers(0, 256, (CHILDREN, RUN * PACKET_NBYTES), np.uint8)
        self.out = np.zeros(RECEIVE_NBYTES, np.uint8)
        self.number = 0

    def seal(self) -> None:
        """Build the next packets of each child, with headers and checksums."""
        for child, run in enumerate(self.runs):
            packets.write_headers(
                run,
                PACKET_NBYTES,
                RUN,
                kind=Kind.GRADIENT,
                job=JOB,
                first=self.number,
                sender=child,
                width=4,
            )
            packets.seal(run, PACKET_NBYTES, RUN, KEY)
        self.number += RUN

    def add(self, run: np.ndarray) -> int:
        """Verify and add the received packets in `run`, and return the number of sums in `out`."""
        count = run.size // PACKET_NBYTES
        right = packets.verify(run, PACKET_NBYTES, count, KEY, JOB)
        made = self.table.add(run, right, self.out, 0)
        packets.seal(self.out, PACKET_NBYTES, made, KEY)
        return made


def in_memory(seconds: float) -> float:
    """Measure the packets a second that a switch adds to its table, without sockets."""
    ends, accepted, spent = Ends(), 0, 0.0
    for warm in (True, False):
        accepted, spent = 0, 0.0
        while spent < (0.1 if warm else seconds):
            ends.seal()
            begin = time.perf_counter()
            made = sum(ends.add(run) for run in ends.runs)
            spent += time.perf_counter() - begin
            accepted += CHILDREN * RUN
            assert made == RUN, f"{made} sums of {RUN}"
    return accepted / spent


def over_loopback(seconds: float, *, sums: bool) -> float:
    """Measure the packets a second that arrive at the switch over loopback. If `sums` is False, the
    switch only forwards packets.
    """
    sockets = [
        DatagramSocket(("127.0.0.1", 0), receive_nbytes=4 * MIB, send_nbytes=4 * MIB)
        for _ in range(2)
    ]
    end, switch = sockets
    into, ends = np.zeros(RECEIVE_NBYTES, np.uint8), Ends()
    received, spent = 0, 0.0
    for warm in (True, False):
        received, spent = 0, 0.0
        while spent < (0.1 if warm else seconds):
            ends.seal()
            sent = 0
            for run in ends.runs:
                end.send(run, PACKET_NBYTES, switch.address)
                begin = time.perf_counter()
                sent += _pass_on(switch, end, into, ends if sums else None)
                spent += time.perf_counter() - begin
            received += CHILDREN * RUN
            _take(end, into, sent)
    for sock in sockets:
        sock.close()
    return received / spent


def _pass_on(
    switch: DatagramSocket, end: DatagramSocket, into: np.ndarray, ends: Ends | None
) -> int:
    """Receive the packets of one child at the switch, and send their sums to `end`. If `ends` is
    None, send the packets themselves. Returns the number of packets sent.
    """
    left, sent = RUN, 0
    while left:
        found = switch.receive(into, WAIT_S)
        assert found is not None, f"{left} packets did not arrive over loopback"
        run = into[: found[0]]
        left -= run.size // PACKET_NBYTES
        made = run.size // PACKET_NBYTES if ends is None else ends.add(run)
        if made:
            out = run if ends is None else ends.out[: made * PACKET_NBYTES]
            switch.send(out, PACKET_NBYTES, end.address)
        sent += made
    return sent


def _take(end: DatagramSocket, into: np.ndarray, count: int) -> None:
    while count:
        found = end.receive(into, WAIT_S)
        assert found is not None, f"{count} packets did not return over loopback"
        count -= found[0] // PACKET_NBYTES


def stuck() -> tuple[int, int]:
    """Measure the memory of a switch in which the same 1,000 slots get stuck again and again.
    Memory must not grow.

    Returns (bytes by which the memory of the process grew, bytes of the table).
    """
    ends = Ends()
    process, before = psutil.Process(), 0
    for _ in range(20):
        ends.number = 0
        while ends.number < STUCK:
            ends.seal()
            ends.add(ends.runs[0])
        before = before or process.memory_info().rss
    assert len(ends.table.stuck(0)) >= STUCK, f"{len(ends.table.stuck(0))} slots are stuck"
    return process.memory_info().rss - before, ends.table.nbytes


def rows(quick: bool) -> list[Row]:
    seconds = 0.3 if quick else 2.0
    summed, forwarded = (over_loopback(seconds, sums=sums) for sums in (True, False))
    grown, table = stuck()
    case, unit, peer = "a switch in one core", "packets/s", "a plain forwarder"
    return [
        Row(case, "user space, in memory", unit, in_memory(seconds), *[None] * 6),
        Row(
            case,
            "user space, over loopback",
            unit,
            summed,
            forwarded,
            peer,
            summed / forwarded,
            None,
            None,
            None,
        ),
        Row(
            f"{STUCK} stuck slots",
            "memory that grows",
            "bytes",
            grown,
            table,
            "the table",
            None,
            None,
            "at most 1 MiB",
            grown <= MIB,
        ),
    ]
