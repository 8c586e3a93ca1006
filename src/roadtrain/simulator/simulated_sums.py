"""Simulate the summation service with its real state machines. The membership's state machine
decides which fraction of the data each host sums. The reducers' state machines decide when a sum is
complete.

Each chunk is summed as a whole. The traffic on the links is computed in closed form, as if many
small parts of it were in flight (sums/protocol/shares.py).
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

FORMAT = "fp32"  # format of parts; the simulation only needs the same format for all workers


class SimulatedSums:
    """The summation service on one stage's worker hosts and on the spare hosts. If `separate` is
    true, only the spare hosts sum."""

    def __init__(
        self, rates: Sequence[float], spares: Sequence[float], *, separate: bool = False
    ) -> None:
        self.rates = tuple(rates)  # rates of the worker hosts' links in bytes/s
        self.workers = len(rates)
        self.coordinator = MembershipStateMachine(self.workers, ())
        # tensor -> the last round that all workers have begun; between steps, its sum is complete
        self.rounds: dict[int, int] = {}
        # each is created when its first part arrives
        self.reducers: dict[int, ReducerStateMachine] = {}
        self.map = Map(rates, (), separate=separate)
        self.exchange = self._exchange()
        for number, rate in enumerate(spares, self.workers):
            self._agree(self.coordinator.offered(f"spare {number}", rate))

    def leave(self, reducer: int) -> None:
        """Remove a spare host. May only be called between steps."""
        self._agree(self.coordinator.remove(reducer))

    def pushed(self, tensor: int, elements: int) -> list[PartRound]:
        """Deliver the next gradient of a tensor from all worker hosts to its reducer. Return the
        rounds of summation that are now complete."""
        number = self.rounds[tensor] = self.rounds.get(tensor, 0) + 1
        [reducer] = self.map.reducers(tensor, 1, number)
        machine = self.reducers.setdefault(reducer, ReducerStateMachine(self.workers))
        part = Arrived(tensor, 0, number, elements, FORMAT)
        rounds = [machine.arrived(worker, part) for worker in range(self.workers)]
        return [done for done in rounds if done is not None]

    def _agree(self, actions: Sequence[MembershipAction]) -> None:
        """Deliver the coordinator's messages to all workers, and their answers to the coordinator,
        until no message is left."""
        rounds = {tensor: (number, True) for tensor, number in self.rounds.items()}
        queue = deque(actions)
        while queue:
            match queue.popleft():
                case AskRounds(number):
                    for worker in range(self.workers):
                        queue += self.coordinator.state(worker, number, rounds, ())
                case Change() as change:
                    self.map.change(change)
        self.exchange = self._exchange()

    def _exchange(self) -> float:
        """Return the bytes that the first host's network card carries in each direction, for each
        byte of a gradient."""
        spares, shares = list(self.map.spares.values()), list(self.map.shares.values())
        return busiest(self.rates, spares, shares) * self.rates[0]

    def check(self) -> None:
        """Assert the invariants of the state machines, and that no sum waits for a host."""
        self.coordinator.check()
        for machine in self.reducers.values():
            machine.check()
            assert not machine.missing(), "a sum waits for a host"
