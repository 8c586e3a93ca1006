"""Explore all states of a model, breadth first. Check that no step is wrong, and that full delivery
can be reached from each state.

A model consists of state machines, such as the sender of a worker. A state of the model is a tuple
of small ints, one for each machine. This module can explore any protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
Out = TypeVar("Out")
State = tuple[int, ...]


Action = tuple[Any, ...]  # an event of the model, which `describe` puts into words
# (action, next state, error in that state or "")
Step = tuple[Action, State, str]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an exploration. `wrong`: description of the error, "" if there was none. `trace`:
    the steps that lead to the error.
    """

    states: int  # number of different states reached
    depth: int  # steps from the first state to the farthest
    exhaustive: bool  # all reachable states were explored, fewer than `most_states`
    wrong: str = ""  # the violated property; empty: none
    trace: tuple[str, ...] | None = None  # the shortest sequence of steps to the violation

    @property
    def right(self) -> bool:
        return self.trace is None


class Model(Protocol):
    def first(self) -> State: ...

    def steps(self, state: State) -> Iterable[Step]:
        """Yield every step from `state` that changes the state."""

    def describe(self, action: Action) -> str: ...

    def round(self, state: State) -> State:
        """Return the state after all packets in flight are lost and every machine has sent again
        without loss.
        """

    def done(self, state: State) -> bool:
        """Check that everything is delivered and acknowledged."""


class Parts(Generic[S, Out]):
    """Gives numbers to the states and events of one kind of machine, and computes the result of
    each (state, event) only once.
    """

    def __init__(self, first: S, step: Callable[[S, Any], tuple[S, Out]]) -> None:
        self._step = step
        self.states: list[S] = []
        self._ids: dict[S, int] = {}
        self._steps: dict[tuple[int, int], tuple[int, Out]] = {}
        self.events: list[Any] = []
        self._event_ids: dict[Hashable, int] = {}
        self.first = self.number(first)

    def number(self, state: S) -> int:
        found = self._ids.setdefault(state, len(self.states))
        if found == len(self.states):
            self.states.append(state)
        return found

    def event(self, event: Hashable) -> int:
        """Return the number that stands for an event."""
        found = self._event_ids.setdefault(event, len(self.events))
        if found == len(self.events):
            self.events.append(event)
        return found

    def step(self, number: int, event: int) -> tuple[int, Out]:
        """Apply a numbered event to a machine. Returns (number of its next state, output of the
        step).
        """
        result = self._steps.get((number, event))
        if result is None:
            state, out = self._step(self.states[number], self.events[event])
            result = self._steps[number, event] = self.number(state), out
        return result


def explore(model: Model, most_states: int = 10_000_000) -> Result:
    """Explore a model until a step is wrong, no new state is left, or more than `most_states` are
    found.
    """
    first = model.first()
    before: dict[State, State | None] = {first: None}
    level, depth = [first], 0
    while level:
        found: list[State] = []
        for state in level:
            for action, to, wrong in model.steps(state):
                if wrong:
                    trace = (*_trace(model, before, state), model.describe(action))
                    return Result(len(before), depth + 1, False, wrong, trace)
                if to not in before:
                    before[to] = state
                    found.append(to)
            if len(before) > most_states:
                return _ends(model, before, depth, False)
        level = found
        depth += bool(found)
    return _ends(model, before, depth, True)


def _ends(model: Model, before: dict[State, State | None], depth: int, exhaustive: bool) -> Result:
    """Check that everything can be delivered from each found state, and return the result.
    `before`: maps each found state to the state that it was reached from.
    """
    leads = _Leading(model)
    for state in before:
        if not leads.to_the_end(state):
            wrong = "the end cannot be reached from here"
            return Result(len(before), depth, False, wrong, _trace(model, before, state))
    return Result(len(before), depth, exhaustive)


class _Leading:
    """Finds and remembers the states from which everything is delivered if no packet is lost."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.leading: set[State] = set()

    def to_the_end(self, state: State) -> bool:
        path: set[State] = set()
        while state not in self.leading and not self.model.done(state):
            if state in path:
                return False
            path.add(state)
            state = self.model.round(state)
        self.leading |= path
        return True


def _trace(model: Model, before: dict[State, State | None], last: State) -> tuple[str, ...]:
    descriptions = list[str]()
    for earlier, state in _pairs(before, last):
        descriptions.append(
            next(model.describe(action) for action, to, _ in model.steps(earlier) if to == state)
        )
    return tuple(reversed(descriptions))


def _pairs(before: dict[State, State | None], last: State) -> Iterator[tuple[State, State]]:
    """Yield the pairs (state, next state) on the path to `last`, last pair first."""
    while (earlier := before[last]) is not None:
        yield earlier, last
        last = earlier
