"""Progress: what a person sees while training: a bar on a terminal, lines elsewhere. Does NOT
measure anything.

The shares of a line are what the training thread did: its Forward and Backward without waiting, its
Wait, and all else (batches, clipping, printing). They add up to 100 %. Behind them stands what
limited the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console

from roadtrain.config.job import Job

ORDER = ("Forward", "Backward", "Wait", "Fetch", "Push", "Sum", "Read", "Update", "Write", "Commit")
OWN = ORDER[:3]  # stages of the training thread; all others run beside it
UPDATING = 0.8  # of a step: a server's update thread that is busy for longer is what limits
LEGEND = (
    "a step: Forward and Backward compute, Wait is for what limits the step, other is all else"
    " (batches, clipping)"
)
Show = Callable[[Mapping[str, Any]], None]
Report = Callable[[str], None]  # hears each line that is printed


def silent(_: str) -> None: ...


@contextmanager
def progress(job: Job, done: int, report: Report) -> Iterator[Show]:
    """Inside the context a function that shows one line of metrics.jsonl."""
    steps = job.run.steps

    def say(line: Mapping[str, Any]) -> None:
        if line["step"] % job.run.log_every == 0 or line["step"] == steps:
            report(f"step {line['step']}/{steps}  {describe(job, line)}")

    if done < steps:
        report(LEGEND)
    console = Console()
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":  # one bar of one process
        yield say
        return
    columns = (
        bars.BarColumn(20),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.description}"),
        bars.TimeRemainingColumn(compact=True),
    )
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, completed=done)
        yield lambda line: bar.update(task, completed=line["step"], description=describe(job, line))


def describe(job: Job, line: Mapping[str, Any]) -> str:
    """Loss, rate, what the training thread did, and what limited the step."""
    loss = "nan" if line["loss"] is None else f"{line['loss']:.3f}"
    rate = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
    busy = {name: stage["seconds"] for name, stage in line["stages"].items()}
    shown = " ".join(f"{name} {share}%" for name, share in shares(line["seconds"], busy).items())
    limit = limited_by(job, line["seconds"], busy)
    return f"loss {loss}  {rate:,.0f} tokens/s  {shown}, limited by {limit}"


def shares(seconds: float, busy: Mapping[str, float]) -> dict[str, int]:
    """Whole percents of a step's `seconds` that add up to 100; what is 0 is left out."""
    parts = {name: busy.get(name, 0.0) for name in OWN}
    parts["other"] = max(0.0, seconds - sum(parts.values()))
    if not (whole := sum(parts.values())):
        return {}
    exact = {name: 100 * part / whole for name, part in parts.items()}
    found = {name: int(share) for name, share in exact.items()}
    largest = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in largest[: 100 - sum(found.values())]:
        found[name] += 1
    return {name: share for name, share in found.items() if share}


def limited_by(job: Job, seconds: float, busy: Mapping[str, float]) -> str:
    """Name what kept steps that took `seconds` from being shorter.

    The training thread either computes or waits. Where it mostly computes, computing limits the
    step; else what it waits for does.
    """
    if busy.get("Wait", 0.0) < seconds / 2:
        return "computing"
    if job.parallelism.used:
        return "other ranks and their links"
    if job.servers.addresses:
        return "servers and network"
    # a server updates on one thread, beside those that read and write
    updates = (busy.get("Sum", 0.0) + busy.get("Update", 0.0)) / max(1, len(job.store.files))
    return "files" if job.store.files and updates < UPDATING * seconds else "updates"


def show_table(rows: Sequence[Sequence[str]], report: Report) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        report("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
