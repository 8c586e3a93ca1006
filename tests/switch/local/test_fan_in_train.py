"""Training whose gradients are summed by switches: servers, switches and workers run in separate
processes. Integer sums do not depend on the order of packets, so runs repeat their bits (Rule 1).
After the death of any process the same command continues at the last committed step (Rule 3)."""

import os
import re
import signal
import time

import pytest
import torch

from roadtrain import FanIn, SwitchNode
from tests.support.models import Case
from tests.support.processes import HostProcess, SwitchProcess, Workers, losses

CLIPPED = "clipped, accumulated, scaler"
CASES = {
    "plain": Case(eager=True),
    CLIPPED: Case(clip=0.5, accumulate=2, scaler=True, groups=True),
    "late, bf16": Case(dtype=torch.bfloat16, eager=True, staleness=1),
    "newest": Case(eager=True, staleness=2),
    "frozen, bf16": Case(frozen=True, dtype=torch.bfloat16, eager=True),
}
STEPS = 4


def exhaustive(*values):
    """A case that runs only with --exhaustive."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.fixture
def switches(tmp_path):
    """`switches(n)` starts n more processes; `switches.all` lists all of them."""
    processes = []

    def make(n=1, **options):
        processes.extend(
            SwitchProcess(tmp_path / f"switch{len(processes)}.log", **options) for _ in range(n)
        )
        return processes[-n:]

    make.all = processes
    yield make
    for switch in processes:
        switch.kill()


def single_switch(switches, **options):
    """Return a plan with a single switch."""
    return FanIn((SwitchNode(switches()[0].where),), **{"window": 256, **options})


def trained(case, servers, home, plan, workers=2, steps=STEPS, **options):
    home.mkdir(exist_ok=True)
    run = Workers(case, servers, home, steps, workers, fan_in=plan, **options)
    assert run.join() == [0] * workers, (run.errors(), run.notes())
    return [losses(log) for log in run.logs]


@pytest.mark.parametrize(
    "name", ["late, bf16", *map(exhaustive, ("plain", "newest", "frozen, bf16", CLIPPED))]
)
def test_a_run_repeats_its_bits(name, addresses, switches, tmp_path):
    case, plan = CASES[name], single_switch(switches)
    first = trained(case, addresses(1), tmp_path / "first", plan)
    assert len(first[0]) == STEPS + 1  # the steps and the hash of all state
    if name != "newest":
        assert trained(case, addresses(1), tmp_path / "again", plan) == first


def test_lost_packets_change_no_loss(addresses, switches, tmp_path):
    case = CASES[CLIPPED]
    whole = trained(case, addresses(1), tmp_path / "whole", single_switch(switches, wire="int16"))
    lossy = FanIn((SwitchNode(switches(loss=0.01)[0].where),), wire="int16", window=256)
    servers = addresses(1, fault=("lose", 0.01))
    assert trained(case, servers, tmp_path / "lossy", lossy, loss=0.01) == whole


@pytest.mark.parametrize("wire", ["int32", exhaustive("int16"), exhaustive("int8")])
def test_sums_are_close_to_those_over_tcp(wire, addresses, switches, tmp_path):  # Rule 2
    case = Case(eager=True)
    plain = Workers(case, addresses(1), tmp_path, STEPS, 2)
    assert plain.join() == [0, 0], plain.errors()
    exact = losses(plain.logs[0])
    summed = trained(case, addresses(1), tmp_path / wire, single_switch(switches, wire=wire))[0]

    def loss_at(steps, step):
        [(line)] = steps[step]
        return float.fromhex(line.split()[0])

    off = [abs(loss_at(summed, str(n)) / loss_at(exact, str(n)) - 1) for n in range(1, STEPS + 1)]
    assert max(off) < {"int32": 1e-4, "int16": 1e-2, "int8": 0.2}[wire], off
    assert summed["end"] != exact["end"]  # the sums did go through the switch


def test_a_worker_may_lack_the_gradient_of_a_block(addresses, switches, tmp_path):
    """Nor does it pull the block's parameters: only the other worker's pull is answered."""
    case, plan = CASES["plain"], single_switch(switches)
    runs = [
        trained(case, addresses(1), tmp_path / str(n), plan, steps=2, changes={1: "skip"})
        for n in (0, 1)
    ]
    assert runs[0] == runs[1]
    both = trained(case, addresses(1), tmp_path / "both", plan, steps=2)
    assert both[0]["end"] != runs[0][0]["end"]


@pytest.mark.parametrize(
    ("name", "workers", "servers", "options"),
    [
        exhaustive("plain", 1, 1, {}),
        (CLIPPED, 2, 2, {}),
        exhaustive("plain", 2, 2, {"replicas": 2}),
        exhaustive("plain", 4, 1, {"relay": "96MiB", "local": 2}),
        exhaustive("late, bf16", 2, 2, {"relay": "96MiB", "local": 1}),
    ],
    ids=["one worker", "two servers", "replicas", "relays of two", "relays of one"],
)
def test_runs_of_every_layout_repeat_their_bits(
    name, workers, servers, options, addresses, switches, tmp_path
):
    case, plan = CASES[name], single_switch(switches)
    runs = [
        trained(case, addresses(servers), tmp_path / str(n), plan, workers, **options)
        for n in (0, 1)
    ]
    assert runs[0] == runs[1] and len(runs[0][0]) == STEPS + 1


def test_two_racks_change_no_bit(addresses, switches, tmp_path):
    """A second switch on the way, and workers below both, leave the sums unchanged."""
    case = CASES["plain"]
    flat = trained(case, addresses(1), tmp_path / "flat", single_switch(switches), 3)
    root, rack = (switch.where for switch in switches(2))
    plan = FanIn(
        (SwitchNode(root, workers=(1,)), SwitchNode(rack, parent=root, workers=(0, 2))), window=256
    )
    assert trained(case, addresses(1), tmp_path / "tree", plan, 3) == flat


def until_step(workers, step):
    deadline = time.monotonic() + 60
    while str(step) not in losses(workers.logs[1]):
        assert time.monotonic() < deadline, f"step {step} is not reached"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of 24 undisturbed steps of two workers with one switch."""
    home = tmp_path_factory.mktemp("whole")
    host, switch = HostProcess(home / "host"), SwitchProcess(home / "switch.log")
    try:
        plan = FanIn((SwitchNode(switch.where),), window=256)
        return trained(Case(eager=True), [host.where], home, plan, steps=24)
    finally:
        host.kill()
        switch.kill()


