"""SIGKILL at random moments: the same command goes on and repeats the same losses (Rule 3)."""

import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from models import Case, one_step, place

STEPS = 150
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "roadtrain.api.place", "models"])


def child(case, store, log, steps):
    """Trains up to `steps` and writes every step's loss down."""
    torch.set_num_threads(1)
    model, placed, scaler = place(case, store, budget="64MiB", chunk_elements=1 << 16)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while placed.steps_done < steps:
        loss = one_step(case, model, placed, scaler, placed.steps_done)
        os.write(out, f"{placed.steps_done} {loss.hex()}\n".encode())
    placed.close()


def read(log):
    """step -> the losses that were seen for it."""
    seen = {}
    if log.exists():
        for line in log.read_text().splitlines():
            step, loss = line.split()
            seen.setdefault(int(step), set()).add(loss)
    return seen


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "case", "dirs"),
    [
        ("eager", Case(eager=True), 1),
        ("clipped", Case(clip=0.5, accumulate=2, groups=True), 3),
        ("bf16 scaler", Case(dtype=torch.bfloat16, scaler=True), 2),
        ("late", Case(eager=True, staleness=1), 2),
    ],
)
def test_ten_kills_change_no_loss(name, case, dirs, tmp_path):
    whole = tmp_path / "whole.log"
    process = FORK.Process(target=child, args=(case, None, whole, STEPS))
    process.start()
    process.join()
    assert process.exitcode == 0
    reference = read(whole)

    rng, log, kills = random.Random(name), tmp_path / "killed.log", 0
    store = [tmp_path / f"d{i}" for i in range(dirs)]
    while kills < 10:
        before = max(read(log), default=0)
        process = FORK.Process(target=child, args=(case, store, log, STEPS * 10))
        process.start()
        deadline = time.monotonic() + 60
        early = kills % 5 == 4  # one in five while it starts, the others after some new step
        while not early and max(read(log), default=0) <= before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(rng.random() * (2.0 if early else 0.5))
        assert process.exitcode is None, "it ended by itself"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    process = FORK.Process(
        target=child, args=(case, store, log, max(STEPS, max(read(log), default=0) + 5))
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    seen = read(log)
    assert set(range(1, max(seen) + 1)) == set(seen), "a step is missing"
    for step, losses in seen.items():
        assert len(losses) == 1, f"step {step} was repeated with another loss"
        if step in reference:
            assert losses == reference[step], step
