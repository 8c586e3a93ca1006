"""State machine for adding and removing spare hosts while workers sum. No I/O, no clock.

a host is offered or lost --> Coordinator (at worker 0)
    -- Ask -->    all workers: connect to new hosts, begin no round, report the rounds begun
    <-- State --
    -- Change --> all workers: update the Map, then resume
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Spares: TypeAlias = tuple[tuple[int, str, float], ...]  # number of the reducer, address, rate
Rounds: TypeAlias = dict[int, tuple[int, int]]


class AskRounds(NamedTuple):
    """Ask all workers to connect to new hosts, to begin no new round, and to report the last round
    begun of each tensor."""

    number: int  # number of this query
    added: Spares


@dataclass(frozen=True)
class Change:
    """Ask all workers to resume summation with the changed set of reducers."""

    number: int  # number of the query that the workers have answered
    removed: tuple[int, ...]
    added: Spares
    # Tensor -> (last round that any worker has begun, first round whose sum any worker lacks).
    rounds: Rounds


MembershipAction: TypeAlias = AskRounds | Change


class MembershipStateMachine:
    def __init__(self, workers: int, spares: Spares) -> None:
        self.workers = workers
        # Number of a reducer -> its address and rate.
        self.spares = {number: (address, rate) for number, address, rate in spares}
        self.number = 0  # number of the last query
        self._next_reducer = workers + len(spares)  # numbers are not reused
        self.query: AskRounds | None = None  # the query that some workers have not answered
        # Worker -> (its rounds, new reducers that it cannot reach); empty unless there is a query.
        self.states: dict[int, tuple[Mapping[int, tuple[int, bool]], set[int]]] = {}
        self.lost: set[int] = set()  # numbers in `spares` that the next change removes
        self.offers: dict[str, float] = {}  # address -> rate of hosts for the next query

    def remove(self, reducer: int) -> list[MembershipAction]:
        """Remove a spare host that has died or is no longer listed."""
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
        """Handle a worker's answer to the query `number`. `rounds`: for each tensor, the last round
        that the worker has begun, and whether it has the sum. `refused`: new reducers that the
        worker cannot reach."""
        if self.query is None or number != self.query.number:
            return []
        self.states[worker] = rounds, set(refused)
        if len(self.states) < self.workers:
            return []
        refusals = set().union(*(refused for _, refused in self.states.values()))
        added = tuple(spare for spare in self.query.added if spare[0] not in refusals)
        change = Change(number, tuple(sorted(self.lost)), added, self._rounds())
        for reducer in self.lost:
            del self.spares[reducer]
        self.spares |= {reducer: (address, rate) for reducer, address, rate in added}
        self.query, self.states, self.lost = None, {}, set()
        return [change, *self._ask()]

    def _ask(self) -> list[MembershipAction]:
        if self.query is not None or not (self.lost or self.offers):
            return []
        self.number += 1
        added = tuple(
            (self._next_reducer + i, *offer) for i, offer in enumerate(self.offers.items())
        )
        self._next_reducer, self.offers = self._next_reducer + len(added), {}
        self.query = AskRounds(self.number, added)
        return [self.query]

    def _rounds(self) -> Rounds:
        out: Rounds = {}
        for key in {key for rounds, _ in self.states.values() for key in rounds}:
            of_all = [rounds.get(key, (0, True)) for rounds, _ in self.states.values()]
            out[key] = max(last for last, _ in of_all), min(last + done for last, done in of_all)
        return out

    def check(self) -> None:
        """Assert every invariant."""
        assert self.query is not None or not (self.states or self.lost or self.offers)
        assert len(self.states) < self.workers
        assert self.lost <= set(self.spares)
        assert all(number < self._next_reducer for number in self.spares)
        assert self.offers.keys().isdisjoint(address for address, _ in self.spares.values())
