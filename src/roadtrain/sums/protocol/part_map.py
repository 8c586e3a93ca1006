"""Map: which reducer sums a part in which round, while spare hosts come and go (membership.py).

Later rounds than a Change says go by its shares, earlier ones where they went, but for parts whose
host is gone: those go where the first map after says whose host is there. So all workers agree on
every part of every round. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roadtrain.sums.protocol.membership import Change, Spares
from roadtrain.sums.protocol.shares import optimum, reducers


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
        best = optimum(self.rates, list(self.spares.values()))
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
