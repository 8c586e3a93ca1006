"""CUDA: torch's CUDA sanitizer finds no race, compiled Triton kernels have the bits of the CPU, and
device_budget is kept. test_on_devices.py trains on CUDA as well. Run by `make test-gpu`.

The sanitizer sees the copies that the trainer's and autograd's threads start, which are most, but
not those that start when parameters arrive. The emulated device sees all (test_races.py).
"""

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import roadtrain
from benchmarks.device import races
from roadtrain.training import verify
from roadtrain.units import MIB
from tests.kernels.unit.test_gpu_kernels import compare
from tests.servers.local.test_order import CASES
from tests.support.devices import active
from tests.support.models import build, new_scaler, place, run

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run by `make test-gpu`"
)
ROOT = Path(__file__).parents[3]
SEEDED = "a gradient is copied before it is computed"  # of races.CHANGES


def train_races(kind):
    losses = [races.train(None, kind, **case) for case in races.CASES]
    on_cpu = [races.train(None, **case) for case in races.CASES]
    assert np.allclose(losses, on_cpu, rtol=0, atol=1e-4), (losses, on_cpu)
    assert losses[0] == losses[2], "updates in backward and in step()"


def train_order(kind):
    for name, (case, options) in CASES.items():
        case = replace(case, device=kind)
        model, placed, scaler = place(case, None, device_budget="1GiB", **options)
        with placed:
            losses = run(case, model, placed, scaler, 0, 5)
        model, optimizer = build(case)
        model.to(kind, case.dtype)
        plain = run(case, model, optimizer, new_scaler(case), 0, 5)
        assert losses[0] == plain[0], name
        if name in ("eager", "clipped", "scaler"):  # neither lossy nor late
            assert np.allclose(losses, plain, rtol=0, atol=2e-4), (name, losses, plain)


def train_seeded(kind):
    [change] = [change for change in races.CHANGES if change.what == SEEDED]
    with change.active():
        races.train(None, kind, **races.CASES[0])


TRAINED = {"races": train_races, "order": train_order, "seeded": train_seeded}


def sanitized(what):
    """Train in a process with torch's CUDA sanitizer."""
    return subprocess.run(
        [sys.executable, "-m", "tests.device.local.test_gpu", what],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )


@pytest.mark.parametrize("what", ["races", "order"])
def test_the_sanitizer_finds_no_race(what):  # Rules 1, 6
    done = sanitized(what)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CSAN" not in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]


def test_the_sanitizer_finds_a_missing_wait():  # Rule 6
    done = sanitized("seeded")
    assert "CSAN detected a possible data race" in done.stderr, done.stderr[-3000:]


def test_compiled_triton_kernels_equal_the_cpu_kernels():  # Rule 1
    compare("cuda", 100_003)


def test_the_small_example_is_verified(tmp_path):  # Rule 1
    pytest.importorskip("transformers")
    lines, job = [], {"run.dir": str(tmp_path / "run"), "run.device": "cuda"}
    assert verify.command(str(ROOT / "examples/small.toml"), job, 3, lines.append) == 0, lines
    assert sum("are bit-identical" in line for line in lines) == 2


def peak_of(work):
    """Return the bytes of device memory that `work` needs at most at once."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def test_device_budget_is_kept():  # Rule 4
    """Besides the budget, the device holds the activations of one block and of the loss."""
    width, batch, blocks, budget = 1024, 2048, 12, 60 * MIB

    def step(model):
        x = torch.randn(batch, width, device="cuda", requires_grad=True)
        model(x).square().mean().backward()

    def train(placed):
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(blocks)])
        optimizer = torch.optim.SGD(model.to("cuda" if not placed else "cpu").parameters())
        if placed:
            options = {"device": "cuda", "device_budget": budget, "report": lambda _: None}
            optimizer = roadtrain.place(model, optimizer, **options)
        for _ in range(2):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
        if placed:
            optimizer.close()

    block = torch.nn.Linear(width, width, device="cuda")
    step(block)  # torch keeps workspaces from the first step on
    one_block, placed, plain = (
        peak_of(lambda: step(block)),
        peak_of(lambda: train(placed=True)),
        peak_of(lambda: train(placed=False)),
    )
    assert placed <= budget + one_block < plain


if __name__ == "__main__":
    kind = sys.argv[2] if len(sys.argv) > 2 else "cuda"
    with active(kind):
        TRAINED[sys.argv[1]](kind)
