"""Types of all benchmark results, a timer of functions in turn, and a description of the machine.

In a row, a `ratio` above 1 means that roadtrain is better. An `of_floor` of 1 means that roadtrain
reaches the physical limit. `goal` is the target.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypedDict

import psutil

from roadtrain.units import show_bytes


@dataclass(frozen=True)
class Row:
    case: str
    metric: str
    unit: str
    ours: float | None
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    of_floor: float | None = None
    goal: str | None = None
    met: bool | None = None


class Goal(TypedDict, total=False):
    """The fields of a row that has a goal."""

    goal: str
    met: bool


def at_least(value: float, least: float | None, what: str = "ours") -> Goal:
    """Return the goal that `value`, called `what`, is at least `least`; no goal if that is None."""
    return {} if least is None else {"goal": f"{what} >= {least:g}", "met": value >= least}


def at_most(value: float, most: float | None, what: str = "ours") -> Goal:
    """Return the goal that `value`, called `what`, is at most `most`; no goal if that is None."""
    return {} if most is None else {"goal": f"{what} <= {most:g}", "met": value <= most}


def within(value: float, share: float) -> Goal:
    """Return the goal that a ratio differs from 1 by at most `share`."""
    return {"goal": f"within {share:.0%}", "met": abs(value - 1) <= share}


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """Describe the machine by processor, cores and memory, without the host name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        name = platform.machine()
    return f"{name}, {cores()} cores, {show_bytes(psutil.virtual_memory().total)}"


@dataclass
class Report:
    name: str
    rows: list[Row]
    machine: str = field(default_factory=machine)
    date: str = field(default_factory=lambda: date.today().isoformat())

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"rows": [asdict(row) for row in self.rows]}, indent=1)

    def print(self, print_line: Callable[[str], None] = print) -> None:
        """Print a heading for each case and a line for each metric, at most 80 columns wide."""
        print_line(f"{self.name}: {self.machine}, {self.date}")
        for i, row in enumerate(self.rows):
            if i == 0 or row.case != self.rows[i - 1].case:
                print_line(f"\n{row.case}")
            parts = [f"{_show(row.ours)} {row.unit}"]
            if row.peer is not None:
                parts.append(f"{row.peer_name}: {_show(row.peer)}")
            parts += [
                f"{name} {_show(x)}"
                for name, x in (("ratio", row.ratio), ("of floor", row.of_floor))
                if x
            ]
            if row.goal:
                parts.append(
                    {True: "MET", False: "NOT MET", None: "goal"}[row.met] + f" ({row.goal})"
                )
            print_line(f"  {row.metric}: {'; '.join(parts)}")


def _show(x: float | None) -> str:
    if x is None:
        return ""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def interleave(fns: dict[str, Callable[[], None]], reps: int) -> dict[str, float]:
    """Time each function, and map its name to its median seconds.

    After a warm-up, all functions run once in each of `reps` rounds, so that a slow minute of the
    machine affects all functions alike.
    """
    for fn in fns.values():
        fn()
    seconds: dict[str, list[float]] = {name: [] for name in fns}
    for rep in range(reps):
        for name, fn in list(fns.items())[:: -1 if rep % 2 else 1]:
            begin = perf_counter()
            fn()
            seconds[name].append(perf_counter() - begin)
    return {name: median(values) for name, values in seconds.items()}
