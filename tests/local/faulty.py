"""Random faults for DatagramSocket: packets are lost, doubled, and overtaken by later ones."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

from roadtrain.switch.datagrams import Packet


@dataclass
class RandomFaults:
    """Each packet has these chances on its own. A packet that is overtaken waits for the next to
    the same place. What is lost, doubled and overtaken follows from `seed` and the order of
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
            return [sent for packet in packets for sent in self._one(packet)]

    def _one(self, packet: Packet) -> list[Packet]:
        """What leaves in this packet's turn."""
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
