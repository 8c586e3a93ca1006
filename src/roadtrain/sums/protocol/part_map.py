"""Map: assigns a reducer to each part of a tensor in each round, while spare hosts are added and
removed. No I/O.

All workers agree on the reducer of every part in every round. Rounds that begin after a change use
new shares. In earlier rounds, only the parts of removed reducers get another reducer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roadtrain.sums.protocol.membership import Change, Spares
from roadtrain.sums.protocol.shares import optimum, reducers


@dataclass
class _Epoch:
    """The assignment of parts to reducers between two changes of the spare hosts."""

    shares: Mapping[int, float]  # by reducer
    # Change.rounds: the shares apply to the rounds after the first number of each tensor
    after: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class Map:
    """Assigns the parts of tensors to reducers. Each reducer has a unique number.

    Args:
        rates: Rates of the workers' links, in bytes/s.
        spares: The spare hosts that are used at the start.
        fixed: Shares of the reducers until the first change. If empty, the optimal shares are used.
        separate: If True, the workers' own reducers get no share while there is a spare host.
    """

    def __init__(
        self,
        rates: Sequence[float],
        spares: Spares,
        fixed: Mapping[int, float] | None = None,
        *,
        separate: bool = False,
    ) -> None:
        self.rates = tuple(rates)
        self.separate = separate
        self.spares = {number: rate for number, _, rate in spares}
        self.removed: set[int] = set()  # reducers; disjoint from `spares`
        # Begins with the oldest epoch that a round may still use.
        self._epochs = [_Epoch(fixed or self._best())]
        # (tensor, number of parts) -> the epoch and the result of the last call of `assigned`
        self._cache: dict[tuple[int, int], tuple[int, tuple[list[int], list[bool]]]] = {}

    def _best(self) -> dict[int, float]:
        if self.separate and self.spares:
            total = sum(self.spares.values())
            there = {number: rate / total for number, rate in self.spares.items()}
            return dict.fromkeys(range(len(self.rates)), 0.0) | there
        best = optimum(self.rates, list(self.spares.values()))
        return dict(zip([*range(len(self.rates)), *self.spares], best))

    @property
    def shares(self) -> Mapping[int, float]:
        """The current share of each reducer, which applies to rounds that begin now."""
        return self._epochs[-1].shares

    def reducers(self, key: int, parts: int, round: int) -> list[int]:
        """Return the reducer of each part of tensor `key` in a round."""
        return self.assigned(key, parts, round)[0]

    def assigned(self, key: int, parts: int, round: int) -> tuple[list[int], list[bool]]:
        """Return, for each part of a round, its reducer, and whether the part was moved because its
        reducer was removed.

        The new reducer may already have the same part of the next round. To tell the two rounds
        apart, frames of moved parts have all bits of the header field `start` inverted.
        """
        base = self._base(key, round)
        found = self._cache.get((key, parts))
        if found is None or found[0] != base:
            there = self._there(key, parts, base)
            moved = [a != b for a, b in zip(there, reducers(key, parts, self._epochs[base].shares))]
            found = self._cache[key, parts] = base, (there, moved)
        return found[1]

    def _base(self, key: int, round: int) -> int:
        """Return the index of the epoch whose shares apply to a round."""
        epochs = range(len(self._epochs) - 1, 0, -1)
        return next((i for i in epochs if round > self._epochs[i].after.get(key, (0, 0))[0]), 0)

    def _there(self, key: int, parts: int, base: int) -> list[int]:
        """Return the reducer of each part of a tensor in epoch `base`, after all later removals."""
        out = reducers(key, parts, self._epochs[base].shares)
        for epoch in self._epochs[base + 1 :]:
            if self.removed.isdisjoint(out):
                break
            out = [
                new if old in self.removed else old
                for old, new in zip(out, reducers(key, parts, epoch.shares))
            ]
        return out

    def change(self, change: Change) -> None:
        self.removed |= set(change.removed)
        for reducer in change.removed:
            self.spares.pop(reducer, None)
        self.spares |= {number: rate for number, _, rate in change.added}
        self._epochs.append(_Epoch(self._best(), change.rounds))
        self._cache.clear()
        oldest = min((self._base(key, min(both)) for key, both in change.rounds.items()), default=0)
        del self._epochs[:oldest]  # no round uses them any more
