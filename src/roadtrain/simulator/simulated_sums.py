"""The summation service on the virtual clock, by the state machines that run it: membership says
which host sums how much, reducers say when a sum is there.

A chunk is one part here. What links carry is that of many small parts under way at once: the closed
form of sums/protocol/shares.py. Hosts that do the same send at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from roadtrain.sums.protocol.membership import (
    AskRounds,
    Change,
    MembershipAction,
    MembershipStateMachine,
)
from roadtrain.sums.protocol.part_map import Map
from roadtrain.sums.protocol.reducer import Arrived, PartRound, ReducerStateMachine
from roadtrain.sums.protocol.shares import busiest

FORMAT = "fp32"  # that parts travel in: here only a word that all say alike


class SimulatedSums:
    """Of one stage's worker hosts and the spare hosts. `separate`: only spare hosts sum."""

    def __init__(
        self, rates: Sequence[float], spares: Sequence[float], *, separate: bool = False
    ) -> None:
        self.rates = tuple(rates)  # of the worker hosts' links, bytes a second
        self.workers = len(rates)
        self.coordinator = MembershipStateMachine(self.workers, ())
        # Tensor -> the last round that all have begun: its sum is there between steps.
        self.rounds: dict[int, int] = {}
        self.reducers: dict[int, ReducerStateMachine] = {}  # of those that got a part so far
        self.map = Map(rates, (), separate=separate)
        self.exchange = self._exchange()
        for number, rate in enumerate(spares, self.workers):
            self._agree(self.coordinator.offered(f"spare {number}", rate))

    def leave(self, reducer: int) -> None:
        """Between steps: a spare host is gone."""
        self._agree(self.coordinator.remove(reducer))

    def pushed(self, tensor: int, elements: int) -> list[PartRound]:
        """The parts of all hosts arrive. Returns what is summed by that."""
        number = self.rounds[tensor] = self.rounds.get(tensor, 0) + 1
        [reducer] = self.map.reducers(tensor, 1, number)
        machine = self.reducers.setdefault(reducer, ReducerStateMachine(self.workers))
        part = Arrived(tensor, 0, number, elements, FORMAT)
        rounds = [machine.arrived(worker, part) for worker in range(self.workers)]
        return [one for one in rounds if one is not None]

    def _agree(self, said: Sequence[MembershipAction]) -> None:
        """Every worker hears what the coordinator says, and answers."""
        rounds = {tensor: (number, True) for tensor, number in self.rounds.items()}
        heard = deque(said)
        while heard:
            match heard.popleft():
                case AskRounds(number):
                    for worker in range(self.workers):
                        heard += self.coordinator.state(worker, number, rounds, ())
                case Change() as change:
                    self.map.change(change)
        self.exchange = self._exchange()

    def _exchange(self) -> float:
        """Bytes that the first host's card carries, each way, of a byte that all sum."""
        spares, shares = list(self.map.spares.values()), list(self.map.shares.values())
        return busiest(self.rates, spares, shares) * self.rates[0]

    def check(self) -> None:
        """Assert every invariant."""
        self.coordinator.check()
        for machine in self.reducers.values():
            machine.check()
            assert not machine.missing(), "a sum waits for a host"
