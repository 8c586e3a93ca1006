"""Item `losses` of `crosscluster`: the losses of many parallelisms, compared with the losses of one
process. All processes run on this host.
"""

from __future__ import annotations

import math
import socket
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.children import run_children, serving
from benchmarks.common.report import Row, at_most
from benchmarks.crosscluster.model import Batch, ModelSize, RunSpec
from benchmarks.crosscluster.worker import train
from roadtrain.transport.address import write_token

SIZE = ModelSize(layers=8, hidden=64, inner=128, heads=4, vocabulary=256)
STEPS, ROWS, SEQUENCE = 6, 8, 32
WITHIN = 2e-5  # relative; fp32 sums are taken in another order
TIMEOUT_S = 400.0
TOKEN = "only for this measurement"


@dataclass(frozen=True)
class Cell:
    """Parallelism to compare. `world`: number of processes that it needs."""

    name: str
    world: int
    spec: RunSpec


def grid(quick: bool = False) -> list[Cell]:
    """Return the parallelisms to compare: 1, 2 or 4 stages, 1 or 2 replicas, and 2, 4 or 8
    micro-batches, with even, uneven and interleaved stages.
    """
    out = []
    for pp in (1, 2) if quick else (1, 2, 4):
        for dp in (1, 2):
            for micros in (4,) if quick else (2, 4, 8):
                out += [
                    cell({"pp": pp, "dp": dp, **how}, micros, what)
                    for what, how in _divisions(pp, dp, micros)
                ]
    out.append(cell({"pp": 2, "widths": [1, 2], "stages": [3, 5]}, 4, "unequal widths"))
    return out


def _divisions(pp: int, dp: int, micros: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "even", {}
    uneven = {2: [3, 5], 4: [1, 3, 2, 2]}
    if pp in uneven:
        yield "uneven", {"stages": uneven[pp]}
    if pp > 1 and micros % (pp * dp) == 0:
        yield "interleaved", {"virtual_stages": 2}


def cell(parallelism: dict[str, Any], micros: int, what: str, **more: Any) -> Cell:
    widths = parallelism.get("widths") or [parallelism.get("dp", 1)] * parallelism["pp"]
    shown = ", ".join(f"{key} {value}" for key, value in parallelism.items())
    batch = Batch(ROWS, SEQUENCE, micros)
    spec = RunSpec("ours", SIZE, batch, "sgd", 0, STEPS, parallelism=parallelism, **more)
    return Cell(f"{shown}, {micros} micro-batches, {what}", sum(widths), spec)


def worst_difference(losses: Sequence[float], alone: Sequence[float]) -> float:
    """Return the largest relative difference between the losses of the same step. The result is
    infinite if a loss is NaN.
    """
    found = [abs(ours - single) / abs(single) for ours, single in zip(losses, alone, strict=True)]
    return math.inf if any(map(math.isnan, found)) else max(found)


def alone() -> list[float]:
    """Train the model in one process, and return the loss of each step."""
    spec = RunSpec("single", SIZE, Batch(ROWS, SEQUENCE, 1), "sgd", 0, STEPS)
    losses: list[float] = train(spec, 0, 1, lambda what: None)["losses"]
    return losses


def rows(quick: bool = False) -> list[Row]:
    single = alone()
    found = losses_of(grid(quick))
    apart = {name: worst_difference(losses, single) for name, losses in found.items()}
    far = {name: by for name, by in apart.items() if by > WITHIN}
    for name, by in far.items():
        print(f"losses differ by {by:.1e}: {name}", flush=True)
    case = f"losses beside one process, {len(found)} parallelisms, {STEPS} steps"
    same, worst = len(found) - len(far), max(apart.values())
    goal = f"= {len(found)}"
    return [
        Row(case, "parallelisms with the same losses", "", same, goal=goal, met=not far),
        Row(case, "largest relative difference", "", worst, **at_most(worst, WITHIN)),
        composition(single),
    ]


def composition(single: Sequence[float]) -> Row:
    """Compare the losses of three stages, updated by a server, plain data parallel, and streamed
    from files, with those of one process.
    """
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        home = Path(name)
        write_token(home / "token", TOKEN.encode())
        words = ("--store", str(home / "node"), "--token-file", str(home / "token"))
        with serving(home, *words) as server:
            stores: dict[str, dict[str, Any]] = {
                "0": {"servers": [server.address], "token": TOKEN},
                "2": {"files": [str(home / "files")]},
            }
            layout = {"pp": 3, "widths": [2, 2, 1], "stages": [3, 3, 2]}
            (losses,) = losses_of([cell(layout, 4, "composed", stage_stores=stores)]).values()
    case = "stage 1 under an optimizer node, stage 2 data parallel, stage 3 streamed from files"
    apart = worst_difference(losses, single)
    metric = "largest relative difference of losses"
    return Row(case, metric, "", apart, **at_most(apart, WITHIN))


def losses_of(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """Train every cell, and map the name of each cell to its losses.

    Raises:
        RoadtrainError: a process failed; the message ends with the last output of the process
    """
    of_world: dict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        of_world[cell.world].append(cell)
    found: dict[str, list[float]] = {}
    for world, lot in of_world.items():
        specs = [replace(cell.spec, port=free_port()) for cell in lot]
        each = [{"specs": specs, "rank": rank, "world": world} for rank in range(world)]
        *_, losses = run_children(train_all, each, within_s=TIMEOUT_S)
        found |= dict(zip((cell.name for cell in lot), losses, strict=True))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def train_all(specs: Sequence[Mapping[str, Any]], rank: int, world: int) -> list[list[float]]:
    """Train every spec as one process of each, and return the losses of each."""
    torch.set_num_threads(1)
    results = [train(RunSpec.of(spec), rank, world, lambda what: None) for spec in specs]
    return [result["losses"] for result in results]
