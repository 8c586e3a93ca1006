"""Train a Llama of 420 M parameters with its state on disk, and compare roadtrain with DeepSpeed's
NVMe offload. Both run on this machine's disk and on an emulated disk of 500 MB/s. Plain torch gives
the reference losses.

The step time of a run is the mean over all steps after the first two. The measured time begins when
the store is idle, and ends when every write of the last step is durable. Peak memory is the peak of
the resident memory of the process, including pinned and shared pages; no system starts further
processes. Needs the extras `bench` and `hf`, a C++ compiler and libaio's headers. The emulated disk
needs root.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import model420
from benchmarks.common.children import peak_bytes, run_child
from benchmarks.common.report import Report, Row
from benchmarks.common.rows import row
from roadtrain.errors import ConfigError
from roadtrain.lab import LoopDevice, Throttle, lab_available

RATE = 500e6  # of the emulated device, bytes/s in each direction
IMAGE_BYTES = 14 * 10**9  # two slots of 14 bytes a parameter, and the file system's own
FLOOR_BYTES = 12 * 419.5e6  # bytes read, and bytes written, a step: fp32 master and two moments
SAME_LOSS = 1e-3  # nats; rounding alone moves a loss by about 1e-5
HOST_BUDGET = "2.25GiB"
PEER = "benchmarks.placement.deepspeed_peer"


Result = dict[str, Any]  # of a child, and the means of `train`


def run(quick: bool = False) -> Report:
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "DeepSpeed is not installed",
            hint='pip install -e ".[bench,hf]"; apt-get install libaio-dev',
        )
    steps, reps = (4, 1) if quick else (8, 3)
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        run_child(importlib.import_module(PEER).build_ops)
        plain = train("plain", steps)
        here = alternate(folder / "this", steps, reps)
        rows = compare("this disk", here, goal=1.7, floor_s=None)
        if quick:
            why: str | None = "left out by --quick"
        elif (why := lab_available()) is None:
            with LoopDevice(folder / "disk.img", IMAGE_BYTES) as disk:
                there = alternate(disk.mount / "run", steps, reps - 1, disk.major_minor)
            rows += compare("emulated 500/500 MB/s", there, goal=1.9, floor_s=FLOOR_BYTES / RATE)
    if why is not None:
        rows.append(
            Row(f"emulated 500/500 MB/s: {why}", "step time", "s", None, goal="ratio >= 1.9")
        )
    ours, peer = (max(distance(result, plain) for result in here[who]) for who in ("ours", "peer"))
    rows.append(
        Row(
            "losses",
            "largest difference from plain training",
            "nats",
            ours,
            peer=peer,
            peer_name=here["peer"][0]["system"],
            goal=f"ours <= {SAME_LOSS:g}",
            met=ours <= SAME_LOSS,
        )
    )
    return Report("deepspeed", rows)


def alternate(store: Path, steps: int, reps: int, device: str = "") -> dict[str, list[Result]]:
    """Run roadtrain ("ours") and DeepSpeed ("peer") in turn, `reps` times each, and return the
    results of both. `store`: directory that is empty before each run and removed afterwards.
    `device`: MAJ:MIN of the disk to throttle, or "".
    """
    runs: dict[str, list[Result]] = {"peer": [], "ours": []}
    for rep in range(reps):
        for who in list(runs)[:: -1 if rep % 2 else 1]:
            store.mkdir()
            try:
                runs[who].append(train(who, steps, str(store), device))
            finally:
                shutil.rmtree(store)
    return runs


def compare(
    case: str, runs: dict[str, list[Result]], *, goal: float, floor_s: float | None
) -> list[Row]:
    name, sides = runs["peer"][0]["system"], (runs["ours"], runs["peer"])
    step, theirs = (median(r["step_s"] for r in side) for side in sides)
    peak, least = max(r["peak_bytes"] for r in sides[0]), min(r["peak_bytes"] for r in sides[1])
    of_floor, time_goal = floor_s and floor_s / step, f"ratio >= {goal:g}"
    rows = [
        row(case, "step time", "s", step, (theirs, name), of_floor=of_floor, goal=time_goal),
        row(case, "peak memory", "MB", peak, (least, name), goal="ratio >= 3"),
    ]
    for way in ("read", "written"):
        moved, theirs = (median(r[f"{way}_bytes"] for r in side) for side in sides)
        rows.append(row(case, f"{way} a step", "MB", moved, (theirs, name)))
    return rows


def distance(result: Result, plain: Result) -> float:
    return max(abs(a - b) for a, b in zip(result["losses"], plain["losses"], strict=True))


def train(who: str, steps: int, store: str = "", device: str = "") -> Result:
    """Train in a process of its own, and return its result, with the mean seconds and bytes of a
    step. Raises RoadtrainError if the process fails.

    Args:
        who: "ours", "peer" (DeepSpeed) or "plain" (torch)
        store: directory for the state
        device: MAJ:MIN of the disk to throttle, or ""
    """
    result: Result = run_child(child, who=who, steps=steps, store=store, device=device)
    kept = result["steps"][model420.WARM_UP :] or [{}]
    for name in ("step_s", "read_bytes", "written_bytes"):
        result[name] = mean(step.get(name, 0.0) for step in kept)
    return result


def child(who: str, steps: int, store: str, device: str) -> Result:
    with ExitStack() as stack:
        if device:  # before the process opens its first file
            stack.enter_context(Throttle([device], RATE, RATE)).enter_process(os.getpid())
        if who == "plain":
            losses = model420.plain_losses(steps, compute=model420.compute_default())
            result: Result = {"system": "torch", "losses": losses, "steps": []}
        elif who == "ours":
            result = model420.train_ours(steps, store, HOST_BUDGET)
        else:
            result = importlib.import_module(PEER).train(steps, store)
    return result | {"peak_bytes": peak_bytes()}
