"""The same command continues a killed run of Hugging Face's Trainer: losses, logged means, schedule
and the order of the data are those of an undisturbed run (Rule 3)."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python import warm_python

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
SUPPORT = Path(__file__).parents[2] / "support"


def script(home, **options):
    """Run the script. Returns its lines of steps and means, and the completed process."""
    words = [SUPPORT / "trainer_run.py", home / "store", home / "out", json.dumps(options)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [warm_python(), *map(str, words)], capture_output=True, text=True, env=env, timeout=170
    )
    lines = [line for line in done.stdout.splitlines() if line.split()[0] in ("step", "mean")]
    return lines, done


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """`whole(**options)` returns the lines of an undisturbed run."""

    @functools.cache
    def run_once(**options):
        lines, done = script(tmp_path_factory.mktemp("whole"), **options)
        assert done.returncode == 0, done.stderr
        assert sum(line.startswith("step") for line in lines) == 12
        return lines

    return run_once


def kill_and_continue(home, expected, kill, **options):
    """Kill a run and continue it, which repeats at most the step of the kill."""
    first, done = script(home, kill=kill, **options)
    assert done.returncode == -signal.SIGKILL, done.stderr
    resume = options.pop("resume_after", None)
    later, done = script(home, resume=resume, **options)
    assert done.returncode == 0, done.stderr
    steps = [line for line in later if line.startswith("step")]
    assert int(steps[0].split()[1]) in (kill, kill + 1)
    assert set(first) | set(later) == set(expected) and not set(later) - set(expected)
    return later


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        pytest.param(
            (10,), {}, marks=pytest.mark.exhaustive
        ),  # at the end of an epoch of five steps
        ((4,), {"accumulate": 2}),
        pytest.param((7,), {"seedable": False}, marks=pytest.mark.exhaustive),
        pytest.param((3, 5, 6, 9), {}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_same_command_continues_a_killed_run(tmp_path, whole, kills, options):
    expected = whole(**options)
    for kill in kills:
        kill_and_continue(tmp_path / str(kill), expected, kill, **options)


@pytest.mark.slow
def test_a_command_that_resumes_its_last_checkpoint_continues(tmp_path, whole):
    """The checkpoint is of step 4, and the store is at a later step."""
    expected = whole()
    home = tmp_path / "killed"
    kill_and_continue(home, expected, 7, resume_after=True)
    assert script(home, resume=True)[0] == []  # all steps are done
    # an earlier checkpoint would rewind the run, which the store cannot
    _, done = script(home, resume=str(home / "out" / "checkpoint-4"))
    assert done.returncode and "Nothing was changed" in done.stderr


@pytest.mark.slow
def test_a_store_without_progress_of_a_trainer_is_refused(tmp_path):
    """Its values would be trained with a step count, schedule and data from the beginning."""
    (tmp_path / "plain.py").write_text(
        (SUPPORT / "trainer_run.py")
        .read_text()
        .replace("trainer.train(", "trainer.create_optimizer_and_scheduler(12)\nplain(")
        .replace(
            "store, out, options",
            "def plain(**_):\n"
            "    placed = trainer.optimizer\n"
            "    del placed.job_state.tracked['trainer']\n"
            "    trainer.model(**{k: v[None] for k, v in data[0].items()}).loss.backward()\n"
            "    placed.step()\n"
            "    placed.close()\n"
            "    raise SystemExit\n\n\nstore, out, options",
            1,
        )
    )
    words = [tmp_path / "plain.py", tmp_path / "store", tmp_path / "out", "{}"]
    done = subprocess.run([warm_python(), *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines, done = script(tmp_path)
    assert done.returncode and not lines
    assert "the store is at step 1, but has no progress of a Trainer" in done.stderr
