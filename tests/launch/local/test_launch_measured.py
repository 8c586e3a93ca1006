"""measure_run() through real agents: hosts at three addresses of this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from test_launch_supervisor import job_tree, launched

from roadtrain.config.cluster import make_cluster
from roadtrain.config.job import make_job
from roadtrain.config.machines import Machines, PlanHost
from roadtrain.config.plan_file import Plan, PlanFile, load_plan_file, placement
from roadtrain.launch.here import agents_here
from roadtrain.launch.measured_run import measure_run, slower
from roadtrain.launch.resolve import resolve
from roadtrain.planner.machines_of import machines_of
from roadtrain.stages.parallelism import Parallelism
from tests.support.processes import free_port

pytestmark = pytest.mark.slow
NAMES = ("a", "b", "c")


def line(step: int, forward: float) -> str:
    stages = {"Forward": {"seconds": forward, "bytes": 0}, "Wait": {"seconds": 9.0, "bytes": 0}}
    predicted = {"where": "stage 0", "seconds": 1.0, "stages": {"Forward": 0.5, "Wait": 0.1}}
    return json.dumps({"step": step, "seconds": 1.5, "stages": stages, "predicted": predicted})


@pytest.mark.exhaustive  # tests of the planner measure links, tests of calibration measure steps
def test_links_and_steps_of_all_hosts_are_measured(tmp_path: Path) -> None:
    machines = Machines(
        tuple(
            PlanHost(name=name, kind="gpu", address=f"127.0.0.{number + 1}", workers=1)
            for number, name in enumerate(NAMES)
        )
    )
    job = make_job(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"config": {"model_type": "llama"}},
            "parallelism": {"dp": 3},
        }
    )
    plan = PlanFile(Plan(placement("zero1"), Parallelism(dp=3)), machines)
    run = resolve(plan, job, name="measured", addresses={}, token="t" * 32)
    (tmp_path / "run").mkdir()
    for rank, forward in enumerate((0.5, 1.0, 0.5)):
        file = tmp_path / "run" / (f"metrics.{rank}.jsonl" if rank else "metrics.jsonl")
        file.write_text("".join(line(step + 1, forward) + "\n" for step in range(3)))
    engine = agents_here(machines, f"test:{tmp_path}")
    try:
        measured = measure_run(engine, run, NAMES)
    finally:
        engine.close()
    assert not measured.missing
    assert {(link.sender, link.receiver) for link in measured.links} == set(permutations(NAMES, 2))
    assert len(measured.workers) == 3 and measured.seconds == 1.5
    assert slower(measured) == {"a": 1.0, "b": 2.0, "c": 1.0}


def test_hosts_that_share_an_address_have_no_link(tmp_path: Path) -> None:
    machines = Machines((PlanHost(name="a", kind="gpu", address="127.0.0.1", workers=1),))
    job = make_job({"run": {"dir": str(tmp_path)}, "model": {"config": {"model_type": "llama"}}})
    plan = PlanFile(Plan(placement("zero1")), machines)
    run = resolve(plan, job, name="alone", addresses={}, token="t" * 32)
    engine = agents_here(machines, f"test:{tmp_path}")
    try:
        measured = measure_run(engine, run, ["a"])
    finally:
        engine.close()
    assert not measured.links and not measured.workers and not measured.missing


@pytest.mark.exhaustive
def test_a_dry_run_pauses_a_run_to_measure_its_links(tmp_path: Path) -> None:
    """The `roadtrain launch` command, with two hosts at two addresses of this machine."""
    device = {"kind": "cpu", "flops": "10GFLOP/s", "memory": "4GB", "memory_rate": "10GB/s"}
    cluster = make_cluster(
        {
            "hosts": [
                {
                    "name": "gpu",
                    "count": 2,
                    "addresses": ["127.0.0.1", "127.0.0.2"],
                    "device": device,
                    "memory": "4GB",
                    "memory_rate": "10GB/s",
                    "updates": "2GB/s",
                    "sums": "2GB/s",
                    "nics": [{"rate": "10Gbit/s"}],
                }
            ]
        }
    )
    plan = Plan(placement("zero1"), Parallelism(dp=2), micro_batch=2)
    machines = replace(machines_of(plan, cluster), rendezvous_port=free_port())
    with launched(tmp_path, 1, 3000) as run:
        run.plan.write_text(PlanFile(plan, machines, None, cluster).to_toml())
        job = make_job(job_tree(tmp_path, 3000)).changed({"optimizer.accumulate": 2})
        run.job.write_text(job.to_toml([("optimizer", "accumulate"), ("data", "batch_size")]))
        words = ("launch", str(run.plan), str(run.job), "--name", "tiny", "--detach")
        assert run.run(*words)[0] == 0
        run.step_reached(5)
        code, output = run.run("launch", "--replan", "tiny", "--dry-run")
        assert code == 0 and "old plan, predicted" in output and "not measured" not in output, (
            output
        )
        run.step_reached(len(run.lines) + 5)
        assert run.home.is_supervised() and load_plan_file(run.home.plan_path).plan == plan
        assert not run.home.measured_path.exists()  # a measurement is used once
        assert run.run("launch", "--stop", "tiny")[0] == 0
