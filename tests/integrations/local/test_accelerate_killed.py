"""The same command continues a killed accelerate loop, whose scheduler and loader are tracked (Rule
3)."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python import warm_python

pytest.importorskip("accelerate")
SUPPORT = Path(__file__).parents[2] / "support"
STEPS = 11  # an epoch has four batches


def script(store, kill=0):
    """Run the script. Returns its step lines and the completed process."""
    words = [SUPPORT / "accelerate_run.py", store, STEPS, kill]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [warm_python(), *map(str, words)], capture_output=True, text=True, env=env, timeout=170
    )
    return [line for line in done.stdout.splitlines() if line[0].isdigit()], done


@pytest.mark.slow
def test_the_same_command_continues_a_killed_run(tmp_path):
    """The kills are within an epoch and at its end, between step() and scheduler.step()."""
    whole, done = script(tmp_path / "whole")
    assert len(whole) == STEPS, done.stderr
    for kill in (3, 4):
        first, done = script(tmp_path / str(kill), kill)
        assert done.returncode == -signal.SIGKILL, done.stderr
        later, done = script(tmp_path / str(kill))
        assert done.returncode == 0, done.stderr
        assert first == whole[: kill - 1] and later == whole[-len(later) :]
        # at most two steps are uncommitted (docs/one-step.md)
        assert int(later[0].split()[0]) in (kill - 1, kill, kill + 1)
