"""Measure the processor time that fan-in packets take on this machine, over loopback and with the
real threads. In the lab all hosts share the processors, so a step takes at least this time for all
its packets.

Does NOT include the lab's own devices (virtual links, bridges, rates).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from roadtrain.switch import fixed_point, packets
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.packets import BLOCK, PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey
from roadtrain.switch.protocol.numbered import Heartbeat
from roadtrain.switch.streams import RUN, Batch, PacketPort, PacketSender
from roadtrain.switch.switch_table import SwitchTable

COUNT, WARM_UP = 400 * RUN, 40 * RUN  # packets
WINDOW = 1024
JOB, BUFFER, WAIT_S = 1, 4 << 20, 60.0


@dataclass(frozen=True)
class PacketSeconds:
    """Processor seconds per packet, including the time in the kernel."""

    across: float  # quantize from fp32, seal and send; receive, verify and keep
    add: float  # add to a sum of two children


FREE = PacketSeconds(0.0, 0.0)  # for predictions where processors are no limit


@cache
def packet_seconds() -> PacketSeconds:
    return PacketSeconds(_across(), _add())


def _across() -> float:
    stream = _Stream()
    try:
        stream.run(WARM_UP)
        begin = time.process_time()
        stream.run(WARM_UP + COUNT)
        return (time.process_time() - begin) / COUNT
    finally:
        stream.close()


class _Stream:
    """A stream of packets over loopback, from a sender to a receiver."""

    def __init__(self) -> None:
        self.key = PacketKey.derive(None, bytes(16))
        self.sockets = [
            DatagramSocket(("127.0.0.1", 0), receive_nbytes=BUFFER, send_nbytes=BUFFER)
            for _ in "ab"
        ]
        self.values = np.random.default_rng(0).standard_normal(RUN * BLOCK).astype(np.float32)
        self.maxima = np.zeros(RUN, np.uint8)
        fixed_point.exponents(self.values, "fp32", self.maxima)
        self.kept = np.zeros(RUN * PAYLOAD_NBYTES, np.uint8)
        self.received, self.changed = 0, threading.Condition()
        receiver, sender = self.sockets
        self.port = PacketPort(
            [receiver], self.key, JOB, {Kind.GRADIENT: self._take}, _failed, name="receive"
        )
        self.sender = PacketSender(sender, receiver.address, self._fill, _failed, name="send")
        self.port.start()
        self.sender.start()
        self.sender.heartbeat(Heartbeat(0, WINDOW - 1))

    def run(self, below: int) -> None:
        """Send packets, and wait until all packets with numbers less than `below` have arrived."""
        self.sender.may_send(below)
        with self.changed:
            done = self.changed.wait_for(lambda: self.received >= below, WAIT_S)
            assert done, f"{self.received} of {below} packets arrived over loopback"

    def _fill(self, first: int, count: int, staging: np.ndarray) -> int:
        packets.write_headers(
            staging, PACKET_NBYTES, count, kind=Kind.GRADIENT, job=JOB, first=first, width=4
        )
        run = staging[: count * PACKET_NBYTES]
        fixed_point.quantize(self.values, "fp32", self.maxima, 2, 4, 0, run)
        packets.seal(staging, PACKET_NBYTES, count, self.key)
        return count

    def _take(self, batch: Batch) -> None:
        index = batch.headers["c"].astype(np.uint32)
        packets.copy_out(batch.buffer, batch.ok, index, self.kept)
        with self.changed:
            self.received = max(self.received, int(batch.numbers.max()) + 1)
            self.changed.notify_all()
        self.sender.heartbeat(Heartbeat(self.received, self.received + WINDOW - 1))

    def close(self) -> None:
        self.sender.close()
        self.port.close()
        for sock in self.sockets:
            sock.close()


def _failed(error: BaseException) -> None:
    raise error


def _add() -> float:
    table, ok = SwitchTable(2048, 2), np.ones(RUN, bool)
    buffer, sums = (np.zeros(RUN * PACKET_NBYTES, np.uint8) for _ in "ab")
    begin = 0.0
    for number in range(0, COUNT, RUN):
        if number == WARM_UP:
            begin = time.process_time()
        packets.write_headers(
            buffer, PACKET_NBYTES, RUN, kind=Kind.GRADIENT, job=JOB, first=number, width=4
        )
        table.add(buffer, ok, sums, 0)
    return (time.process_time() - begin) / (COUNT - WARM_UP)


def lab_seconds(workers: int, racks: int, up: float, down: float, costs: PacketSeconds) -> float:
    """Compute the processor seconds of a step for all hosts of the lab together. `up`: packets that
    a worker sends in a step. `down`: packets that each worker receives in a step.
    """
    switches = 1 if racks == 1 else racks + 1
    crossings = up * (workers + switches) + down * workers
    return crossings * costs.across + up * (workers + switches - 1) * costs.add
