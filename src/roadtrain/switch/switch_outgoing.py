"""SwitchOutgoing: what a switch sends for one job, without ever waiting.

The kernel takes no more of a job whose links are slower than what comes for it. What is left over
waits here, the job is not read meanwhile (so it fills its own socket, nobody else's), and goes when
the kernel has room again; what waits for longer than WAIT_S is lost, like a packet in a full queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.transport.tcp import Address

WAIT_S = 1.0


class SwitchOutgoing:
    """Of one thread. Invariant: what waits is in the order in which it was to be sent; of each run
    somebody is left that it goes to."""

    def __init__(self, socket: DatagramSocket) -> None:
        self._socket = socket
        self._left: deque[tuple[np.ndarray, int, Sequence[Address]]] = deque()
        self._since = 0.0  # when the first of them began to wait
        self.sent = 0  # packets
        self.given_up = 0  # packets that waited for too long

    @property
    def waits(self) -> bool:
        return bool(self._left)

    def send(self, packets: np.ndarray, segment: int, to: Sequence[Address]) -> None:
        """A run of packets of `segment` bytes, to each of `to`. packets: uint8, its owner's again
        when this returns."""
        gone = 0 if self._left else self._send(packets, segment, to)
        if gone == len(to):
            return
        if not self._left:
            self._since = time.monotonic()
        self._left.append((packets.copy(), segment, to[gone:]))

    def go_on(self) -> None:
        """Send of what waits as much as the kernel takes."""
        while self._left:
            packets, segment, to = self._left.popleft()
            gone = self._send(packets, segment, to)
            if gone < len(to):
                self._left.appendleft((packets, segment, to[gone:]))
                break
            self._since = time.monotonic()
        if self._left and time.monotonic() - self._since > WAIT_S:
            self.given_up += sum(_count(run, each) * len(to) for run, each, to in self._left)
            self._left.clear()

    def _send(self, packets: np.ndarray, segment: int, to: Sequence[Address]) -> int:
        """To how many of `to` it went."""
        for i, address in enumerate(to):
            if not self._socket.has_room():
                return i
            self._socket.send(packets, segment, address)
            self.sent += _count(packets, segment)
        return len(to)


def _count(packets: np.ndarray, segment: int) -> int:
    return int(packets.size // segment)
