"""Progress display during training: a bar on a terminal, otherwise lines. All numbers come from the
lines of metrics.jsonl. A line divides a step into Forward, Backward (both without waiting), Wait
and other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console

from roadtrain.config.job import Job

ORDER = ("Forward", "Backward", "Wait", "Fetch", "Push", "Sum", "Read", "Update", "Write", "Commit")
OWN = ORDER[:3]  # stages of the training thread; the other stages run concurrently with it
UPDATING = 0.8  # if the update thread is busy for a larger share of a step, it limits the step
LEGEND = (
    "a step: Forward and Backward compute, Wait is waiting for the named limit, other is the rest"
    " (batches, clipping)"
)
Show = Callable[[Mapping[str, Any]], None]
Report = Callable[[str], None]  # called with each line to be printed


def silent(_: str) -> None: ...


@contextmanager
def progress(job: Job, done: int, report: Report) -> Iterator[Show]:
    """Yield a function that shows a line of metrics.jsonl, given as a dict."""
    steps = job.run.steps

    def say(line: Mapping[str, Any]) -> None:
        if line["step"] % job.run.log_every == 0 or line["step"] == steps:
            report(f"step {line['step']}/{steps}  {describe(job, line)}")

    if done < steps:
        report(LEGEND)
    console = Console()
    if (
        not console.is_terminal or os.environ.get("RANK", "0") != "0"
    ):  # only the first process has a bar
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
    """Return a text with the loss, the tokens per second, the percentages of the stages, and the
    resource that limited the step."""
    loss = "nan" if line["loss"] is None else f"{line['loss']:.3f}"
    rate = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
    busy = {name: stage["seconds"] for name, stage in line["stages"].items()}
    shown = " ".join(f"{name} {share}%" for name, share in shares(line["seconds"], busy).items())
    limit = limited_by(job, line["seconds"], busy)
    return f"loss {loss}  {rate:,.0f} tokens/s  {shown}, limited by {limit}"


def shares(seconds: float, busy: Mapping[str, float]) -> dict[str, int]:
    """Return the percentages of `seconds` that the training thread spent in each of its stages, as
    whole numbers that add up to 100. Stages with 0 % are left out. `busy`: the seconds of each
    stage."""
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
    """Return the name of the resource that limits steps that took `seconds`: computing, or the
    resource for which the training thread mostly waits. `busy`: the seconds of each stage."""
    if busy.get("Wait", 0.0) < seconds / 2:
        return "computing"
    if job.parallelism.used:
        return "other ranks and their links"
    if job.servers.addresses:
        return "servers and network"
    # a server updates in a single thread, and reads and writes in other threads
    updates = (busy.get("Sum", 0.0) + busy.get("Update", 0.0)) / max(1, len(job.store.files))
    return "files" if job.store.files and updates < UPDATING * seconds else "updates"


def show_table(rows: Sequence[Sequence[str]], report: Report) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        report("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
