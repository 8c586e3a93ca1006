"""Children: where a switch's children are, what they have, and who of them is silent.

A child is a worker, or a switch below with all its workers. Where it is, is learned from its
heartbeats, whose tags were verified. One that was recorded and comes again from elsewhere moves a
child's address only where it says more than the child did, or the child has been silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from roadtrain.switch.protocol.numbered import NOTHING, Heartbeat, heard
from roadtrain.switch.protocol.switch import SwitchStateMachine
from roadtrain.transport.tcp import Address

SILENT_S = 1.0  # after which a child is named
UNKNOWN_RANK = 0xFFFFFFFF  # in a heartbeat: the most silent child was never heard
MOST_MS = 0xFFFFFFFF


@dataclass(slots=True)
class Child:
    number: int
    heard: float  # when its last heartbeat came; before the first: when the job began
    address: Address | None = None  # where its datagrams go
    rank: int = UNKNOWN_RANK  # of the most silent worker below it, as it said last
    below_ms: int = 0  # how long that one had been silent then
    named: bool = False  # as silent, and not heard since

    def silent_ms(self, now: float) -> int:
        """Of the most silent worker below it, or of itself."""
        return min(int((now - self.heard) * 1000) + self.below_ms, MOST_MS)

    def __str__(self) -> str:
        """For people."""
        where = "never heard" if self.address is None else "{}:{}".format(*self.address)
        worker = "" if self.rank == UNKNOWN_RANK else f"worker {self.rank}, "
        return f"child {self.number} ({worker}{where})"


class Children:
    """What they have is the machine's. Invariants: `addresses` are those of all children whose
    address is known, each once; `merged` is what all have, NOTHING before all have spoken."""

    def __init__(self, machine: SwitchStateMachine, now: float) -> None:
        self._machine = machine
        self.all = [Child(number, now) for number in range(machine.children)]
        self.addresses: list[Address] = []
        self.merged = NOTHING

    def heard(
        self, number: int, beat: Heartbeat, source: Address, below: tuple[int, int], now: float
    ) -> bool:
        """A heartbeat of a child came. below: milliseconds and rank of the most silent worker that
        it speaks for. Returns whether it counts."""
        child, before = self.all[number], self._machine.beats.get(number)
        if source != child.address:
            news = before is None or heard(before, beat) != before
            if not news and now - child.heard <= SILENT_S:
                return False
            child.address = source
            found = [one.address for one in self.all if one.address is not None]
            self.addresses = list(dict.fromkeys(found))
        self.merged = self._machine.child_beat(number, beat) or self.merged
        child.heard, (child.below_ms, child.rank) = now, below
        return True

    def most_silent(self, now: float) -> tuple[int, int]:
        """Milliseconds and rank."""
        child = max(self.all, key=lambda one: one.silent_ms(now))
        return child.silent_ms(now), child.rank

    def silent(self, now: float) -> list[tuple[Child, float]]:
        """Children that have been silent for more than SILENT_S, or speak for a worker that has,
        and for how many seconds."""
        found = [(one, one.silent_ms(now) / 1000) for one in self.all]
        return [(one, seconds) for one, seconds in found if seconds > SILENT_S]
