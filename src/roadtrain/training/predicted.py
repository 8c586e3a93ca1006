"""What a plan promised of a step, in each line of metrics.jsonl, and beside what was measured.

Forward and Backward are without waiting, which is Wait, in both. Does NOT predict anything, and
does NOT know what servers measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from roadtrain.config.job import Job
from roadtrain.training.metrics import last_alike
from roadtrain.training.progress import ORDER
from roadtrain.units import show_seconds

RECENT = 20  # steps that rates and medians are taken from
RANK = re.compile(r"metrics\.(\d+)\.jsonl")  # others have steps that do not count
Line = dict[str, Any]


def promised(job: Job, stage: int, replica: int) -> Line:
    """What a line of this rank says of its plan; nothing where there is none."""
    told = job.predicted
    if not told.seconds:
        return {}
    places = (f"stage {stage} replica {replica}", f"stage {stage}")
    where = next((place for place in places if place in told.stages), places[1])
    stages = told.stages.get(where, {})
    return {"predicted": {"where": where, "seconds": told.seconds, "stages": stages}}


def compared(run: Path) -> list[list[tuple[str, ...]]]:
    """A table for each place that ranks of this directory are at, the first rank of each: what
    was predicted, what was measured, and how many times as long that is."""
    named = ((RANK.fullmatch(path.name), path) for path in run.glob("metrics.*.jsonl"))
    ranks = sorted((int(match[1]), path) for match, path in named if match)
    found: dict[str, list[Line]] = {}
    for path in (run / "metrics.jsonl", *(path for _, path in ranks)):
        lines = last_alike(path, RECENT)
        if lines and "predicted" in lines[-1]:
            found.setdefault(lines[-1]["predicted"]["where"], lines)
    return [_table(where, lines) for where, lines in sorted(found.items())]


def _table(where: str, lines: Sequence[Line]) -> list[tuple[str, ...]]:
    told = lines[-1]["predicted"]
    step = median(line["seconds"] for line in lines)
    out = [(where, "predicted", "measured", "ratio"), _row("a step", told["seconds"], step)]
    for name in ORDER:
        own = [line["stages"].get(name, {}).get("seconds", 0.0) for line in lines]
        measured = median(own) if any(name in line["stages"] for line in lines) else None
        if name in told["stages"] or measured is not None:
            out.append(_row(name, told["stages"].get(name), measured))
    return out


def _row(name: str, predicted: float | None, measured: float | None) -> tuple[str, ...]:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
    shown = ("-" if one is None else show_seconds(one) for one in (predicted, measured))
    return (name, *shown, ratio)
