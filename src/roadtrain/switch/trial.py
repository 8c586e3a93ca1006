"""Trial of IP multicast, to find out whether the network itself can copy packets to all
participants.

Trial packets are sent to a multicast group of the job. Each participant reports over TCP whether it
has received one within a second. If any participant has not, the switches copy instead.
"""

from __future__ import annotations

import ipaddress

import numpy as np

from roadtrain.switch import packets
from roadtrain.switch.packets import PACKET_NBYTES, Kind, PacketKey
from roadtrain.transport.tcp import Address

EVERY_S = 0.05  # interval between two packets
ANSWERS_S = 5.0  # timeout for all answers, after the last invitation; each takes 1 s
PORTS = range(20000, 32000)  # below the ephemeral ports of hosts


def group_of(job: int, home: str) -> Address | None:
    """Choose a multicast group in 239.192.0.0/14, which is for private use (RFC 2365), or None if
    `home` is an IPv6 address.

    `home` is this host's address towards the switch.
    """
    if ipaddress.ip_address(home.partition("%")[0]).version != 4:
        return None
    host = ipaddress.ip_address("239.192.0.0") + job % (1 << 18)
    return str(host), PORTS[job % len(PORTS)]


def packet_of(job: int, key: PacketKey) -> np.ndarray:
    """Make a trial packet, with its tag, as long as a packet of parameters: uint8 [1456]."""
    packet = np.zeros(PACKET_NBYTES, np.uint8)
    packets.write_headers(packet, PACKET_NBYTES, 1, kind=Kind.TRIAL, job=job, first=0)
    packets.seal(packet, PACKET_NBYTES, 1, key)
    return packet


class MulticastTrial:
    """The state of one trial."""

    def __init__(self, participants: int) -> None:
        self._participants = participants
        self._invited: set[int] = set()
        self._answers: dict[int, bool] = {}  # rank -> whether a packet reached it
        self._all_invited: float | None = None  # the time of the last invitation
        self._next = 0.0  # when the next packet is due

    def invite(self, rank: int, now: float) -> None:
        self._invited.add(rank)
        if len(self._invited) == self._participants:
            self._all_invited = now

    def answered(self, rank: int, reached: bool) -> None:
        if rank in self._invited:
            self._answers[rank] = reached

    def due(self, now: float) -> bool:
        """Return whether to send a trial packet now."""
        if not self._invited or now < self._next:
            return False
        self._next = now + EVERY_S
        return True

    def verdict(self, now: float) -> bool | None:
        """Return whether multicast reaches all participants; None while answers are missing."""
        if not all(self._answers.values()):
            return False
        if len(self._answers) == self._participants:
            return True
        late = self._all_invited is not None and now - self._all_invited > ANSWERS_S
        return False if late else None

    def __str__(self) -> str:
        return f"the trial reached {sum(self._answers.values())} of {self._participants}"
