"""measure_run() through real agents: hosts at three addresses of this machine."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest

from roadtrain.config.job import make_job
from roadtrain.config.machines import Machines, PlanHost
from roadtrain.config.parallelism import Parallelism
from roadtrain.config.plan import Plan, placement
from roadtrain.config.plan_file import PlanFile
from roadtrain.launch.here import here_engine
from roadtrain.launch.measured_run import measure_run, run_seen
from roadtrain.launch.resolve import resolve

pytestmark = pytest.mark.slow
NAMES = ("a", "b", "c")


def line(step: int, forward: float) -> str:
    stages = {"Forward": {"seconds": forward, "bytes": 0}, "Wait": {"seconds": 9.0, "bytes": 0}}
    predicted = {"where": "stage 0", "seconds": 1.0, "stages": {"Forward": 0.5, "Wait": 0.1}}
    return json.dumps({"step": step, "seconds": 1.5, "stages": stages, "predicted": predicted})


def test_links_and_steps_of_a_runs_hosts(tmp_path: Path) -> None:
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
    engine = here_engine(machines, f"test:{tmp_path}")
    try:
        found = measure_run(engine, run, NAMES)
    finally:
        engine.close()
    assert not found.missing
    assert {(a, b) for a, b, _, _ in found.links} == set(permutations(NAMES, 2))
    assert found.step == 3 and found.seconds == 1.5
    assert run_seen(found).slower == {"a": 1.0, "b": 2.0, "c": 1.0}


def test_hosts_that_share_an_address_have_no_link(tmp_path: Path) -> None:
    machines = Machines((PlanHost(name="a", kind="gpu", address="127.0.0.1", workers=1),))
    job = make_job({"run": {"dir": str(tmp_path)}, "model": {"config": {"model_type": "llama"}}})
    plan = PlanFile(Plan(placement("zero1")), machines)
    run = resolve(plan, job, name="alone", addresses={}, token="t" * 32)
    engine = here_engine(machines, f"test:{tmp_path}")
    try:
        found = measure_run(engine, run, ["a"])
    finally:
        engine.close()
    assert not found.links and not found.workers and not found.missing