@pytest.mark.parametrize("victim", ["worker", exhaustive("server"), exhaustive("switch for good")])
# Rule 3, Rule 5
def test_a_kill_is_reported_and_no_committed_step_is_lost(victim, whole, hosts, switches, tmp_path):
    case, plan, steps = Case(eager=True), single_switch(switches), 24
    [host], home = hosts(1), tmp_path / "killed"
    home.mkdir()
    switch = switches.all[0]
    options = {"fan_in": plan, "deadline_s": 4}
    workers = Workers(case, [host.where], home, 1000, 2, **options)
    until_step(workers, 3)
    if victim == "worker":
        os.kill(workers.processes[1].pid, signal.SIGKILL)
    else:
        (host if victim == "server" else switch).kill()
    begin = time.monotonic()
    codes = workers.join(60)
    assert time.monotonic() - begin < 30 and 3 in codes, codes
    errors = "; ".join(workers.errors())
    name = {
        "worker": "worker 1",
        "server": "server 0",
        "switch for good": f"switch {plan.root.address}",
    }[victim]
    assert name in errors and "step" in errors, errors
    done = max(int(s) for s in losses(workers.logs[0]) if s.isdigit())
    assert done < steps, "killed too late to test anything"
    port = int(plan.root.address.rpartition(":")[2])
    if victim == "server":
        [host] = hosts(1, port=int(host.where.rpartition(":")[2]), directory=host.directory)
    elif victim == "switch for good":
        switches(port=port)
    again = Workers(case, [host.where], home, steps, 2, fan_in=plan, session="2")
    assert again.join() == [0, 0], again.errors()
    for continued, expected in zip((losses(log) for log in workers.logs), whole):
        assert {s: continued[s] for s in expected} == expected


@pytest.mark.parametrize(
    "case", ["the root is gone", exhaustive("the root stops"), exhaustive("a rack stops")]
)
def test_a_silent_switch_is_named_by_every_waiting_worker(case, hosts, switches, tmp_path):
    """Rule 5: the error names the switch rather than the device, says since when, and what to
    do."""
    [host], (root, rack) = hosts(1), switches(2)
    nodes = SwitchNode(root.where, workers=(0,)), SwitchNode(rack.where, root.where, (1,))
    options = {"fan_in": FanIn(nodes, window=256), "deadline_s": 6}
    workers = Workers(Case(eager=True), [host.where], tmp_path, 1000, 2, **options)
    until_step(workers, 3)
    stopped = rack if case == "a rack stops" else root
    if case == "the root is gone":
        root.kill()
    else:
        os.kill(stopped.process.pid, signal.SIGSTOP)
    assert workers.join(60) == [3, 3]
    errors = workers.errors()
    # worker 0 has no view below the other switch
    for error in errors[1:] if stopped is rack else errors:
        if "DeadlineError" not in error:  # the other worker's deadline passed first
            assert "worker" in error and "was lost" in error, error
            continue
        assert "in step" in error and f"switch {stopped.where}, " in error, error
        assert re.search(r"since \d\d:\d\d:\d\d UTC", error), error
        assert "hint: restart the silent process, then the job" in error, error
        assert case != "the root is gone" or f"`roadtrain serve {root.where} --switch`" in error
    assert any("DeadlineError" in error for error in errors), errors
    assert not any("raise deadline_s" in error for error in errors[stopped is rack :]), errors


@pytest.mark.exhaustive
def test_a_switch_restart_costs_no_step(whole, hosts, switches, tmp_path):
    case, plan, steps = Case(eager=True), single_switch(switches), 24
    home = tmp_path / "killed"
    home.mkdir()
    workers = Workers(case, [hosts(1)[0].where], home, steps, 2, fan_in=plan)
    until_step(workers, 3)
    switches.all[0].kill()
    done = max(int(s) for s in losses(workers.logs[0]) if s.isdigit())
    assert done < steps, "killed too late to test anything"
    switches(port=int(plan.root.address.rpartition(":")[2]))
    assert workers.join() == [0, 0], workers.errors()
    assert [losses(log) for log in workers.logs] == whole
