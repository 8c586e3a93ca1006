"""Spare hosts that come, go and die while workers sum: when all go on, and with which hosts.

    lost, offered, left --> Coordinator (at worker 0) -- Ask --> all workers: dial what is new,
    hold, say your rounds
                                                     <- state --
                                                     -- Change -> all workers: their Map, then go on

Summation pauses for one message there and back. A Change says of each tensor how far any worker had
begun, so that all workers agree where each part of each round goes (part_map.py). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Spares: TypeAlias = tuple[tuple[int, str, float], ...]  # number of the reducer, address, rate
Rounds: TypeAlias = dict[int, tuple[int, int]]


class AskRounds(NamedTuple):
    """To all workers: connect to what is new, begin no round, say your rounds."""

    number: int  # of the question
    added: Spares


@dataclass(frozen=True)
class Change:
    """To all workers: go on, by these reducers."""

    number: int  # of the question
    gone: tuple[int, ...]
    added: Spares
    # Tensor -> (the last round that any worker has begun, the first that any lacks the sum of).
    rounds: Rounds


MembershipAction: TypeAlias = AskRounds | Change


class MembershipStateMachine:
    def __init__(self, workers: int, spares: Spares) -> None:
        self.workers = workers
        # Number of a reducer -> its address and rate.
        self.spares = {number: (address, rate) for number, address, rate in spares}
        self.number = 0  # of the last question
        self._next_reducer = workers + len(spares)  # numbers are not used again
        self.asked: AskRounds | None = None  # the question that is not answered by all
        # Worker -> (its rounds, the new reducers it does not reach); only while something is asked.
        self.states: dict[int, tuple[Mapping[int, tuple[int, bool]], set[int]]] = {}
        self.lost: set[int] = set()  # of `spares`: to be left out by the next change
        self.offers: dict[str, float] = {}  # address -> rate, to be added by the next question

    def gone(self, reducer: int) -> list[MembershipAction]:
        """It died or is to leave."""
        if reducer in self.spares:
            self.lost.add(reducer)
        return self._ask()

    def offered(self, address: str, rate: float) -> list[MembershipAction]:
        if address not in {there for there, _ in self.spares.values()}:
            self.offers[address] = rate
        return self._ask()

    def state(
        self,
        worker: int,
        number: int,
        rounds: Mapping[int, tuple[int, bool]],
        refused: Sequence[int],
    ) -> list[MembershipAction]:
        """`rounds`: tensor -> (the last one begun, whether its sum is there). `refused`: new
        hosts it does not reach."""
        if self.asked is None or number != self.asked.number:
            return []
        self.states[worker] = rounds, set(refused)
        if len(self.states) < self.workers:
            return []
        refusals = set().union(*(refused for _, refused in self.states.values()))
        added = tuple(spare for spare in self.asked.added if spare[0] not in refusals)
        change = Change(number, tuple(sorted(self.lost)), added, self._rounds())
        for reducer in self.lost:
            del self.spares[reducer]
        self.spares |= {reducer: (address, rate) for reducer, address, rate in added}
        self.asked, self.states, self.lost = None, {}, set()
        return [change, *self._ask()]

    def _ask(self) -> list[MembershipAction]:
        if self.asked is not None or not (self.lost or self.offers):
            return []
        self.number += 1
        added = tuple(
            (self._next_reducer + i, *offer) for i, offer in enumerate(self.offers.items())
        )
        self._next_reducer, self.offers = self._next_reducer + len(added), {}
        self.asked = AskRounds(self.number, added)
        return [self.asked]

    def _rounds(self) -> Rounds:
        out: Rounds = {}
        for key in {key for rounds, _ in self.states.values() for key in rounds}:
            of_all = [rounds.get(key, (0, True)) for rounds, _ in self.states.values()]
            out[key] = max(last for last, _ in of_all), min(last + done for last, done in of_all)
        return out

    def check(self) -> None:
        """Assert every invariant."""
        assert self.asked is not None or not (self.states or self.lost or self.offers)
        assert len(self.states) < self.workers
        assert self.lost <= set(self.spares)
        assert all(number < self._next_reducer for number in self.spares)
        assert self.offers.keys().isdisjoint(address for address, _ in self.spares.values())
