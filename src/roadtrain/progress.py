"""Progress: what a person sees while training: a bar on a terminal, lines elsewhere. Does NOT measure anything.

Shares of time: seconds of a stage over the step's seconds. Stages run beside each other and on several threads, so the
shares may add up to more than 100 %; Wait is what the training thread lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich import progress as bars
from rich.console import Console

ORDER = ("Forward", "Backward", "Wait", "Fetch", "Push", "Sum", "Read", "Update", "Write", "Commit")


class Progress:
    def __init__(self, steps: int, done: int, log_every: int, report: Callable[[str], None]) -> None:
        self._steps, self._log_every, self._report = steps, log_every, report
        self._console = Console()
        self._bar: bars.Progress | None = None
        if self._console.is_terminal:
            self._bar = bars.Progress(
                bars.BarColumn(20), bars.MofNCompleteColumn(), bars.TextColumn("{task.description}"),
                bars.TimeRemainingColumn(compact=True), console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, completed=done)

    def show(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        text = describe(line)
        if self._bar is not None:
            self._bar.update(self._task, completed=line["step"], description=text)
        elif line["step"] % self._log_every == 0 or line["step"] == self._steps:
            self._report(f"step {line['step']}/{self._steps}  {text}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(line: Mapping[str, Any]) -> str:
    loss = "nan" if line["loss"] is None else f"{line['loss']:.3f}"
    rate = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
    return f"loss {loss}  {rate:,.0f} tokens/s  {shares(line)}"


def shares(line: Mapping[str, Any]) -> str:
    """Where the step's time goes, stages of at least 1 %."""
    seconds, stages = line["seconds"] or 1.0, line["stages"]
    parts = [(name, stages[name]["seconds"] / seconds) for name in ORDER if name in stages]
    return " ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.01)


def show_table(rows: Sequence[tuple[str, str]], report: Callable[[str], None]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        report(f"{name:{width}}  {value}")
