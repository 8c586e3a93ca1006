"""Item `losses` of `crosscluster`: the losses of many parallelisms, compared with the losses of one
process. All processes run on this host.

    python -m benchmarks.crosscluster.losses SPECS.json RANK WORLD
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import Row
from benchmarks.crosscluster.model import Batch, ModelSize, RunSpec
from benchmarks.crosscluster.worker import train
from roadtrain.errors import RoadtrainError
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
    worst = max(apart.values())
    return [
        _row(case, "parallelisms with the same losses", "", len(found) - len(far), len(found)),
        _row(case, "largest relative difference", "", worst, WITHIN, most=True),
        *composition(single),
    ]


def composition(single: Sequence[float]) -> list[Row]:
    """Compare the losses of three stages, updated by a server, plain data parallel, and streamed
    from files, with those of one process.
    """
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name, _server(Path(name)) as at:
        stores = {
            "0": {"servers": [at], "token": TOKEN},
            "2": {"files": [str(Path(name, "files"))]},
        }
        three = cell(
            {"pp": 3, "widths": [2, 2, 1], "stages": [3, 3, 2]}, 4, "composed", stage_stores=stores
        )
        (losses,) = losses_of([three]).values()
    case = "stage 1 under an optimizer node, stage 2 data parallel, stage 3 streamed from files"
    apart = worst_difference(losses, single)
    return [_row(case, "largest relative difference of losses", "", apart, WITHIN, most=True)]


def _row(case: str, metric: str, unit: str, ours: float, goal: float, *, most: bool = False) -> Row:
    sign, met = ("<=", ours <= goal) if most else ("=", ours == goal)
    return Row(case, metric, unit, ours, goal=f"{sign} {goal:g}", met=met)


@contextmanager
def _server(home: Path) -> Iterator[str]:
    """Run a server with an optimizer on this host, and yield its address."""
    write_token(home / "token", TOKEN.encode())
    at = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "roadtrain.cli", "serve", at, "--store", str(home / "node")]
    with (
        (home / "server").open("w") as log,
        subprocess.Popen(
            [*words, "--token-file", str(home / "token")], stdout=log, stderr=log
        ) as server,
    ):
        try:
            yield at
        finally:
            server.terminate()


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
        found |= dict(zip((cell.name for cell in lot), _run(lot, world), strict=True))
    return found


def _run(cells: Sequence[Cell], world: int) -> list[list[float]]:
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        folders = []
        for k, cell in enumerate(cells):
            folders.append(Path(name, f"{k}.json"))
            replace(cell.spec, port=free_port()).write(folders[-1])
        Path(name, "specs").write_text(json.dumps([str(path) for path in folders]))
        words = [sys.executable, "-m", "benchmarks.crosscluster.losses", f"{name}/specs"]
        logs = [Path(name, f"log{rank}") for rank in range(world)]
        running = [_start([*words, str(r), str(world)], log) for r, log in enumerate(logs)]
        try:
            codes = [process.wait(TIMEOUT_S) for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        for code, log in zip(codes, logs, strict=True):
            if code:
                raise RoadtrainError(
                    f"a process ended with exit code {code}: {log.read_text()[-3000:]}"
                )
        lines = logs[-1].read_text().splitlines()
    return [
        json.loads(line.removeprefix("losses ")) for line in lines if line.startswith("losses ")
    ]


def _start(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("w") as out:
        return subprocess.Popen(words, stdout=out, stderr=out)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def main() -> None:
    path, rank, world = sys.argv[1:]
    torch.set_num_threads(1)
    for spec in json.loads(Path(path).read_text()):
        result = train(RunSpec.read(Path(spec)), int(rank), int(world), lambda what: None)
        print("losses", json.dumps(result["losses"]), flush=True)


if __name__ == "__main__":
    main()
