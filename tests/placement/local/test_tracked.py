"""A killed script goes on where it was: schedule, data order, random state. What it was given anew
is said."""

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
    """The lines of steps, the other lines, and how the process ended."""
    words = [SUPPORT / "tracked_run.py", store, steps, json.dumps(BASE | options)]
    done = subprocess.run(
        [warm_python(), *map(str, words)], capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    steps = [line for line in lines if line.split()[0].isdigit()]
    return steps, [line for line in lines if line not in steps], done


def survives(tmp_path, kills, **options):
    """Rule 3. Killed at each of `kills`, the same command repeats the losses of a run that was
    not."""
    whole, _, done = script(tmp_path / "whole", **options)
    assert len(whole) == STEPS, done.stderr
    for at in kills:
        first, _, done = script(tmp_path / f"{at}", kill=at, **options)
        number = getattr(signal, options.get("signal", "SIGKILL"))
        assert done.returncode == -number, done.stderr
        later, said, done = script(tmp_path / f"{at}", **options)
        assert later and done.returncode == 0, done.stderr
        begun = int(later[0].split()[0])
        assert at[0] - 1 <= begun <= at[0] + 1 and later == whole[begun - 1 :]
        assert first == whole[: len(first)]
        assert not [line for line in said if "in the script" in line or "track(" in line]


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
def test_a_killed_script_goes_on(tmp_path, options):
    """Also between step() and scheduler.step(), and at the end of an epoch."""
    survives(tmp_path, [[4, "step"], [6, "end"], [7, "end"]], **options)


def test_a_script_with_loader_processes_goes_on(tmp_path):
    survives(tmp_path, [[8, "end"]], workers=2)


@pytest.mark.parametrize(
    "name",
    [name if name in ("SequentialLR", "ReduceLROnPlateau") else also(name) for name in SCHEDULERS],
)
def test_each_scheduler_goes_on(tmp_path, name):
    survives(tmp_path, [[5, "step"]], scheduler=name)


def test_an_interrupted_script_goes_on(tmp_path):
    """It ends by KeyboardInterrupt between step() and scheduler.step(), and closes."""
    survives(tmp_path, [[5, "step"]], signal="SIGINT")


def test_a_scheduler_that_is_not_tracked_is_said(tmp_path):
    _, said, _ = script(tmp_path / "s", steps=3, tracked=False)
    assert not any("schedule starts" in line for line in said)
    _, said, _ = script(tmp_path / "s", steps=5, tracked=False)
    assert sum("schedule starts from its beginning" in line for line in said) == 1
    _, said, _ = script(tmp_path / "s", steps=7)
    assert sum("has no state of 'scheduler' at step 5" in line for line in said) == 1


def test_what_is_tracked_no_more_is_said(tmp_path):
    script(tmp_path / "s", steps=3)
    _, said, _ = script(tmp_path / "s", steps=5, tracked=False)
    for name in ("scheduler", "loader"):
        assert sum(f"state of '{name}' at step 3 is not restored" in line for line in said) == 1


def test_an_edited_rate_of_a_schedule_is_said(tmp_path):
    whole, _, _ = script(tmp_path / "whole")
    script(tmp_path / "s", steps=3)
    later, said, _ = script(tmp_path / "s", edited={"lr": 0.25, "weight_decay": 0.5})
    about = [line for line in said if "in the script" in line]
    assert len(about) == 2
    assert any(
        "lr is 0.25 in the script and 0.01 in the store" in line and "store's schedule" in line
        for line in about
    )
    assert "weight_decay is 0.5 in the script and 0.01 in the store: the script's" in about[1]
    assert [line.split()[2] for line in later] == [line.split()[2] for line in whole[3:]]


def resumed(store, steps, said, lr=1e-2, change=None, **groups):
    model, optimizer = build(Case())
    for group in optimizer.param_groups:
        group |= {"lr": lr, **groups}
    with roadtrain.place(model, optimizer, store=store, report=said.append, **SMALL) as placed:
        before = placed.param_groups[0] | {"params": None}
        while placed.steps_done < steps:
            one_step(Case(), model, placed, new_scaler(Case()), placed.steps_done)
            for group in placed.param_groups if change else ():
                group["lr"] = change
    return before


def test_edited_hyperparameters_count(tmp_path):
    """Without a schedule, the script's; and what the loop had changed is resumed."""
    said = []
    resumed(tmp_path / "s", 2, said)
    assert not [line for line in said if "script" in line]
    before = resumed(tmp_path / "s", 4, said, lr=0.5, betas=(0.5, 0.6), change=0.125)
    assert (before["lr"], before["betas"]) == (0.5, (0.5, 0.6))
    about = [line for line in said if "script" in line]
    assert about == [
        "lr is 0.5 in the script and 0.01 in the store: the script's is used",
        "betas is (0.5, 0.6) in the script and (0.9, 0.999) in the store: the script's is used",
    ]
    del said[:]
    assert resumed(tmp_path / "s", 5, said, lr=0.5, betas=(0.5, 0.6))["lr"] == 0.125
    assert not [line for line in said if "script" in line]
    assert resumed(tmp_path / "s", 6, said, lr=torch.tensor(0.25), betas=(0.5, 0.6))["lr"] == 0.25
    assert "lr is 0.25 in the script and 0.5 in the store (0.125 now): the script's" in str(said)


def test_only_what_has_a_state_is_tracked(tmp_path):
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


def test_a_look_at_the_data_does_not_move_it(tmp_path):
    def part(steps, seen):
        model, optimizer = build(Case())
        loader = DataLoader(range(9), batch_size=2, shuffle=True)
        store = tmp_path / f"look{seen}"
        placed = roadtrain.place(model, optimizer, store=store, report=lambda _: None, **SMALL)
        with placed:
            placed.track(loader=loader)
            if seen:
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
