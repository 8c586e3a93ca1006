"""Explore all states of the fan-in's protocol, which sends packets up and down through switches.
Packets may be lost, repeated or late, and machines may restart. Nevertheless, every sum must be
right, no sum may arrive twice, and all sums must finally arrive.

    workers' senders --packets--> switches --sums--> the server's receiver      upwards.py
    workers' receivers <--copies-- switch <--packets-- the server's sender      downwards.py

Packets have consecutive numbers. In each state, the machines' own invariants must hold, no packet
number may be accepted twice, and no slot of a switch may be reused before the server has received
the sum in the slot.

Note "Network": every packet ever sent may arrive at any time, any number of times, or never. A
machine may receive any heartbeat that another machine may have sent to it before.

Note "Restarts": a switch may lose its table at any time. If a worker restarts, a new job begins
while packets of the old job are still in flight, so the first state of the model has such packets.
They are refused, because a packet carries a tag of its job. Variant.ANY_JOB shows that the tag is
needed.

Note "Termination": from every state, all packets in flight may be lost. After this, some rounds
without loss, in which all machines send again, must lead to full delivery.

Note "At once": with the argument `eager`, a worker answers each heartbeat with all packets that it
may send. A property that holds for eager workers also holds for slower workers, because a packet
that is not sent yet is like a packet that has not arrived yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.report import Row
from benchmarks.fanin.downwards import Downwards
from benchmarks.fanin.explore import Result, explore
from benchmarks.fanin.transfer import Bench
from benchmarks.fanin.upwards import Tree, Upwards, Variant


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
    """Explore the model of gradients that go from workers through switches to the server.

    Args:
        tree: children of the root switch: an int is a worker, a tuple is a switch with its children
        window: number of packets that a worker may have in flight
        numbers: number of packets of each worker
        timeouts: if True, a worker may time out at any time
        eager: if True, a worker answers each heartbeat with all packets that it may send. Fewer
            states are then explored.
        most_states: limit for the number of explored states
    """
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
    """Explore the model of parameters that go from the server through a switch to workers.

    Args:
        window: number of packets that the server may have in flight
        numbers: number of packets that the server sends
        eager: if True, the server answers each heartbeat with all packets that it may send. Fewer
            states are then explored.
        most_states: limit for the number of explored states
    """
    return explore(Downwards(workers, window, numbers, variant, eager), most_states)


def literal_trace() -> tuple[str, ...]:
    """Return the shortest sequence of steps after which a switch that follows the paper of SwitchML
    computes a wrong sum.
    """
    found = check(Variant.LITERAL, numbers=3)
    assert found.trace is not None, "the literal switch must be refuted"
    return (*found.trace, found.wrong)


@dataclass(frozen=True)
class Scene:
    """Name and arguments of an exploration: the arguments of `check_down` if `down`, else those of
    `check`.
    """

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


def rows(bench: Bench) -> list[Row]:
    """Explore all scenes, and check that an error is found in each wrong variant of the
    protocol.
    """
    found = [_row_of(scene) for scene in SCENES if not (bench.quick and scene.slow)]
    for variant, scene in REFUTED.items():
        result = scene.result()
        metric = f"refuted: {variant.value}"
        count = len(result.trace or ())
        goal, met = "refuted", not result.right
        found.append(Row(CASE, metric, "steps to the violation", count, goal=goal, met=met))
    print(f"{Variant.LITERAL.value}:")
    for step, description in enumerate(literal_trace(), 1):
        print(f"  {step}. {description}")
    return found


def _row_of(scene: Scene) -> Row:
    result = scene.result()
    how = "all states" if result.exhaustive else f"states to depth {result.depth}"
    if result.trace is not None:
        print(f"{scene.name}: {result.wrong}", *result.trace, sep="\n  ")
    metric, goal = f"{scene.name}: {how}", "nothing wrong"
    return Row(CASE, metric, "states", result.states, goal=goal, met=result.right)
