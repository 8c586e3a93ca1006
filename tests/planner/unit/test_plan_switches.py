"""Summing switches in `plan` and `simulate`: which switches sum, the job keys, and the commands to
start."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from roadtrain.config.cluster import make_cluster
from roadtrain.config.job import ServersSection
from roadtrain.config.plan_file import Plan, placement
from roadtrain.planner import plan as planner
from roadtrain.planner import simulate as simulator
from roadtrain.planner import switches
from roadtrain.planner.candidates import candidates
from roadtrain.planner.job_file import job_text
from roadtrain.planner.plan_report import words
from roadtrain.planner.search import scaled, search
from roadtrain.simulator.run import simulate
from roadtrain.stages.parallelism import Parallelism
from roadtrain.switch.options import FanIn, SwitchNode
from tests.support.plans import WHOLE, lump, racks


def node(workers: int, **changes: object) -> Plan:
    return Plan(placement("optimizer-node"), Parallelism(dp=workers)).changed(**changes)


def keys(plan: Plan, *workers: int, **more: object) -> dict:
    text = job_text(plan, racks(*workers, **more))
    assert text is not None
    return tomllib.loads(text)["servers"]


def test_a_job_names_its_switch() -> None:
    assert keys(node(3), 3)["switches"] == ["root:PORT"]
    assert keys(node(3), 3)["wire"] == "int32" and "window" not in keys(node(3), 3)
    narrow = keys(node(3, wire="int16", window=256), 3)
    assert (narrow["wire"], narrow["window"]) == ("int16", 256)


def test_a_job_names_a_tree() -> None:
    """switch/options.py accepts the keys: each worker is below a single switch."""
    trees = keys(node(5), 2, 3)["switches"]
    nodes = [SwitchNode(**{**table, "workers": tuple(table["workers"])}) for table in trees]
    tree = FanIn(tuple(nodes))
    tree.check(5)
    assert tree.root.address == "root:PORT"
    assert tree.place_of(4, 5)[0].address == "rack1:PORT"


@pytest.mark.parametrize(
    ("racks_of", "changes"), [((3,), {"wire": "int8"}), ((2, 3), {"window": 64})]
)
def test_a_job_accepts_the_keys_of_the_plan(racks_of: tuple, changes: dict) -> None:
    written = job_text(node(sum(racks_of), **changes), racks(*racks_of))
    assert written is not None
    section = ServersSection(**tomllib.loads(written.replace(":PORT", ":7000"))["servers"])
    assert section.fan_in is not None
    section.fan_in.check(sum(racks_of))
    assert section.fan_in.wire == changes.get("wire", "int32")
    assert section.fan_in.window == changes.get("window", 2048)
    tree = switches.tree_of(node(sum(racks_of)), racks(*racks_of))
    assert tree is not None
    for rank, at in enumerate(tree.at):
        assert section.fan_in.place_of(rank, sum(racks_of))[0].address == f"{at}:7000"


def test_a_plan_on_part_of_the_cluster_names_only_its_racks() -> None:
    assert keys(node(2), 2, 3)["switches"] == [
        {"address": "root:PORT", "workers": []},
        {"address": "rack0:PORT", "parent": "root:PORT", "workers": [0, 1]},
    ]


def test_hosts_of_several_devices_have_a_relay() -> None:
    """The relay stands for its workers, as in the simulation of a host's devices."""
    where = racks(2)
    hosts = [h.model_copy(update={"devices": 2, "fabric": 1e11}) for h in where.workers]
    where = where.model_copy(update={"hosts": (*hosts, *where.spares)})
    text = job_text(node(4), where)
    assert text is not None and tomllib.loads(text)["servers"]["relay"] == switches.RELAY


def test_the_commands_to_start_are_listed() -> None:
    lines = switches.commands(node(5), racks(2, 3))
    assert [line.split()[2] for line in lines] == [
        f"{n}:PORT" for n in ("root", "rack0", "rack1", "node")
    ]
    assert all("--switch" in line for line in lines[:3]) and "--store" in lines[3]
    assert switches.commands(Plan(placement("ddp"), Parallelism(dp=2)), racks(2)) == ()


def test_the_report_names_switches_and_integers() -> None:  # Rule 2
    plan, where, model = node(4, wire="int8"), racks(2, 2), lump(1e7)
    result = simulate(plan, where, model, WHOLE, checked=False)
    text = simulator.report(result, where, model, WHOLE)
    assert (
        "summed  by root, rack0 (below root), rack1 (below root): gradients are sent as int8"
        in text
    )
    assert "copied by the switches" in text
    assert "summed by switches as int8" in words(plan)


def test_the_reason_for_no_switch_is_reported() -> None:
    """A summing switch pays off from a few workers on: as int32 each worker sends twice the bytes
    of bf16, while a server without a switch receives the gradients of each worker."""
    mute, able, few = racks(8, sums=False), racks(8), racks(2)
    names = ["optimizer-node", "server"]
    answer = search(mute, lump(1e7, 1e9), WHOLE, batch=8, placements=names, explain=False)
    [why] = answer.families["optimizer-node"].refused
    assert "cannot sum in switches: no switch of cluster 'cluster' sums" in why
    for where, batch, best in ((able, 8, "optimizer-node"), (few, 2, "server")):
        answer = search(where, lump(1e7, 1e9), WHOLE, batch=batch, placements=names, explain=False)
        assert answer.pick is not None and answer.pick.plan.placement.name == best


def test_candidates_fit_the_slots() -> None:
    for plan in candidates(racks(2, slots=1000), lump(1e7), batch=2, placements=["optimizer-node"]):
        assert plan.packets.window == 512


def test_faster_switches_are_tried() -> None:
    assert "switches" not in scaled(racks(2), 2.0)
    [root] = scaled(racks(2, packet_rate=1e6), 2.0)["switches"].switches
    assert root.packet_rate == 2e6


def test_a_cluster_is_written_and_read_back() -> None:
    where = racks(2, 2, slots=4096, packet_rate=1e6, rate="10GB/s")
    again = make_cluster(tomllib.loads(where.to_toml()))
    assert again.switches == where.switches and again.switches[1].rate == 10e9


def test_switches_joined_by_another_switch_reach_each_other() -> None:
    """The path has two links: it gets the rate of the slower link and the latency of both."""
    where = racks(1, 1, link=5e8)
    left, right = where.common(where.workers)
    assert left.total == right.total == 5e8
    assert where.between([where.workers[0].nics[0], where.workers[1].nics[0]]) == 5e8


@pytest.mark.slow
def test_the_command_writes_plan_and_job(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cluster, out, job = (tmp_path / name for name in ("cluster.toml", "plan.toml", "job.toml"))
    cluster.write_text(racks(2, 2).to_toml())
    code = planner.command(
        str(cluster),
        model="GPT-2",
        batch=4,
        placements="optimizer-node",
        out=str(out),
        job_file=str(job),
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert "start   roadtrain serve rack0:PORT --switch" in printed
    assert tomllib.loads(job.read_text())["servers"]["switches"][0]["address"] == "root:PORT"
    assert tomllib.loads(out.read_text())["packets"]["wire"] == "int32"
