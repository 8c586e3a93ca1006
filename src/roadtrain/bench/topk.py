"""Exact top 1 % by magnitude and its scatter back, against torch.topk and torch's scatter; the floor is one reading of
the input (for the scatter: one writing of the output). Over threads, on the whole array and on one chunk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from roadtrain.bench.report import Report, Row, cores, interleave
from roadtrain.kernels.cast import kernel
from roadtrain.kernels.topk import RANGE, scatter, top_k
from roadtrain.spec.chunks import MAX_CHUNK
from roadtrain.units import MIB


@kernel
def _read(x):
    largest = np.uint32(0)
    for i in range(x.size):
        largest = max(largest, x[i])
    return largest


def _rows(x: np.ndarray, reps: int, peer_reps: int, pool: ThreadPoolExecutor | None, case: str, goal: float | None
          ) -> list[Row]:
    n, k = x.size, x.size // 100
    tensor, bits = torch.from_numpy(x), x.view(np.uint32)
    idx, val, out = np.zeros(k, np.uint32), np.zeros(k, np.float32), np.ones(n, np.float32)
    there, starts = torch.ones(n), range(0, n, RANGE)
    each = pool.map if pool is not None else map
    top_k(x, "fp32", k, idx, val, pool)
    index, value = torch.from_numpy(idx.astype(np.int64)), torch.from_numpy(val)
    found = np.sort(torch.topk(tensor.abs(), k, sorted=False).indices.numpy())
    assert np.array_equal(np.sort(np.abs(x[found])), np.sort(np.abs(val)))  # the same magnitudes as torch's

    def fill() -> None:
        list(each(lambda s: out[s : s + RANGE].fill(0), starts))

    def read() -> None:
        list(each(lambda s: _read(bits[s : s + RANGE]), starts))

    def torch_topk() -> None:
        torch.topk(tensor.abs(), k, sorted=False)

    def torch_scatter() -> None:
        there.zero_()
        there[index] = value

    peer = interleave({
        "ours": lambda: top_k(x, "fp32", k, idx, val, pool),
        "torch": torch_topk,
    }, peer_reps)
    own = interleave({
        "ours": lambda: top_k(x, "fp32", k, idx, val, pool),
        "read": read,
        "scatter": lambda: scatter(idx, val, out, pool), "torch": torch_scatter, "fill": fill,
    }, reps)
    ratio, back = peer["torch"] / peer["ours"], own["fill"] / own["scatter"]
    return [
        Row(f"exact top 1 % of {case}", "time", "ms", peer["ours"] * 1e3, peer["torch"] * 1e3, "torch.topk", ratio,
            own["read"] / own["ours"], None if goal is None else f"ratio >= {goal:g}",
            None if goal is None else ratio >= goal),
        Row(f"scatter back into {case}", "time", "ms", own["scatter"] * 1e3, own["torch"] * 1e3,
            "torch zero_ and indexed write", own["torch"] / own["scatter"], back,
            None if goal is None else "memory speed: of_floor >= 0.8", None if goal is None else back >= 0.8),
    ]


def run(quick: bool = False) -> Report:
    threads = cores()
    torch.set_num_threads(threads)
    n = (4 if quick else 64) * MIB
    x = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    with ThreadPoolExecutor(threads) as pool:
        rows = _rows(x, 9, 3, pool, f"{n // MIB} Mi floats, {threads} threads", 20)
    torch.set_num_threads(1)
    rows += _rows(x[:MAX_CHUNK], 31, 9, None, "one chunk of 1 Mi, 1 thread", None)
    torch.set_num_threads(threads)
    return Report("topk", rows)
