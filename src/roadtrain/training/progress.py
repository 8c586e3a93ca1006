"""Progress: what a person sees while training: a bar on a terminal, lines elsewhere. Does NOT
measure anything.

Shares of time: seconds of a stage over the step's seconds. Stages run beside each other and on
several threads, so the shares may add up to more than 100 %; Wait is what the training thread lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console

ORDER = ("Forward", "Backward", "Wait", "Fetch", "Push", "Sum", "Read", "Update", "Write", "Commit")
Show = Callable[[Mapping[str, Any]], None]


@contextmanager
def progress(
    steps: int, done: int, log_every: int, report: Callable[[str], None]
) -> Iterator[Show]:
    """Inside the context a function that shows one line of metrics.jsonl."""

    def say(line: Mapping[str, Any]) -> None:
        if line["step"] % log_every == 0 or line["step"] == steps:
            report(f"step {line['step']}/{steps}  {describe(line)}")

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
        yield lambda line: bar.update(task, completed=line["step"], description=describe(line))


def describe(line: Mapping[str, Any]) -> str:
    """Loss, rate, and where the step's time goes: stages of at least 1 %."""
    loss = "nan" if line["loss"] is None else f"{line['loss']:.3f}"
    rate = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
    seconds, stages = line["seconds"] or 1.0, line["stages"]
    shares = [(name, stages[name]["seconds"] / seconds) for name in ORDER if name in stages]
    shown = " ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.01)
    return f"loss {loss}  {rate:,.0f} tokens/s  {shown}"


def show_table(rows: Sequence[Sequence[str]], report: Callable[[str], None]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        report("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
