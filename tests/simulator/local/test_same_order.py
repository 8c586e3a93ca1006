"""What is simulated is what runs (Rule 7): a real step and a simulated one of the same model,
plan by plan, do the same to every chunk in the same order, and answer as many pulls."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from torch.optim import AdamW

import roadtrain
from roadtrain import Delay
from roadtrain.config.cluster import make_cluster
from roadtrain.config.models import BlockShape, ModelShape
from roadtrain.config.plan_file import Plan, PlanMemory, placement
from roadtrain.placement import session_plan
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.server import ServerStateMachine
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.run import simulate
from tests.support.models import Case, Net, new_scaler, run

DEPTH, STEPS = 5, 4
SAID = (messages.Answer, messages.Hold, messages.Read, messages.Update, messages.Write)


def about(action):
    return getattr(action, "push", getattr(action, "pull", action)).chunk


def logged_actions(monkeypatch):
    """(action, chunk), in the order of the state machines of all servers from now on."""
    said, handle = [], ServerStateMachine.handle

    def logged(self, event):
        actions = handle(self, event)
        said.extend((type(a).__name__, about(a)) for a in actions if isinstance(a, SAID))
        return actions

    monkeypatch.setattr(ServerStateMachine, "handle", logged)
    return said


def real(monkeypatch, store, staleness, slots):
    """(action, block) of the layers' chunks, in the order of the state machine."""
    said, derived = logged_actions(monkeypatch), session_plan.derive

    def few_slots(*args):
        budgets = derived(*args)
        return replace(budgets, worker=replace(budgets.worker, slots=slots))

    def small(*args):
        budgets = few_slots(*args)
        records = replace(budgets.records, resident=frozenset(), weights_resident=frozenset())
        return replace(budgets, records=records)

    if store is not None:
        monkeypatch.setattr(session_plan, "derive", small)
    else:
        monkeypatch.setattr(session_plan, "derive", few_slots)
    model = Net(depth=DEPTH, width=32, dropout=0.0)
    placed = roadtrain.place(
        model,
        AdamW(model.parameters(), foreach=False),
        store=store,
        delay=Delay(staleness) if staleness else None,
        report=lambda _: None,
    )
    with placed:
        step, servers = placed.step, placed.session.servers.running

        # as on the virtual clock, where holding takes no time
        def once_all_is_held(*args, **kwargs):
            calm, deadline = 0, time.monotonic() + 20
            while calm < 15:
                assert time.monotonic() < deadline
                time.sleep(0.002)
                busy = any(
                    not s._inbox.empty()
                    or any(c.holds or c.answering for c in s.machine.chunks.values())
                    for s in servers
                )
                calm = 0 if busy else calm + 1
            return step(*args, **kwargs)

        placed.step = once_all_is_held
        blocks = {c.id: c.block for c in placed.table.chunks}
        run(Case(staleness=staleness), model, placed, new_scaler(Case()), 0, STEPS)
    return [(what, blocks[chunk] - 1) for what, chunk in said if blocks[chunk]]


def simulated(monkeypatch, name, staleness, slots):
    device = {"flops": "1TFLOP/s", "memory": "80GB", "memory_rate": "1000GB/s", "copy": "100GB/s"}
    cluster = make_cluster(
        {
            "hosts": [
                {
                    "name": "a",
                    "devices": 1,
                    "device": device,
                    "memory": "80GB",
                    "uplink": "9GB/s",
                    "memory_rate": "100GB/s",
                    "ssds": [{"read": "3GB/s", "write": "3GB/s", "capacity": "1TB"}],
                }
            ]
        }
    )
    own = BlockShape("layer", 10_000, 1e9, 0.0, 0.0)
    said = logged_actions(monkeypatch)
    simulate(
        Plan(placement(name), staleness=staleness, memory=PlanMemory(slots=slots)),
        cluster,
        ModelShape("m", own.times(DEPTH), 1),
        Constants(),
        traced=True,
    )
    return said  # a block is one chunk


def steps(said, block):
    """Of one block: what is done to it between one gradient and the next, without pulls; and
    how many are answered."""
    out, now, answers = [], [], 0
    for what, of in said:
        if of != block:
            continue
        if what == "Answer":
            answers += 1
            continue
        if what == "Hold" and now:
            out.append((tuple(now), answers))
            now, answers = [], 0
        now.append(what)
    return out


@pytest.mark.parametrize(
    ("name", "on_files", "staleness"),
    [("files", True, 0), ("zero-offload", False, 0), ("zero-offload", False, 1)],
    ids=["files", "ram", "late"],
)
@pytest.mark.parametrize("slots", [2, 3])
def test_the_same_order(name, on_files, staleness, slots, tmp_path, monkeypatch):
    ran = real(monkeypatch, tmp_path / "store" if on_files else None, staleness, slots)
    told = simulated(monkeypatch, name, staleness, slots)
    for block in range(DEPTH):
        mine, theirs = steps(ran, block), steps(told, block)
        assert mine[1][0] == theirs[1][0], block  # the second step: both run as they always will
        assert mine[1][1] == theirs[1][1], (block, mine, theirs)
    # in the order of backward, of the next forward
    for what in ("Hold", "Read" if on_files else "Update"):
        orders = [
            [block for kind, block in said if kind == what][DEPTH : 2 * DEPTH]
            for said in (ran, told)
        ]
        assert orders[0] == orders[1], what
    assert {what for what, _ in ran} == {what for what, _ in told}
    assert Counter(what for what, _ in ran)["Hold"] == STEPS * DEPTH
