"""Detection of stragglers: the participant or switch of a fan-in that all others wait for. A
straggler is named within two seconds (Rule 5). Has no threads and no clock.

    heartbeats of the root     name the participant that has been silent for longest; this
                               participant is late after 1 s of silence (at the start: 5 s)
    no heartbeat of the root   after 1 s without a heartbeat, the root switch itself is late
    frames over TCP            a participant is late if the others have waited more than 1.5 s for
                               its frame about a chunk
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from datetime import UTC, datetime

from roadtrain.switch.protocol.chunk_queue import LateWorker

SILENT_S = 1.0  # most time without a packet; a participant sends at least two packets per second
STARTUP_S = 5.0  # most time until a worker's first packet; it loads compiled kernels before
LATE_S = 1.5  # most time that a participant may be behind the others
# Used in place of a rank:
ROOT = -1  # the root switch
UNKNOWN = -2  # a worker that has not sent any packet, so that its rank is unknown


class Lateness:
    """Names the stragglers. `root` is the address of the root switch. `named` maps the rank of each
    straggler to a text that says why the others wait.
    """

    def __init__(self, participants: int, root: str) -> None:
        self._participants, self._root = participants, root
        self.named: dict[int, str] = {}
        self._silent: tuple[int, float] | None = None  # rank, time of its last packet
        self._root_beat = 0.0  # time of the root's last heartbeat

    def heartbeat(self, silent_ms: int, rank: int, now: float) -> None:
        """Note a heartbeat of the root switch: worker `rank` has been silent for longest,
        `silent_ms` ms.
        """
        silent = rank if rank < self._participants else UNKNOWN
        self._root_beat, self._silent = now, (silent, now - silent_ms / 1000)

    def update(
        self, late: Sequence[LateWorker], now: float, left: Set[int], here: bool
    ) -> list[str]:
        """Find the stragglers. Returns messages about changes since the last call.

        Args:
            late: The workers that are behind with frames about a chunk.
            left: The ranks that have left.
            here: Whether all participants and switches are connected.
        """
        found = {rank: t for rank, t in self._find(late, now, here).items() if rank not in left}
        lines = [f"{self.name(rank)} {found[rank]}" for rank in found if rank not in self.named]
        back = self.named.keys() - found.keys() - left
        lines += [f"{self.name(rank)} is no longer late" for rank in sorted(back)]
        self.named = found
        return lines

    def name(self, rank: int) -> str:
        names = {
            ROOT: f"the root switch {self._root}",
            UNKNOWN: "a worker that has not reached any switch yet",
        }
        return names.get(rank, f"worker {rank}")

    def _find(self, late: Sequence[LateWorker], now: float, here: bool) -> dict[int, str]:
        found: dict[int, str] = {}
        if here:
            if self._root_beat == 0.0:
                self._root_beat = now
            if (for_s := now - self._root_beat) > SILENT_S:
                found[ROOT] = f"has sent no packet {since(for_s)}"
            elif self._silent is not None:
                rank, for_s = self._silent[0], now - self._silent[1]
                if for_s > (STARTUP_S if rank == UNKNOWN else SILENT_S):
                    found[rank] = f"has sent no packet {since(for_s)}"
        for entry in late:
            if now - entry.since > LATE_S and entry.worker not in found:
                late_for = since(now - entry.since)
                found[entry.worker] = (
                    f"has been behind the others with chunk {entry.chunk} {late_for}"
                )
        return found


def since(seconds: float) -> str:
    """Format a duration that ends now: "for 1.5 s (since 12:00:00 UTC)"."""
    return f"for {seconds:.1f} s (since {ago(seconds)})"


def ago(seconds: float) -> str:
    """Format the time of day `seconds` ago, by this host's clock."""
    return f"{datetime.fromtimestamp(time.time() - seconds, UTC):%H:%M:%S} UTC"
