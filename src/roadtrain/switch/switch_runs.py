"""Runs: what has come to a socket, as runs of packets of one length, so that few calls do for many.

The kernel joins packets of one sender only, and not on every device. Bulk packets are gathered here
whoever sent them; a packet of another length (a heartbeat) ends a run and is one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roadtrain.switch.datagrams import RECEIVE_NBYTES, DatagramSocket
from roadtrain.switch.packets import PACKET_NBYTES
from roadtrain.transport.tcp import Address

FULL = 132  # packets after which no more are gathered
MOST = FULL + RECEIVE_NBYTES // PACKET_NBYTES  # packets of a run
READ_NBYTES = FULL * PACKET_NBYTES + RECEIVE_NBYTES


@dataclass(frozen=True, slots=True)
class SwitchRun:
    buffer: np.ndarray  # uint8; packet i begins at i * segment
    segment: int  # bytes of a packet
    sources: list[Address]  # who sent it, one a packet

    @property
    def count(self) -> int:
        return len(self.sources)


def read_runs(socket: DatagramSocket, memory: np.ndarray) -> list[SwitchRun]:
    """What has come, without waiting: none, or one run of bulk packets, and what ended it. memory:
    uint8 [READ_NBYTES], that they lie in."""
    bulk, odd = list[Address](), list[SwitchRun]()
    while not odd and len(bulk) < FULL:
        at = len(bulk) * PACKET_NBYTES
        found = socket.receive(memory[at : at + RECEIVE_NBYTES], 0.0)
        if found is None:
            break
        nbytes, segment, source = found
        whole = nbytes // PACKET_NBYTES if segment == PACKET_NBYTES else 0
        bulk += [source] * whole
        if whole * PACKET_NBYTES < nbytes or not nbytes:
            odd = _split(memory[at + whole * PACKET_NBYTES : at + nbytes], segment, source)
    gathered = SwitchRun(memory[: len(bulk) * PACKET_NBYTES], PACKET_NBYTES, bulk)
    return [gathered, *odd] if bulk else odd


def _split(rest: np.ndarray, segment: int, source: Address) -> list[SwitchRun]:
    """The kernel may join a shorter packet to a run of longer ones."""
    whole = rest.size // segment if segment else 0
    runs = [SwitchRun(rest[: whole * segment], segment, [source] * whole)] if whole else []
    if rest.size > whole * segment or not whole:
        last = rest[whole * segment :]
        runs.append(SwitchRun(last, last.size, [source]))
    return runs
