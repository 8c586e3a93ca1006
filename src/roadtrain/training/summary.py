"""The table that is printed after a run: time, memory, disk and results, and the command to
continue.

It is computed from the lines of metrics.jsonl.
"""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from roadtrain.config.job import Job
from roadtrain.config.machines import LAUNCHED_AS
from roadtrain.training import memory_limit
from roadtrain.training.progress import limited_by
from roadtrain.training.run_lines import WRITES, RunLines
from roadtrain.units import show_bytes, show_rate, show_seconds


@dataclass(frozen=True)
class Summary:
    """The results of a run, from its start to its end in this process.

    Attributes:
        steps: Number of steps done, including those of earlier starts.
        first_loss: Mean loss of the first steps after this start.
        last_loss: Mean loss of the last steps.
        held_out_loss: Mean loss of held-out text; None if no text is held out.
        stopped: The reason if training ended before run.steps, else "".
    """

    steps: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    stopped: str


def rows(
    job: Job, summary: Summary, lines: RunLines, plain: int, program: str
) -> list[tuple[str, str]]:
    """Return the rows (name, value) of the table.

    `plain`: the memory in bytes that ordinary training of the model needs. `program`: the command
    that starts roadtrain.
    """
    out = [("plain training needs (parameters, gradients, optimizer)", show_bytes(plain))]
    if lines.recent:
        held = show_bytes(lines.resident)
        if lines.resident < plain:
            held += f", {lines.resident / plain:.0%} of that"
        out.append(("roadtrain held at most", held))
    peak = show_bytes(memory_limit.peak())
    out.append(("peak memory of the process, torch and text included", peak))
    if (limit := job.limit_nbytes) is not None:
        enforced = f"{show_bytes(limit)}, enforced by {memory_limit.ENFORCED_BY}"
        out.append(("limit of the process", enforced))
    if lines.recent:
        out += [("moved in this run", _moved(job, lines)), ("a step took", _step(job, lines))]
    if used := disk_bytes(job):
        outside = [d for d in job.store.files if not Path(d).is_relative_to(job.run_dir)]
        removes = shlex.join(["rm", "-r", job.run.dir, *outside])
        out.append(("on disk", f"{show_bytes(used)}; {removes} removes it"))
    again = f"{program} {shlex.join(['train', str(job.run_dir / 'job.toml')])}"
    again += "" if summary.stopped else f" --run.steps {2 * max(job.run.steps, summary.steps)}"
    kept = job.store.files or job.servers.addresses
    resume = resume_command(summary, again) if kept else "not possible: the state was in memory"
    return [*loss_rows(job, summary), *out, ("to continue", resume)]


def loss_rows(job: Job, summary: Summary) -> list[tuple[str, str]]:
    out = [("steps done", f"{summary.steps} of {job.run.steps}")]
    first, last = summary.first_loss, summary.last_loss
    if math.isfinite(first):
        change = f"{'fell' if last <= first else 'rose'} by {abs(first - last):.2f} nats"
        label = "training loss, first and last steps of this run"
        out.append((label, f"{first:.3f} -> {last:.3f}, {change}"))
    if summary.held_out_loss is not None:
        out.append(("held-out loss", f"{summary.held_out_loss:.3f}"))
    return out


def disk_bytes(job: Job) -> int:
    """Return the bytes that the job's stores occupy on disk."""
    files = (f for d in job.store.files for f in Path(d).rglob("*") if f.is_file())
    return sum(os.stat(file).st_blocks * 512 for file in files)


def _moved(job: Job, lines: RunLines) -> str:
    nbytes = lines.nbytes
    fetched, pushed = show_bytes(nbytes["Fetch"]), show_bytes(nbytes["Push"])
    if job.servers.addresses:
        return f"{fetched} from servers, {pushed} to them"
    if not job.store.files:
        return f"{fetched} of parameters, {pushed} of gradients"
    written = sum(nbytes[name] for name in WRITES)
    rate = show_rate((nbytes["Read"] + written) / lines.seconds)
    return (
        f"{fetched} of parameters, {show_bytes(nbytes['Read'])} of state from files,"
        f" {show_bytes(written)} to files, {rate}"
    )


def _step(job: Job, lines: RunLines) -> str:
    steps = len(lines.curves["loss"])
    whole, waited = lines.seconds / steps, lines.waited_s / steps
    return (
        f"{show_seconds(whole)}: computing {show_seconds(whole - waited)}, waiting"
        f" {show_seconds(waited)}; limited by {limited_by(job, lines.seconds, lines.busy_s)}"
    )


def resume_command(summary: Summary, typed: str) -> str:
    """Return the command that continues the run: `typed`, or a `roadtrain launch` command if that
    has started the run."""
    name = os.environ.get(LAUNCHED_AS)
    if not name:
        return typed
    if summary.stopped:
        return f"roadtrain launch --resume {name}"
    return f"raise run.steps in the job, then roadtrain launch PLAN.toml JOB.toml --name {name}"
