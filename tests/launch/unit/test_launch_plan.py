"""From a plan to a job: `parallelism = "auto"`, and predictions beside measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roadtrain.config.job import load_job, make_job
from roadtrain.errors import ConfigError
from roadtrain.launch import status_command
from roadtrain.training.command import command as train
from roadtrain.training.predicted import compared, predicted_for

MODEL: dict[str, Any] = {"config": {"model_type": "llama"}}
STAGES = {"stage 0": {"Forward": 0.1, "Wait": 0.4}, "stage 1": {"Forward": 0.3, "Backward": 0.5}}


def test_a_job_may_leave_its_parallelism_to_the_plan(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('parallelism = "auto"\n[model.config]\nmodel_type = "llama"\n')
    job = load_job(path)
    assert job.parallelism.auto and not job.parallelism.used
    with pytest.raises(ConfigError, match="roadtrain launch"):
        train(str(path), {})
    path.write_text(job.to_toml())
    assert load_job(path) == job  # as a table
    assert job.changed({"parallelism.auto": False, "parallelism.dp": 2}).parallelism.used
    with pytest.raises(ConfigError, match="parallelism"):
        make_job({"model": MODEL, "parallelism": "automatic"})


def test_each_line_records_the_prediction_for_its_stage():
    assert predicted_for(make_job({"model": MODEL}), 0, 0) == {}
    own = {"stage 0 replica 1": {"Forward": 0.2}}
    job = make_job({"model": MODEL, "predicted": {"seconds": 1.0, "stages": STAGES | own}})
    [line] = predicted_for(job, 0, 1).values()
    assert line == {"where": "stage 0 replica 1", "seconds": 1.0, "stages": {"Forward": 0.2}}
    assert predicted_for(job, 1, 1)["predicted"]["stages"] == STAGES["stage 1"]
    assert predicted_for(job, 7, 0)["predicted"] == {
        "where": "stage 7",
        "seconds": 1.0,
        "stages": {},
    }
    assert make_job(json.loads(job.model_dump_json())) == job


def lines(job: Any, stage: int, forward: float) -> str:
    """25 lines of metrics, with first steps that take ten times as long."""
    out = []
    for step in range(1, 26):
        times = 10.0 if step <= 5 else 1.0
        line = {
            "step": step,
            "loss": 1.0,
            "tokens": 10,
            "seconds": 2.0 * times,
            "stages": {"Forward": {"seconds": forward * times, "bytes": 0}},
        }
        out.append(json.dumps(line | predicted_for(job, stage, 0)))
    return "\n".join(out) + "\n"


def test_status_shows_predicted_beside_measured_of_every_stage(tmp_path: Path):
    run = {"dir": str(tmp_path)}
    job = make_job({"run": run, "model": MODEL, "predicted": {"seconds": 1.0, "stages": STAGES}})
    (tmp_path / "job.toml").write_text(job.to_toml())
    (tmp_path / "metrics.jsonl").write_text(lines(job, 0, 0.2))
    for rank, stage, forward in ((1, 0, 9.0), (2, 1, 0.15), (10, 1, 9.0)):
        (tmp_path / f"metrics.{rank}.jsonl").write_text(lines(job, stage, forward))
    (tmp_path / "metrics.uncommitted.jsonl").write_text(lines(job, 3, 1.0))
    printed: list[str] = []
    status_command.command(str(tmp_path), report=printed.append)
    rows = [" ".join(line.split()) for line in printed]
    tables = rows[rows.index("stage 0 predicted measured ratio") :]
    assert tables == [
        "stage 0 predicted measured ratio",
        "a step 1 s 2 s 2.00",
        "Forward 100 ms 200 ms 2.00",
        "Wait 400 ms - -",
        "stage 1 predicted measured ratio",
        "a step 1 s 2 s 2.00",
        "Forward 300 ms 150 ms 0.50",
        "Backward 500 ms - -",
    ]


def test_steps_of_an_earlier_plan_and_renamed_files_are_not_compared(tmp_path: Path):
    def of(seconds: float) -> Any:
        predicted = {"seconds": seconds, "stages": STAGES}
        return make_job({"run": {"dir": str(tmp_path)}, "model": MODEL, "predicted": predicted})

    last = lines(of(2.0), 0, 0.2).splitlines()[-3:]
    (tmp_path / "metrics.jsonl").write_text(lines(of(9.0), 0, 9.0) + "\n".join(last) + "\n")
    (tmp_path / "metrics.1.before-1.jsonl").write_text(lines(of(9.0), 1, 9.0))
    [table] = compared(tmp_path)
    assert table[1:3] == [("a step", "2 s", "2 s", "1.00"), ("Forward", "100 ms", "200 ms", "2.00")]
