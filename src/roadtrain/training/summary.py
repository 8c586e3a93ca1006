"""The table at the end of a run: what training took and gave, and which command goes on.

What limited a step is the part that was busy longest in it. Parts run beside each other, each has
threads of its own: the training thread computes, a server's one thread reads and writes its files,
another one updates. Does NOT measure anything: it adds up the lines of metrics.jsonl.
"""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roadtrain.config.job import Job
from roadtrain.training import memory_limit
from roadtrain.units import show_bytes, show_rate

FEW = 5  # the most steps that a first or last loss is the mean of


@dataclass(frozen=True)
class Summary:
    """`stopped`: why it ended before run.steps, or nothing. Losses: means over the first and
    last steps of this run."""

    steps: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    stopped: str


@dataclass
class Totals:
    """Of the steps of this run."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    # of each stage, added up over threads
    busy_s: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    # the most that roadtrain's buffers held
    resident: int = 0

    def add(self, line: Mapping[str, Any], resident: int) -> None:
        """A line of metrics.jsonl, and what roadtrain's buffers held after its step."""
        self.losses.append(math.nan if line["loss"] is None else line["loss"])
        self.seconds += line["seconds"]
        for name, stage in line["stages"].items():
            self.busy_s[name] += stage["seconds"]
            self.nbytes[name] += stage["bytes"]
        self.resident = max(self.resident, resident)

    def first_and_last(self) -> tuple[float, float]:
        few = max(1, min(FEW, len(self.losses) // 10))
        first, last = self.losses[:few], self.losses[-few:]
        return (sum(first) / len(first), sum(last) / len(last)) if first else (math.nan, math.nan)

    def parts(self, job: Job) -> dict[str, float]:
        """Seconds that each part of this run was busy. Servers elsewhere are one part: what is
        waited for them and for the network."""
        busy = self.busy_s
        parts = {"computing": max(0.0, busy["Forward"] + busy["Backward"] - busy["Wait"])}
        if job.servers.addresses:
            return parts | {"servers and network": busy["Wait"]}
        servers = max(1, len(job.store.files))
        parts["updates"] = (busy["Sum"] + busy["Update"]) / servers
        if job.store.files:
            parts["files"] = (busy["Read"] + busy["Write"] + busy["Commit"]) / servers
        return parts


def rows(
    job: Job, summary: Summary, totals: Totals, plain: int, program: str
) -> list[tuple[str, str]]:
    """`plain`: bytes that plain training of the model needs; `program`: how roadtrain was
    called."""
    out = [("steps done", f"{summary.steps} of {job.run.steps}")]
    first, last = summary.first_loss, summary.last_loss
    if math.isfinite(first):
        change = f"{'fell' if last <= first else 'rose'} by {abs(first - last):.2f} nats"
        out.append(
            (
                "training loss, first and last steps of this run",
                f"{first:.3f} -> {last:.3f}, {change}",
            )
        )
    if summary.held_out_loss is not None:
        out.append(("held-out loss", f"{summary.held_out_loss:.3f}"))
    held = f"{show_bytes(totals.resident)} ({totals.resident / plain:.0%})"
    out += [
        ("plain training needs (parameters, gradients, optimizer)", show_bytes(plain)),
        ("roadtrain held at most", held),
        (
            "peak memory of the process, torch and text included",
            show_bytes(memory_limit.peak()),
        ),
    ]
    if (limit := job.limit_nbytes) is not None:
        enforced = f"{show_bytes(limit)}, enforced by {memory_limit.ENFORCED_BY}"
        out.append(("limit of the process", enforced))
    if totals.losses:
        out += [("moved in this run", _moved(job, totals)), ("a step took", _step(job, totals))]
    if used := disk_bytes(job):
        out.append(("on disk", f"{show_bytes(used)}; rm -r {job.run.dir} removes it"))
    return [*out, ("to go on", _next(job, summary, program))]


def disk_bytes(job: Job) -> int:
    """What the job's stores take on their devices."""
    files = (f for d in job.store.files for f in Path(d).rglob("*") if f.is_file())
    return sum(os.stat(file).st_blocks * 512 for file in files)


def _moved(job: Job, totals: Totals) -> str:
    nbytes = totals.nbytes
    fetched, pushed = show_bytes(nbytes["Fetch"]), show_bytes(nbytes["Push"])
    if job.servers.addresses:
        return f"{fetched} from servers, {pushed} to them"
    if not job.store.files:
        return f"{fetched} of parameters, {pushed} of gradients"
    written = nbytes["Write"] + nbytes["Commit"]
    rate = show_rate((nbytes["Read"] + written) / totals.seconds)
    return f"{show_bytes(nbytes['Read'])} from files, {show_bytes(written)} to files, {rate}"


def _step(job: Job, totals: Totals) -> str:
    steps = len(totals.losses)
    parts = sorted(totals.parts(job).items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {seconds / steps:.1f} s" for name, seconds in parts)
    return f"{totals.seconds / steps:.1f} s, limited by {parts[0][0]} (busy: {shown})"


def _next(job: Job, summary: Summary, program: str) -> str:
    more = "" if summary.stopped else f" --run.steps {2 * job.run.steps}"
    return shlex.join([program, "train", str(job.run_dir / "job.toml")]) + more
