"""Reading the lines of a run that may still grow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from roadtrain.config.job import make_job
from roadtrain.errors import ConfigError
from roadtrain.training.run_lines import LineTail, RunLines, wear_rows


def line(step: int, **more: Any) -> dict[str, Any]:
    stages = {"Write": {"seconds": 0.1, "bytes": 1000}, "Wait": {"seconds": 0.1, "bytes": 0}}
    values = {"step": step, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 10, "seconds": 0.5}
    return {**values, "stages": stages, **more}


def text(*steps: int) -> str:
    return "".join(json.dumps(line(step)) + "\n" for step in steps)


def steps_of(tail: LineTail) -> tuple[bool, list[int]]:
    anew, lines = tail.read()
    return anew, [line["step"] for line in lines]


def test_a_tail_reads_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    assert steps_of(tail) == (False, [])
    path.write_text(text(1, 2))
    assert steps_of(tail) == (True, [1, 2])
    with open(path, "a") as file:
        file.write(text(3) + '{"step": 4, "lo')
    assert steps_of(tail) == (False, [3])
    with open(path, "a") as file:
        file.write('damaged\n{"no step": 1}\n[]\n' + text(5))
    with open(path, "ab") as raw:
        raw.write(b'{"step": 6, "loss": "\xff"}\n')  # no text
    assert steps_of(tail) == (False, [5])
    path.write_text(text(1))  # shorter: uncommitted lines were removed
    assert steps_of(tail) == (True, [1])
    other = tmp_path / "other"
    other.write_text(text(7, 8, 9))
    other.rename(path)
    assert steps_of(tail) == (True, [7, 8, 9])
    tail.rewind()
    assert steps_of(tail) == (True, [7, 8, 9])


def test_a_tail_begins_near_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text(*range(1, 101)))
    steps = steps_of(LineTail(path, tail=3 * len(text(100))))[1]
    assert steps[-1] == 100 and 2 <= len(steps) <= 3


def test_lines_are_added_up() -> None:
    job = make_job({"model": {"config": {"model_type": "llama"}}, "run": {"steps": 100}})
    run = RunLines.of([line(1), line(2, loss=None, grad_norm=None), line(3, loss=4.0)])
    assert run.step == 3 and run.tokens == 30 and run.seconds == 1.5
    assert math.isnan(run.curves["loss"][1]) and run.curves["loss"][2] == 4.0
    assert run.loss == 3.0 and run.tokens_per_s == 20.0 and run.left_s(job) == 97 * 0.5
    assert run.durable == 1  # the last but one update may be in flight
    assert RunLines.of([line(3, committed=2)]).durable == 2
    assert RunLines().durable == -1 and math.isnan(RunLines().loss)
    memory = {"host": {"bytes": 7, "budget": 9}}
    run = RunLines.of(line(step, loss=100.0 - step, memory=memory) for step in range(1, 101))
    assert run.first_and_last() == (97.0, 2.0)  # of 5 steps each
    assert run.waited_s == pytest.approx(10.0) and run.resident == 7
    assert all(map(math.isnan, RunLines().first_and_last()))


def test_the_wear_of_ssds() -> None:
    tree = {"model": {"config": {"model_type": "llama"}}, "store": {"files": ["/a", "/b"]}}
    run = RunLines.of([line(1), line(2)])
    wear = dict(wear_rows(make_job(tree), run, 1e-6))
    assert wear["written so far"] == "2.0 KiB to 2 directories, 2 kB/s while training"
    assert wear["endurance used"].startswith("0.1000% of 1e-06 TBW per device (as specified)")
    assert wear["endurance lasts"].startswith("16.7 min of training")
    assert "assumed" in dict(wear_rows(make_job(tree), run, None))["endurance used"]
    assert len(wear_rows(make_job(tree), RunLines(), None)) == 1
    in_memory = make_job({**tree, "store": {"files": []}})
    assert "lost when the process ends" in wear_rows(in_memory, run, None)[0][1]
    with pytest.raises(ConfigError, match="--endurance-tbw 0 is not above 0"):
        wear_rows(make_job(tree), run, 0.0)
