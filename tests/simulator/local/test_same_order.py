"""The simulation matches the real run (Rule 7): for each plan, a real and a simulated step of the
same model perform the same actions on every chunk in the same order, and answer as many pulls."""

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
LOGGED = (messages.Answer, messages.Hold, messages.Read, messages.Update, messages.Write)


def chunk_of(action):
    return getattr(action, "push", getattr(action, "pull", action)).chunk


def logged_actions(monkeypatch):
    """Return a list that logs (action, chunk) of the state machines of all servers from now on."""
    log, handle = [], ServerStateMachine.handle

    def logged(self, event):
        actions = handle(self, event)
        log.extend((type(a).__name__, chunk_of(a)) for a in actions if isinstance(a, LOGGED))
        return actions

    monkeypatch.setattr(ServerStateMachine, "handle", logged)
    return log


def real(monkeypatch, store, staleness, slots):
    """Run real steps. Returns (action, block) of the layers' chunks in the order of the machine."""
    log, derived = logged_actions(monkeypatch), session_plan.derive

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

        # holding takes no time on the virtual clock
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
    return [(what, blocks[chunk] - 1) for what, chunk in log if blocks[chunk]]


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
    layer = BlockShape("layer", 10_000, 1e9, 0.0, 0.0)
    log = logged_actions(monkeypatch)
    simulate(
        Plan(placement(name), staleness=staleness, memory=PlanMemory(slots=slots)),
        cluster,
        ModelShape("m", layer.times(DEPTH), 1),
        Constants(),
        traced=True,
    )
    return log  # each block is a single chunk


def steps(log, block):
    """Return the actions on a block between successive gradients, without pulls, and the number of
    answered pulls."""
    out, now, answers = [], [], 0
    for what, number in log:
        if number != block:
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
def test_a_simulated_step_has_the_order_of_a_real_step(
    name, on_files, staleness, slots, tmp_path, monkeypatch
):
    ran = real(monkeypatch, tmp_path / "store" if on_files else None, staleness, slots)
    predicted = simulated(monkeypatch, name, staleness, slots)
    for block in range(DEPTH):
        ran_steps, simulated_steps = steps(ran, block), steps(predicted, block)
        # the second step: both are in steady state
        assert ran_steps[1][0] == simulated_steps[1][0], block
        assert ran_steps[1][1] == simulated_steps[1][1], (block, ran_steps, simulated_steps)
    # in the order of backward and of the next forward
    for what in ("Hold", "Read" if on_files else "Update"):
        orders = [
            [block for kind, block in log if kind == what][DEPTH : 2 * DEPTH]
            for log in (ran, predicted)
        ]
        assert orders[0] == orders[1], what
    assert {what for what, _ in ran} == {what for what, _ in predicted}
    assert Counter(what for what, _ in ran)["Hold"] == STEPS * DEPTH
