"""Render a plan as one HTML page with the report, the timeline of a step, the use of each memory,
and the trade-off between time and cost. `page.html.j2` is the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roadtrain.planner.look import OTHER_COLOR, STAGE_COLORS, style_sheet, templates_in
from roadtrain.simulator.engine import Task
from roadtrain.simulator.run import Result
from roadtrain.units import show_bytes, show_seconds

MOST_BARS = 4000  # most bars of a timeline; if there are more, only the longest are drawn


@dataclass(frozen=True)
class Bar:
    """A bar of a chart. `words`: The text on the bar."""

    share: float  # length, relative to the axis
    words: str
    name: str = ""
    begin: float = 0.0  # position, relative to the axis


@dataclass(frozen=True)
class TimelineRow:
    """A row of the timeline: a bar for each task of one kind of work (such as "Forward") of one
    pipeline stage or server."""

    name: str
    color: str
    bars: list[Bar] = field(default_factory=list)


@dataclass(frozen=True)
class Point:
    """A plan on the Pareto front, with the time and the cost of a sample."""

    seconds: float
    cost: float  # in currency or joules
    words: str


def page(title: str, report: str, traced: Result | None, front: Sequence[Point]) -> str:
    """Return the page as HTML.

    Args:
        title: The title of the page.
        report: The text of the report.
        traced: The result of the pick's simulation with a trace, or None if no plan fits.
        front: The plans on the Pareto front.
    """
    memory, busy = list[Bar](), list[Bar]()
    for need in () if traced is None else traced.needs:
        words = f"{show_bytes(need.nbytes)} of {show_bytes(need.room)}"
        memory.append(Bar(need.nbytes / max(need.room, 1.0), words, need.where))
    for name, share in () if traced is None else traced.busy.items():
        if share >= 0.01:
            busy.append(Bar(share, f"{share:.0%}", name))
    return (
        templates_in(Path(__file__).parent)
        .get_template("page.html.j2")
        .render(
            title=title,
            style=style_sheet(),
            report=report,
            step=[] if traced is None else timeline(traced.trace, traced.seconds),
            memory=memory,
            busy=busy,
            front=front,
        )
    )


def timeline(trace: Sequence[Task], seconds: float) -> list[TimelineRow]:
    """Return the rows of a timeline of the last `seconds` seconds of a trace: one row for each kind
    of work of each pipeline stage or server."""
    end = max((task.end for task in trace), default=0.0)
    begin = end - seconds
    tasks = [task for task in trace if task.end > max(begin, task.begin) and task.where]
    rows = {
        (where, stage): TimelineRow(f"{where} {stage}", STAGE_COLORS.get(stage, OTHER_COLOR))
        for where, stage in sorted({(task.where, task.stage) for task in tasks})
    }
    for task in sorted(tasks, key=lambda task: task.begin - task.end)[:MOST_BARS]:
        shown_from = max(task.begin, begin)
        words = f"{task.stage} {show_seconds(task.end - task.begin)}"
        share, at = (task.end - shown_from) / seconds, (shown_from - begin) / seconds
        rows[task.where, task.stage].bars.append(Bar(share, words, begin=at))
    return list(rows.values())
