"""All states that a model can be in, breadth first; and whether all of them still lead to the end.

A model says its steps; a state is a tuple of small ints, which `Parts` hand out for the states of
machines. A machine's step depends on its own state and the event alone, so it is taken once and
remembered: what is explored is what the real machines did.

Does NOT know any protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
Out = TypeVar("Out")
State = tuple[int, ...]


What = tuple[Any, ...]  # happens: the model has words for it
Step = tuple[
    What, State, str
]  # what happens, what is then, and what is wrong with that, if anything


@dataclass(frozen=True, slots=True)
class Result:
    """What was found."""

    states: int  # different ones that were reached
    depth: int  # steps from the beginning to the last of them
    exhaustive: bool  # no state that can be reached is beyond `most_states`
    wrong: str = ""  # what was found wrong; empty: nothing
    trace: tuple[str, ...] | None = None  # the fewest steps to what is wrong

    @property
    def right(self) -> bool:
        return self.trace is None


class Model(Protocol):
    def first(self) -> State: ...

    def steps(self, state: State) -> Iterable[Step]:
        """All that may happen next, and changes anything."""

    def words(self, what: What) -> str: ...

    def round(self, state: State) -> State:
        """The state after all that was under way is lost, all have waited long enough to send
        again, and nothing of that is lost."""

    def done(self, state: State) -> bool:
        """All is delivered, and all know."""


class Parts(Generic[S, Out]):
    """The states of one kind of machine, numbered; and what each event did to each."""

    def __init__(self, first: S, step: Callable[[S, Any], tuple[S, Out]]) -> None:
        self._step = step
        self.states: list[S] = []
        self._ids: dict[S, int] = {}
        self._known: dict[tuple[int, int], tuple[int, Out]] = {}
        self.events: list[Any] = []
        self._event_ids: dict[Hashable, int] = {}
        self.first = self.number(first)

    def number(self, state: S) -> int:
        found = self._ids.setdefault(state, len(self.states))
        if found == len(self.states):
            self.states.append(state)
        return found

    def event(self, event: Hashable) -> int:
        """Its number: what `step` takes."""
        found = self._event_ids.setdefault(event, len(self.events))
        if found == len(self.events):
            self.events.append(event)
        return found

    def step(self, number: int, event: int) -> tuple[int, Out]:
        """The machine's number afterwards, and what it did."""
        known = self._known.get((number, event))
        if known is None:
            state, out = self._step(self.states[number], self.events[event])
            known = self._known[number, event] = self.number(state), out
        return known


def explore(model: Model, most_states: int = 10_000_000) -> Result:
    """Until something is wrong, or no state is new, or there are too many."""
    first = model.first()
    before: dict[State, State | None] = {first: None}
    level, depth = [first], 0
    while level:
        found: list[State] = []
        for state in level:
            for what, to, wrong in model.steps(state):
                if wrong:
                    trace = (*_trace(model, before, state), model.words(what))
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
    """Whether all states lead to the end."""
    leads = _Leading(model)
    for state in before:
        if not leads.to_the_end(state):
            wrong = "from here the end cannot be reached"
            return Result(len(before), depth, False, wrong, _trace(model, before, state))
    return Result(len(before), depth, exhaustive)


class _Leading:
    """States from which rounds without loss lead to the end."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.known: set[State] = set()

    def to_the_end(self, state: State) -> bool:
        path: set[State] = set()
        while state not in self.known and not self.model.done(state):
            if state in path:
                return False
            path.add(state)
            state = self.model.round(state)
        self.known |= path
        return True


def _trace(model: Model, before: dict[State, State | None], last: State) -> tuple[str, ...]:
    """The steps to a state, in words."""
    words = list[str]()
    for earlier, state in _pairs(before, last):
        words.append(next(model.words(what) for what, to, _ in model.steps(earlier) if to == state))
    return tuple(reversed(words))


def _pairs(before: dict[State, State | None], last: State) -> Iterator[tuple[State, State]]:
    """(state, next state), from the end."""
    while (earlier := before[last]) is not None:
        yield earlier, last
        last = earlier
