"""A killed script resumes with its schedule, data order and random state; differences between script
and store are reported."""

from __future__ import annotations

import json
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import roadtrain
from roadtrain.errors import ConfigError, LoopError
from tests.support.models import Case, build, new_scaler, one_step
from tests.support.tracked_run import SCHEDULERS
from tests.support.warm_python import warm_python

also = partial(pytest.param, marks=pytest.mark.exhaustive)
SUPPORT = Path(__file__).parents[2] / "support"
STEPS = 14  # of 6 batches an epoch
BASE = {"scheduler": "LambdaLR", "workers": 0}
SMALL = {"host_budget": "128MiB"}


def script(store, steps=STEPS, **options):
    """Run the script; return the lines of its steps, its other lines and the process."""
    words = [SUPPORT / "tracked_run.py", store, steps, json.dumps(BASE | options)]
    process = subprocess.run(
        [warm_python(), *map(str, words)], capture_output=True, text=True, timeout=300
    )
    lines = process.stdout.splitlines()
    steps = [line for line in lines if line.split()[0].isdigit()]
    return steps, [line for line in lines if line not in steps], process


def check_kills(tmp_path, kills, **options):
    """Rule 3. Check that the same command, after a kill at each of `kills`, repeats the losses of an
    uninterrupted run."""
    whole, _, process = script(tmp_path / "whole", **options)
    assert len(whole) == STEPS, process.stderr
    for kill in kills:
        first, _, process = script(tmp_path / f"{kill}", kill=kill, **options)
        number = getattr(signal, options.get("signal", "SIGKILL"))
        assert process.returncode == -number, process.stderr
        later, other_lines, process = script(tmp_path / f"{kill}", **options)
        assert later and process.returncode == 0, process.stderr
        first_step = int(later[0].split()[0])
        assert kill[0] - 1 <= first_step <= kill[0] + 1 and later == whole[first_step - 1 :]
        assert first == whole[: len(first)]
        assert not [line for line in other_lines if "in the script" in line or "track(" in line]


@pytest.mark.parametrize(
    "options",
    [
        {},
        also({"generator": True}),
        also({"evaluates": True}),
        also({"accumulate": 4}),
        {"streamed": True},
    ],
    ids=str,
)
@pytest.mark.timeout(400)
def test_a_killed_script_resumes(tmp_path, options):
    """Kills happen between step() and scheduler.step() and at the end of an epoch, too."""
    check_kills(tmp_path, [[4, "step"], [6, "end"], [7, "end"]], **options)


def test_a_killed_script_with_loader_processes_resumes(tmp_path):
    check_kills(tmp_path, [[8, "end"]], workers=2)


@pytest.mark.parametrize(
    "name",
    [name if name in ("SequentialLR", "ReduceLROnPlateau") else also(name) for name in SCHEDULERS],
)
def test_each_scheduler_resumes(tmp_path, name):
    check_kills(tmp_path, [[5, "step"]], scheduler=name)


def test_an_interrupted_script_resumes(tmp_path):
    """A KeyboardInterrupt between step() and scheduler.step() ends the script, which closes."""
    check_kills(tmp_path, [[5, "step"]], signal="SIGINT")


def test_a_scheduler_that_is_not_tracked_is_reported(tmp_path):
    _, other_lines, _ = script(tmp_path / "s", steps=3, tracked=False)
    assert not any("schedule starts" in line for line in other_lines)
    _, other_lines, _ = script(tmp_path / "s", steps=5, tracked=False)
    assert sum("schedule starts from its beginning" in line for line in other_lines) == 1
    _, other_lines, _ = script(tmp_path / "s", steps=7)
    assert sum("has no state of 'scheduler' at step 5" in line for line in other_lines) == 1


def test_objects_that_are_no_longer_tracked_are_reported(tmp_path):
    script(tmp_path / "s", steps=3)
    _, other_lines, _ = script(tmp_path / "s", steps=5, tracked=False)
    for name in ("scheduler", "loader"):
        assert (
            sum(f"state of '{name}' at step 3 is not restored" in line for line in other_lines) == 1
        )


