"""A plan's predicted step times, which are written in each line of metrics.jsonl and compared with
measured times.

Forward and Backward exclude waiting, which is called Wait. Only times that workers measure are
compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from roadtrain.config.job import Job
from roadtrain.training.metrics import last_alike, metrics_files
from roadtrain.training.progress import ORDER
from roadtrain.units import show_seconds

RECENT = 20  # rates and medians are over so many of the last steps
Line = dict[str, Any]


def predicted_for(job: Job, stage: int, replica: int) -> Line:
    """Return the plan's prediction for this rank, as keys of each metrics line; {} without a
    plan."""
    plan = job.predicted
    if not plan.seconds:
        return {}
    places = (f"stage {stage} replica {replica}", f"stage {stage}")
    where = next((place for place in places if place in plan.stages), places[1])
    stages = plan.stages.get(where, {})
    return {"predicted": {"where": where, "seconds": plan.seconds, "stages": stages}}


def compared(run: Path) -> list[list[tuple[str, ...]]]:
    """Return the tables of `tables_of` for a run directory."""
    return tables_of(last_alike(path, RECENT) for path in metrics_files(run).values())


def tables_of(ranks: Iterable[Sequence[Line]]) -> list[list[tuple[str, ...]]]:
    """Return tables that compare predicted and measured times, one for each stage and replica. A
    row has the predicted seconds, the measured seconds of the first rank, and the ratio measured /
    predicted. `ranks`: the last lines of each rank, with the same plan."""
    found: dict[str, Sequence[Line]] = {}
    for lines in ranks:
        if lines and "predicted" in lines[-1]:
            found.setdefault(lines[-1]["predicted"]["where"], lines)
    return [_table(where, lines) for where, lines in sorted(found.items())]


def _table(where: str, lines: Sequence[Line]) -> list[tuple[str, ...]]:
    plan = lines[-1]["predicted"]
    step = median(line["seconds"] for line in lines)
    out = [(where, "predicted", "measured", "ratio"), _row("a step", plan["seconds"], step)]
    for name in ORDER:
        own = [line["stages"].get(name, {}).get("seconds", 0.0) for line in lines]
        measured = median(own) if any(name in line["stages"] for line in lines) else None
        if name in plan["stages"] or measured is not None:
            out.append(_row(name, plan["stages"].get(name), measured))
    return out


def _row(name: str, predicted: float | None, measured: float | None) -> tuple[str, ...]:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
    shown = ("-" if value is None else show_seconds(value) for value in (predicted, measured))
    return (name, *shown, ratio)
