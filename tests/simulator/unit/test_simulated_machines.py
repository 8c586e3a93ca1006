"""The simulation runs the real state machines (Rule 7): which of protocol/ drive a simulated step,
and that each of them affects it."""

from __future__ import annotations

from typing import Any

import pytest

from roadtrain.config.plan_file import Plan, placement
from roadtrain.errors import LoopError
from roadtrain.relay.protocol.relay import RelayStateMachine
from roadtrain.servers.protocol.commit import CommitStateMachine
from roadtrain.servers.protocol.prefetch import Prefetcher
from roadtrain.servers.protocol.server import ServerStateMachine
from roadtrain.simulator.engine import Engine
from roadtrain.simulator.run import _Steps
from roadtrain.simulator.scene import Scene
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.protocol.pipeline import StageStateMachine
from roadtrain.sums.protocol.membership import MembershipStateMachine
from roadtrain.sums.protocol.reducer import ReducerStateMachine
from tests.support.plans import WHOLE, cluster, lump, run

EVENTS: list[tuple[type, str]] = [
    (ServerStateMachine, "handle"),
    (CommitStateMachine, "on_committed"),
    (StageStateMachine, "ended"),
    (Prefetcher, "request"),
    (RelayStateMachine, "handle"),
    (ReducerStateMachine, "arrived"),
    (MembershipStateMachine, "state"),
]
ALWAYS = {"ServerStateMachine", "CommitStateMachine", "StageStateMachine"}
SERVICE = {"ReducerStateMachine", "MembershipStateMachine"}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ddp", set()),
        ("summation", SERVICE),
        ("parameter-server", SERVICE),
        ("files", {"Prefetcher"}),
        ("smartnic", {"Prefetcher", "RelayStateMachine"}),
    ],
)
def test_which_state_machines_drive_a_placement(
    name: str, more: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()
    for machine, event in EVENTS:
        original = getattr(machine, event)

        def recorded(self: Any, *args: Any, original: Any = original, **words: Any) -> Any:
            used.add(type(self).__name__)
            return original(self, *args, **words)

        monkeypatch.setattr(machine, event, recorded)
    run(name, cluster(3, 1), lump(1e7, 1e9))
    assert used - {"Prefetcher"} == ALWAYS | more - {"Prefetcher"}
    assert more <= used


def test_the_reducer_machine_decides_when_a_sum_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reducer that waits for ever blocks the step; one that does not wait for all workers is
    noticed."""
    original = ReducerStateMachine.arrived
    monkeypatch.setattr(ReducerStateMachine, "arrived", lambda self, worker, part: None)
    with pytest.raises(LoopError, match="is deadlocked"):
        run("summation", cluster(4, 1), lump(1e7, 1e9))
    run("ddp", cluster(4, 1), lump(1e7, 1e9))  # a ring is a closed form and uses no reducer

    def hasty(self: ReducerStateMachine, worker: int, part: Any) -> Any:
        self.workers = 2
        return original(self, worker % 2, part)

    monkeypatch.setattr(ReducerStateMachine, "arrived", hasty)
    with pytest.raises((AssertionError, LoopError)):
        run("summation", cluster(4, 1), lump(1e7, 1e9))


def test_the_membership_machine_decides_who_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare hosts that are never admitted sum nothing: the step is that of a cluster without
    them."""
    alone, helped = (run("summation", cluster(4, spares), lump(1e9)) for spares in (0, 2))
    assert helped.seconds < 0.9 * alone.seconds
    monkeypatch.setattr(MembershipStateMachine, "offered", lambda self, address, rate: [])
    unheard = run("summation", cluster(4, 2), lump(1e9))
    assert (unheard.seconds, unheard.bytes) == (alone.seconds, alone.bytes)


def test_a_spare_host_that_leaves_stops_summing() -> None:
    """A host leaves during a run: later steps are those of a cluster with one spare host fewer."""
    plan, model = Plan(placement("summation"), Parallelism(dp=4)), lump(1e9)
    both, single = (run("summation", cluster(4, spares), model) for spares in (2, 1))
    engine, scene = Engine(), Scene(plan, cluster(4, 2), model, WHOLE)
    scene.build(engine)
    steps, sums = _Steps(scene), scene.stages[0].fabric.sums
    assert sums is not None
    assert steps.steady(plan.num_microbatches)["seconds"] == pytest.approx(both.seconds, rel=1e-9)
    sums.leave(4)
    sums.check()
    assert steps.steady(plan.num_microbatches)["seconds"] == pytest.approx(single.seconds, rel=1e-9)
    assert both.seconds < single.seconds


@pytest.mark.parametrize("name", ["files", "optimizer-node"])
def test_a_step_on_files_waits_for_the_commit_of_the_previous_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # Rule 3
    where = cluster(3, 1, sums=True)
    run(name, where, lump(1e7, 1e9))
    monkeypatch.setattr(CommitStateMachine, "blob", lambda self, step, blob: [])
    with pytest.raises(LoopError, match="is deadlocked"):
        run(name, where, lump(1e7, 1e9))
