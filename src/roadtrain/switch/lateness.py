"""Lateness: which participant of a fan-in all others wait for. One line when that begins, one when
it is over (Rule 5: it is named within two seconds). No threads; the caller's clock.

    packets of a heartbeat   a participant that the switches have not heard for SILENT_S
    nothing from the root    the switch itself
    words over TCP           one that has not said of a chunk what others have, for LATE_S
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from datetime import UTC, datetime

from roadtrain.switch.protocol.chunk_queue import LateWorker

SILENT_S = 1.0  # without packets; they come twice a second at least
UNHEARD_S = 5.0  # before its first packet: a host loads its kernels meanwhile
LATE_S = 1.5  # behind the others; looked at four times a second
# stand among the ranks of participants for
ROOT = -1  # the root switch
UNHEARD = -2  # somebody whom no switch has heard yet: nobody knows its rank


class Lateness:
    """`root`: the address of the root switch. `named`: rank -> what it has not done, of those that
    are late now."""

    def __init__(self, participants: int, root: str) -> None:
        self._participants, self._root = participants, root
        self.named: dict[int, str] = {}
        self._silent: tuple[int, float] | None = None  # rank, when it was heard last
        self._heard = 0.0  # when the root was

    def heard(self, silent_ms: int, rank: int, now: float) -> None:
        """A heartbeat has come: `rank` is the most silent one, for so long."""
        known = rank if rank < self._participants else UNHEARD
        self._heard, self._silent = now, (known, now - silent_ms / 1000)

    def look(self, late: Sequence[LateWorker], now: float, gone: Set[int], here: bool) -> list[str]:
        """What is new, for people. `here`: all participants and switches are there."""
        found = self._found(late, now, here)
        found = {rank: words for rank, words in found.items() if rank not in gone}
        lines = [f"{self.name(rank)} {found[rank]}" for rank in found if rank not in self.named]
        back = self.named.keys() - found.keys() - gone
        lines += [f"{self.name(rank)} is not late any more" for rank in sorted(back)]
        self.named = found
        return lines

    def name(self, rank: int) -> str:
        """For people."""
        names = {
            ROOT: f"the root switch {self._root}",
            UNHEARD: "a worker that no switch has heard yet",
        }
        return names.get(rank, f"worker {rank}")

    def _found(self, late: Sequence[LateWorker], now: float, here: bool) -> dict[int, str]:
        found: dict[int, str] = {}
        if here:
            if self._heard == 0.0:
                self._heard = now
            if (for_s := now - self._heard) > SILENT_S:
                found[ROOT] = f"has sent no packet {since(for_s)}"
            elif self._silent is not None:
                rank, for_s = self._silent[0], now - self._silent[1]
                if for_s > (UNHEARD_S if rank == UNHEARD else SILENT_S):
                    found[rank] = f"has sent no packet {since(for_s)}"
        for one in late:
            if now - one.since > LATE_S and one.worker not in found:
                found[one.worker] = (
                    f"has said nothing of chunk {one.chunk} {since(now - one.since)}, others have"
                )
        return found


def since(seconds: float) -> str:
    """For people: for how long, and from when on."""
    return f"for {seconds:.1f} s (since {ago(seconds)})"


def ago(seconds: float) -> str:
    """For people: when that was, by this host's clock."""
    return f"{datetime.fromtimestamp(time.time() - seconds, UTC):%H:%M:%S} UTC"