def test_an_edited_rate_of_a_schedule_is_reported(tmp_path):
    whole, _, _ = script(tmp_path / "whole")
    script(tmp_path / "s", steps=3)
    later, other_lines, _ = script(tmp_path / "s", edited={"lr": 0.25, "weight_decay": 0.5})
    reports = [line for line in other_lines if "in the script" in line]
    assert len(reports) == 2
    assert any(
        "lr is 0.25 in the script and 0.01 in the store" in line and "store's schedule" in line
        for line in reports
    )
    assert "weight_decay is 0.5 in the script and 0.01 in the store: the script's" in reports[1]
    assert [line.split()[2] for line in later] == [line.split()[2] for line in whole[3:]]


def run_until(store, steps, printed, lr=1e-2, change=None, **groups):
    model, optimizer = build(Case())
    for group in optimizer.param_groups:
        group |= {"lr": lr, **groups}
    with roadtrain.place(model, optimizer, store=store, report=printed.append, **SMALL) as placed:
        before = placed.param_groups[0] | {"params": None}
        while placed.steps_done < steps:
            one_step(Case(), model, placed, new_scaler(Case()), placed.steps_done)
            for group in placed.param_groups if change else ():
                group["lr"] = change
    return before


def test_edited_hyperparameters_are_used(tmp_path):
    """Without a schedule the script's values are used, and values that the loop changed are resumed."""
    printed = []
    run_until(tmp_path / "s", 2, printed)
    assert not [line for line in printed if "script" in line]
    before = run_until(tmp_path / "s", 4, printed, lr=0.5, betas=(0.5, 0.6), change=0.125)
    assert (before["lr"], before["betas"]) == (0.5, (0.5, 0.6))
    reports = [line for line in printed if "script" in line]
    assert reports == [
        "lr is 0.5 in the script and 0.01 in the store: the script's is used",
        "betas is (0.5, 0.6) in the script and (0.9, 0.999) in the store: the script's is used",
    ]
    del printed[:]
    assert run_until(tmp_path / "s", 5, printed, lr=0.5, betas=(0.5, 0.6))["lr"] == 0.125
    assert not [line for line in printed if "script" in line]
    assert (
        run_until(tmp_path / "s", 6, printed, lr=torch.tensor(0.25), betas=(0.5, 0.6))["lr"] == 0.25
    )
    assert "lr is 0.25 in the script and 0.5 in the store (0.125 now): the script's" in str(printed)


def test_only_objects_with_a_state_are_tracked(tmp_path):
    model, optimizer = build(Case())
    store = {"store": tmp_path / "s", "report": lambda _: None, **SMALL}
    with roadtrain.place(model, optimizer, **store) as placed:
        with pytest.raises(ConfigError, match="'loader' is a list") as refused:
            placed.track(loader=[1, 2])
        assert "DataLoader" in refused.value.hint
        with pytest.raises(ConfigError, match="'optimizer' is a PlacedOptimizer"):
            placed.track(optimizer=placed)
        generator = torch.Generator().manual_seed(1)
        placed.track(generator=generator)
        one_step(Case(), model, placed, new_scaler(Case()), 0)
        drawn = torch.rand(3, generator=generator)
    model, optimizer = build(Case())
    with roadtrain.place(model, optimizer, **store) as placed:
        generator = torch.Generator().manual_seed(7)
        placed.track(generator=generator)
        assert torch.equal(torch.rand(3, generator=generator), drawn)
        one_step(Case(), model, placed, new_scaler(Case()), 1)
        with pytest.raises(LoopError, match="after step 2, but this run resumed step 1"):
            placed.track(more=generator)


def test_looking_at_a_batch_does_not_advance_the_data(tmp_path):
    def part(steps, peek):
        model, optimizer = build(Case())
        loader = DataLoader(range(9), batch_size=2, shuffle=True)
        store = tmp_path / f"look{peek}"
        placed = roadtrain.place(model, optimizer, store=store, report=lambda _: None, **SMALL)
        with placed:
            placed.track(loader=loader)
            if peek:
                next(iter(loader))
            batches = []
            while placed.steps_done < steps:
                for batch in loader:
                    batches.append(batch.tolist())
                    one_step(Case(), model, placed, new_scaler(Case()), placed.steps_done)
                    if placed.steps_done == steps:
                        break
        return batches

    for look in (False, True):
        torch.manual_seed(0)
        first = part(3, look)
        torch.manual_seed(1)
        epoch = first + part(5, look)
        assert sorted(i for batch in epoch for i in batch) == list(range(9))
