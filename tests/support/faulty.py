"""Random faults for DatagramSocket: packets are lost, doubled, and overtaken by later ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.transport.tcp import Address

Packet = tuple[bytes, Address]  # and its destination


@dataclass
class RandomFaults:
    """Faults that hit each packet independently with these probabilities. An overtaken packet waits
    for the next packet to the same address. The faults follow from `seed` and the order of
    packets."""

    seed: int
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    lost: int = 0
    doubled: int = 0
    overtaken: int = 0
    _kept: dict[object, list[Packet]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def filter(self, packets: list[Packet]) -> list[Packet]:
        with self._lock:
            return [sent for packet in packets for sent in self._pass(packet)]

    def _pass(self, packet: Packet) -> list[Packet]:
        """Packets sent in place of this packet."""
        waiting = self._kept.pop(packet[1], [])
        if self._random.random() < self.loss:
            self.lost += 1
            return waiting
        copies = [packet]
        if self._random.random() < self.duplicate:
            self.doubled += 1
            copies.append(packet)
        if self._random.random() < self.reorder:
            self.overtaken += 1
            self._kept[packet[1]] = [copies.pop()]
        return copies + waiting


def faulty(socket: DatagramSocket, faults: RandomFaults | None) -> DatagramSocket:
    """Let the socket's outgoing packets pass through `faults`, if any. Returns the socket."""
    if faults is not None:
        send = socket.send

        def send_some(buffer, segment: int, to: Address) -> None:
            view = memoryview(buffer).cast("B")
            ones = [(bytes(view[at : at + segment]), to) for at in range(0, len(view), segment)]
            for run, each, far in _runs(faults.filter(ones)):
                send(memoryview(run), each, far)

        socket.send = send_some  # type: ignore[method-assign]
    return socket


def _runs(packets: list[Packet]) -> Iterator[tuple[bytes, int, Address]]:
    """(data, packet length, destination) of runs of adjacent packets with equal length and
    destination."""
    at = 0
    while at < len(packets):
        first, to = packets[at]
        end = at
        while end < len(packets) and packets[end][1] == to and len(packets[end][0]) == len(first):
            end += 1
        yield b"".join(data for data, _ in packets[at:end]), len(first), to
        at = end
