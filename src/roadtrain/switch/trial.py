"""Trial: whether the network itself copies what is sent to all participants of a job. Packets of no
meaning go to a multicast group of the job's own; who hears one within a second says so over TCP.

    told (a participant knows the group) -> heard (it says whether) -> all: `verdict`

One that hears nothing is enough for the switches to copy instead. No threads; the caller's clock.
"""

from __future__ import annotations

import ipaddress

import numpy as np

from roadtrain.switch import packets
from roadtrain.switch.packets import PACKET_NBYTES, Kind, PacketKey
from roadtrain.transport.tcp import Address

EVERY_S = 0.05  # between two packets
ANSWERS_S = 5.0  # for all to answer, after the last was told; each answers 1 s after it joined
PORTS = range(20000, 32000)  # below those that hosts give to their own links


def group_of(job: int, home: str) -> Address | None:
    """In 239.192.0.0/14, what an organization uses as it likes (RFC 2365). None where this host
    reaches the switch by IPv6: the switches copy."""
    if ipaddress.ip_address(home.partition("%")[0]).version != 4:
        return None
    host = ipaddress.ip_address("239.192.0.0") + job % (1 << 18)
    return str(host), PORTS[job % len(PORTS)]


def packet_of(job: int, key: PacketKey) -> np.ndarray:
    """uint8 [PACKET_NBYTES], sealed: as long as the packets that are to follow."""
    packet = np.zeros(PACKET_NBYTES, np.uint8)
    packets.write_headers(packet, PACKET_NBYTES, 1, kind=Kind.TRIAL, job=job, first=0)
    packets.seal(packet, PACKET_NBYTES, 1, key)
    return packet


class MulticastTrial:
    """Invariant: who answered was told."""

    def __init__(self, participants: int) -> None:
        self._participants = participants
        self._told: set[int] = set()
        self._heard: dict[int, bool] = {}
        self._all_told: float | None = None  # when that was
        self._next = 0.0  # when the next packet is due

    def told(self, rank: int, now: float) -> None:
        self._told.add(rank)
        if len(self._told) == self._participants:
            self._all_told = now

    def heard(self, rank: int, came: bool) -> None:
        if rank in self._told:
            self._heard[rank] = came

    def due(self, now: float) -> bool:
        """Whether to send a packet now."""
        if not self._told or now < self._next:
            return False
        self._next = now + EVERY_S
        return True

    def verdict(self, now: float) -> bool | None:
        """Whether it reaches all; None while that is not known."""
        if not all(self._heard.values()):
            return False
        if len(self._heard) == self._participants:
            return True
        late = self._all_told is not None and now - self._all_told > ANSWERS_S
        return False if late else None

    def __str__(self) -> str:
        return f"the trial reached {sum(self._heard.values())} of {self._participants}"
