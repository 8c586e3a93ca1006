"""Measure the top-k kernels: one selects exactly the 1 % of elements with the largest magnitude,
the other scatters them back. They are compared with torch.topk and torch's scatter.

The floor of selecting is the time to read the input once, and the floor of scattering is the time
to write the output once. Everything uses one thread.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.common.report import Report, Row, cores, interleave
from benchmarks.common.rows import row
from roadtrain.chunks import MAX_CHUNK
from roadtrain.kernels.cast import kernel
from roadtrain.kernels.topk import scatter, top_k
from roadtrain.units import MIB


@kernel
def _read(x):
    largest = np.uint32(0)
    for i in range(x.size):
        largest = max(largest, x[i])
    return largest


def _rows(
    x: np.ndarray, reps: int, peer_reps: int, case: str, goals: tuple[str | None, str | None]
) -> list[Row]:
    n, k = x.size, x.size // 100
    tensor, bits = torch.from_numpy(x), x.view(np.uint32)
    idx, val, out = np.zeros(k, np.uint32), np.zeros(k, np.float32), np.ones(n, np.float32)
    there = torch.ones(n)
    top_k(x, "fp32", k, idx, val)
    index, value = torch.from_numpy(idx.astype(np.int64)), torch.from_numpy(val)
    found = np.sort(torch.topk(tensor.abs(), k, sorted=False).indices.numpy())
    # the same magnitudes as torch's
    assert np.array_equal(np.sort(np.abs(x[found])), np.sort(np.abs(val)))

    def torch_topk() -> None:
        torch.topk(tensor.abs(), k, sorted=False)

    def torch_scatter() -> None:
        there.zero_()
        there[index] = value

    def select() -> None:
        top_k(x, "fp32", k, idx, val)

    peer = interleave({"ours": select, "torch": torch_topk}, peer_reps)
    own = interleave(
        {
            "ours": select,
            "read": lambda: _read(bits),
            "scatter": lambda: scatter(idx, val, out),
            "torch": torch_scatter,
            "fill": lambda: out.fill(0),
        },
        reps,
    )
    times = [
        (
            "exact top 1 % of",
            peer["ours"],
            (peer["torch"], "torch.topk"),
            own["read"] / own["ours"],
        ),
        (
            "scatter back into",
            own["scatter"],
            (own["torch"], "torch zero_ and indexed write"),
            own["fill"] / own["scatter"],
        ),
    ]
    return [
        row(f"{what} {case}", "time", "ms", ours, theirs, of_floor=of_floor, goal=goal)
        for (what, ours, theirs, of_floor), goal in zip(times, goals)
    ]


def run(quick: bool = False) -> Report:
    torch.set_num_threads(1)
    n = (4 if quick else 64) * MIB
    x = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    rows = _rows(x, 9, 3, f"{n // MIB} Mi floats, 1 thread", ("ratio >= 20", "of_floor >= 0.8"))
    rows += _rows(x[:MAX_CHUNK], 31, 9, "one chunk of 1 Mi, 1 thread", (None, None))
    torch.set_num_threads(cores())
    return Report("topk", rows)
