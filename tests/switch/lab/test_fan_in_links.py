"""Gradients are summed inside the network: the optimizer node's link carries S each way however many
workers there are, below one switch and below a tree; losses are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.common.lab import CARRIED, Lab, Measured, Scene
from benchmarks.common.lab_worker import WorkerSpec
from benchmarks.common.model420 import adamw, batch
from roadtrain.lab import network_available

WHY = network_available()
pytestmark = [
    pytest.mark.lab,
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
]
SPEC = WorkerSpec("ours", 4, layers=4, width=256, inner=512, staleness=0)  # S is 11 MB
# Of S: beside it go exponents, heartbeats and what TCP carries; and on a machine that is busy what is
# sent again since nothing was heard for a tenth of a second.
LEAST, MOST = 0.97, 1.5
SAME = 1e-4  # relative: integers of 32 bits, sums of another order


def alone(workers: int) -> list[list[float]]:
    """The losses of one process that has every worker's tokens, by worker."""
    torch.set_num_threads(1)
    model = SPEC.build()
    optimizer, losses = adamw(model.parameters()), [list[float]() for _ in range(workers)]
    for step in range(SPEC.steps):
        for rank in range(workers):
            tokens = batch(step * workers + rank, 1, SPEC.tokens)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / workers).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(run: Measured, workers: int) -> None:
    for rank, losses in enumerate(alone(workers)):
        assert run.losses[rank] == pytest.approx(losses, rel=SAME), f"worker {rank}"
    carried = {
        (link, way): getattr(traffic, way) * CARRIED / SPEC.nbytes
        for link, traffic in run.frames.items()
        for way in ("sent", "received")
    }
    assert all(LEAST < share < MOST for share in carried.values()), carried


@pytest.mark.exhaustive
def test_one_switch(tmp_path: Path) -> None:
    with Lab(Scene(3), tmp_path) as lab:
        check(lab.train(SPEC, "int32"), 3)


@pytest.mark.exhaustive
def test_a_tree_of_two_racks(tmp_path: Path) -> None:
    with Lab(Scene(4, racks=2), tmp_path) as lab:
        check(lab.train(SPEC, "int32"), 4)
