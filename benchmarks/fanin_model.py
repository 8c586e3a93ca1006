"""What goes up and down through switches, explored: every sum right, each once, all of it in the
end, whatever is lost, repeated or late, and whoever restarts.

    workers' senders --packets--> switches --sums--> the server's receiver      fanin_upwards.py
    workers' receivers <--copies-- switch <--packets-- the server's sender      fanin_downwards.py

The machines are those that run (switch/protocol/numbered.py, switch/protocol/switch.py). In each
state it is asserted what they say of themselves (`check()`), that no number is taken twice, and
that no slot is taken while its number has not come to the end.

Note "Network": all that was ever sent may arrive at any time, any number of times, or never. This
covers loss, repetition and reordering anywhere. As a number's data never change, what a worker has
sent is the numbers below its `next`; a heartbeat may be any that its origin may have sent before.

Note "Restarts": a switch may lose its table at any time. A worker that restarts begins a new job:
all machines are new, and packets of the old job are still under way. So a restart is the first
state again, with packets of all numbers of an older job under way; they are refused, as a packet's
tag is the job's (switch/packets.py). Variant.ANY_JOB shows that this is needed.

Note "The end": from every state, all that is under way may be lost; then rounds in which all send
again and nothing is lost must lead to where all is delivered. So whoever waits, waits not in vain:
where no packet is lost for ever, all come through.

Note "At once": with `eager`, workers send all that they may as soon as they hear so. What is right
of them is right of slower ones, as a packet that is not sent yet is as one that has not come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.fanin_downwards import Downwards
from benchmarks.fanin_explore import Result, explore
from benchmarks.fanin_upwards import Tree, Upwards, Variant
from benchmarks.report import Row


def check(
    variant: Variant = Variant.OURS,
    *,
    tree: Tree = (0, 1),
    window: int = 2,
    numbers: int = 4,
    timeouts: bool = False,
    eager: bool = False,
    most_states: int = 10_000_000,
) -> Result:
    """What goes up. tree: a switch's children, of which an int is a worker; timeouts: that a worker
    sends again at any time is a step of its own, too, though it sends nothing new; eager: see note
    "At once"."""
    return explore(Upwards(tree, window, numbers, variant, timeouts, eager), most_states)


def check_down(
    variant: Variant = Variant.OURS,
    *,
    workers: int = 2,
    window: int = 2,
    numbers: int = 3,
    eager: bool = False,
    most_states: int = 10_000_000,
) -> Result:
    """What goes down."""
    return explore(Downwards(workers, window, numbers, variant, eager), most_states)


def literal_trace() -> tuple[str, ...]:
    """How the paper's switch, taken literally, makes a wrong sum: the fewest steps."""
    found = check(Variant.LITERAL, numbers=3)
    assert found.trace is not None, "the literal switch must be refuted"
    return (*found.trace, found.wrong)


@dataclass(frozen=True)
class Scene:
    """What is explored, in words and as arguments of `check` or `check_down`."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    down: bool = False
    slow: bool = False  # left out of quick runs

    def result(self) -> Result:
        return (check_down if self.down else check)(**self.arguments)


SCENES = (
    Scene("up, window 2, 3 numbers", {"numbers": 3}),
    Scene("up, window 2, 5 numbers", {"numbers": 5}, slow=True),
    Scene(
        "up, window 2, 3 numbers, timeouts at any time",
        {"numbers": 3, "timeouts": True},
        slow=True,
    ),
    Scene("up, window 3, 4 numbers", {"window": 3, "numbers": 4, "eager": True}, slow=True),
    Scene("up, two levels", {"tree": ((0, 1),), "numbers": 3, "eager": True}, slow=True),
    Scene(
        "up, two levels, 3 workers",
        {"tree": ((0, 1), 2), "numbers": 3, "eager": True, "most_states": 150_000},
        slow=True,
    ),
    Scene("down, window 2, 3 numbers", {"numbers": 3}, down=True),
    Scene("down, window 3, 5 numbers", {"window": 3, "numbers": 5, "eager": True}, True, True),
)
REFUTED = {
    Variant.LITERAL: Scene("up", {"variant": Variant.LITERAL, "numbers": 3}),
    Variant.ANY_JOB: Scene("up", {"variant": Variant.ANY_JOB, "numbers": 3}),
    Variant.FEW_SLOTS: Scene("up", {"variant": Variant.FEW_SLOTS, "numbers": 3}),
    Variant.HASTY: Scene("down", {"variant": Variant.HASTY, "numbers": 2}, down=True),
}
CASE = "the protocol, explored: 2 workers, loss, repetition, reordering and restarts anywhere"


def rows(quick: bool) -> list[Row]:
    """Of the issue's item: what is right, and what is refuted, with the trace of the paper's."""
    found = [_row_of(scene) for scene in SCENES if not (quick and scene.slow)]
    for variant, scene in REFUTED.items():
        result = scene.result()
        metric = f"refuted: {variant.value}"
        steps = len(result.trace or ())
        found.append(_row(metric, "steps to what is wrong", steps, "refuted", not result.right))
    print(f"{Variant.LITERAL.value}:")
    for step, words in enumerate(literal_trace(), 1):
        print(f"  {step}. {words}")
    return found


def _row_of(scene: Scene) -> Row:
    result = scene.result()
    how = "all states" if result.exhaustive else f"states to depth {result.depth}"
    if result.trace is not None:
        print(f"{scene.name}: {result.wrong}", *result.trace, sep="\n  ")
    return _row(f"{scene.name}: {how}", "states", result.states, "nothing wrong", result.right)


def _row(metric: str, unit: str, ours: float, goal: str | None, met: bool | None) -> Row:
    return Row(CASE, metric, unit, ours, None, None, None, None, goal, met)
