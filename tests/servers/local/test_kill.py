"""After a SIGKILL during a write or sync, or at a random moment, the same command resumes and
repeats the same losses (Rule 3)."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from benchmarks.soak.power import Power, Strike
from tests.support.models import Case, one_step, place
from tests.support.processes import FORK

STEPS = 150


def child(case, store, log, steps, early=False, strike=None):
    """Train up to `steps` and log each step's loss. `strike` counts calls from the start if `early`,
    else from the first step."""

    def install_strike():
        shadow = Path(f"{log}.shadow")
        shadow.mkdir(exist_ok=True)
        Power(shadow, [log.parent], [strike]).install()

    torch.set_num_threads(1)
    if strike is not None and early:
        install_strike()
    model, placed, scaler = place(case, store, host_budget="64MiB", chunk_elements=1 << 16)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    first = placed.steps_done + 1
    while placed.steps_done < steps:
        loss = one_step(case, model, placed, scaler, placed.steps_done)
        os.write(out, f"{placed.steps_done} {loss.hex()}\n".encode())
        if strike is not None and not early and placed.steps_done == first:
            install_strike()
    placed.close()


def run_child(*args):
    process = FORK.Process(target=child, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def read(log):
    """Return step -> the losses logged for it."""
    seen = {}
    if log.exists():
        for line in log.read_text().splitlines():
            step, loss = line.split()
            seen.setdefault(int(step), set()).add(loss)
    return seen


def kill_at_a_call(rng, early, args):
    action = rng.choice(["kill before", "kill half", "kill after"])
    kind = "write" if action == "kill half" else rng.choice(["write", "sync"])
    strike = Strike(kind, rng.randrange({"write": 40, "sync": 8}[kind]), action, "store")
    process = FORK.Process(target=child, args=(*args, early, strike))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def kill_at_a_moment(rng, early, args):
    """Kill the child while it starts if `early`, else after a new step."""
    log = args[2]
    before = max(read(log), default=0)
    process = FORK.Process(target=child, args=args)
    process.start()
    deadline = time.monotonic() + 60
    while not early and max(read(log), default=0) <= before and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(rng.random() * (2.0 if early else 0.5))
    assert process.exitcode is None, "it ended by itself"
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kill",
    [kill_at_a_call, pytest.param(kill_at_a_moment, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(
    ("name", "case", "dirs"),
    [
        pytest.param("eager", Case(eager=True), 1, marks=pytest.mark.exhaustive),
        pytest.param(
            "clipped",
            Case(clip=0.5, accumulate=2, groups=True),
            3,
            marks=pytest.mark.exhaustive,
        ),
        ("bf16 scaler", Case(dtype=torch.bfloat16, scaler=True), 2),
        ("late", Case(eager=True, staleness=1), 2),
    ],
)
@pytest.mark.parametrize("kills", [5, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_kills_change_no_loss(name, case, dirs, kill, kills, tmp_path):
    rng, log = random.Random(name), tmp_path / "killed.log"
    store = [tmp_path / f"store{i}" for i in range(dirs)]
    for number in range(kills):  # every fifth kill hits the start
        kill(rng, number % 5 == 4, (case, store, log, STEPS * 10))
    last = max(read(log)) + 5
    run_child(case, store, log, last)
    run_child(case, None, tmp_path / "whole.log", last)
    seen = read(log)
    assert set(range(1, last + 1)) == set(seen), "a step is missing"
    for step, losses in seen.items():
        assert len(losses) == 1, f"step {step} was repeated with another loss"
    assert seen == read(tmp_path / "whole.log")
