"""Lateness: which participant of a fan-in all others wait for. One line when that begins, one when
it is over (Rule 5: it is named within two seconds). No threads; the caller's clock.

    packets of a heartbeat   a participant that the switches have not heard for SILENT_S
    nothing from the root    the switch itself
    words over TCP           one that has not said of a chunk what others have, for LATE_S
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from roadtrain.protocol.fan_in import LateWorker

SILENT_S = 1.0  # without packets; they come twice a second at least
UNHEARD_S = 5.0  # before its first packet: a host loads its kernels meanwhile
LATE_S = 1.5  # behind the others; looked at four times a second
# stand among the ranks of participants for
ROOT = -1  # the root switch
UNHEARD = -2  # somebody whom no switch has heard yet: nobody knows its rank


class Lateness:
    """`named`: rank -> what is said of it, of those that are late now."""

    def __init__(self, participants: int) -> None:
        self._participants = participants
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
        lines = [words for rank, words in found.items() if rank not in self.named]
        back = self.named.keys() - found.keys() - gone
        lines += [f"{_name(rank)} is not late any more" for rank in sorted(back)]
        self.named = found
        return lines

    def _found(self, late: Sequence[LateWorker], now: float, here: bool) -> dict[int, str]:
        found: dict[int, str] = {}
        if here:
            if self._heard == 0.0:
                self._heard = now
            if (for_s := now - self._heard) > SILENT_S:
                found[ROOT] = f"no packet has come from {_name(ROOT)} for {for_s:.1f} s"
            elif self._silent is not None:
                rank, for_s = self._silent[0], now - self._silent[1]
                if for_s > (UNHEARD_S if rank == UNHEARD else SILENT_S):
                    found[rank] = f"{_name(rank)} has sent no packet for {for_s:.1f} s"
        for one in late:
            if now - one.since > LATE_S and one.worker not in found:
                found[one.worker] = (
                    f"{_name(one.worker)} has said nothing of chunk {one.chunk} for"
                    f" {now - one.since:.1f} s, others have"
                )
        return found


def _name(rank: int) -> str:
    names = {ROOT: "the root switch", UNHEARD: "a worker that no switch has heard yet"}
    return names.get(rank, f"worker {rank}")
