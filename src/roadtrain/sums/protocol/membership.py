"""Spare hosts that come, go and die while workers sum: who is told what, and which host sums a part
in which round.

    lost, offered, left --> Coordinator (at worker 0) -- Ask --> all workers: dial what is new,
    hold, say your rounds
                                                     <- state --
                                                     -- Change -> all workers: their Map, then go on

GradAccumulated is for one message there and back. A Change says of each tensor how far any worker
had begun: later rounds go by the new shares, earlier ones where they went, but for parts whose host
is gone: those go where the first map after says whose host is there. So all workers agree on every
part of every round. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from roadtrain.sums.protocol.shares import optimum, reducers

Spares: TypeAlias = tuple[tuple[int, str, float], ...]  # number of the reducer, address, rate
Rounds: TypeAlias = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class AskRounds:
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


@dataclass
class _Epoch:
    """What holds from one change to the next."""

    shares: Mapping[int, float]  # of each reducer
    # Tensor -> as in Change: rounds beyond the first number go by these shares.
    after: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class Map:
    """Which reducer sums a part. All reducers that are or were there have a number. `fixed`: the
    shares for ever, where nobody comes or goes. `separate`: workers sum only while there is no
    spare host."""

    def __init__(
        self,
        rates: Sequence[float],
        spares: Spares,
        fixed: Mapping[int, float] | None = None,
        *,
        separate: bool = False,
    ) -> None:
        self.rates = tuple(rates)  # of the workers' links, bytes a second
        self.separate = separate
        self.spares = {number: rate for number, _, rate in spares}
        self.gone: set[int] = set()  # numbers of reducers; disjoint from `spares`
        # The oldest that a round may still go by first.
        self._epochs = [_Epoch(fixed or self._best())]
        # (tensor, parts) -> what `_known` found last: the epoch, the reducers, which of them are
        # others than was meant.
        self._found: dict[tuple[int, int], tuple[int, list[int], list[bool]]] = {}

    def _best(self) -> dict[int, float]:
        if self.separate and self.spares:
            total = sum(self.spares.values())
            there = {number: rate / total for number, rate in self.spares.items()}
            return dict.fromkeys(range(len(self.rates)), 0.0) | there
        best = optimum(self.rates, list(self.spares.values())).all
        return dict(zip([*range(len(self.rates)), *self.spares], best))

    @property
    def shares(self) -> Mapping[int, float]:
        """How much each reducer sums of what begins now."""
        return self._epochs[-1].shares

    def reducers(self, key: int, parts: int, round: int) -> list[int]:
        return self._known(key, parts, round)[1]

    def moved(self, key: int, parts: int, round: int) -> list[bool]:
        """Which parts of this round go to another reducer than was meant, as that is gone. A
        reducer keeps those apart: it may have the part's next round already, which was meant for
        it."""
        return self._known(key, parts, round)[2]

    def _known(self, key: int, parts: int, round: int) -> tuple[int, list[int], list[bool]]:
        base = self._base(key, round)
        known = self._found.get((key, parts))
        if known is None or known[0] != base:
            there = self._there(key, parts, base)
            moved = [a != b for a, b in zip(there, reducers(key, parts, self._epochs[base].shares))]
            known = self._found[key, parts] = base, there, moved
        return known

    def _base(self, key: int, round: int) -> int:
        epochs = range(len(self._epochs) - 1, 0, -1)
        return next((i for i in epochs if round > self._epochs[i].after.get(key, (0, 0))[0]), 0)

    def _there(self, key: int, parts: int, base: int) -> list[int]:
        out = reducers(key, parts, self._epochs[base].shares)
        for epoch in self._epochs[base + 1 :]:
            if self.gone.isdisjoint(out):
                break
            out = [
                new if old in self.gone else old
                for old, new in zip(out, reducers(key, parts, epoch.shares))
            ]
        return out

    def change(self, change: Change) -> None:
        self.gone |= set(change.gone)
        for reducer in change.gone:
            self.spares.pop(reducer, None)
        self.spares |= {number: rate for number, _, rate in change.added}
        self._epochs.append(_Epoch(self._best(), change.rounds))
        self._found.clear()
        oldest = min((self._base(key, min(both)) for key, both in change.rounds.items()), default=0)
        del self._epochs[:oldest]  # no round is left that went by them
