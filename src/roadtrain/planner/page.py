"""Render a plan as one HTML page with the report, the timeline of a step, the use of each memory,
and the trade-off between time and cost. `page.html.j2` is the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from roadtrain.planner.look import COLORS, style_sheet, templates_in
from roadtrain.simulator.engine import Task
from roadtrain.simulator.run import Result
from roadtrain.units import show_seconds

MOST_BARS = 4000  # most bars of a timeline; if there are more, only the longest are drawn


class Bar(NamedTuple):
    """A bar of the timeline. Positions are relative to the axis."""

    begin: float
    share: float
    words: str


class Point(NamedTuple):
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
    template = templates_in(Path(__file__).parent).get_template("page.html.j2")
    step = {} if traced is None else timeline(traced.trace, traced.seconds)
    values = {"title": title, "report": report, "traced": traced, "front": front}
    return template.render(values, style=style_sheet(), step=step, colors=COLORS)


def timeline(trace: Sequence[Task], seconds: float) -> dict[tuple[str, str], list[Bar]]:
    """Return the bars of a timeline of the last `seconds` seconds of a trace: a row for each kind
    of work, such as "Forward", of each pipeline stage or server."""
    end = max((task.end for task in trace), default=0.0)
    begin = end - seconds
    tasks = [task for task in trace if task.end > max(begin, task.begin) and task.where]
    rows: dict[tuple[str, str], list[Bar]] = {}
    for task in sorted(tasks, key=lambda task: task.begin - task.end)[:MOST_BARS]:
        shown_from = max(task.begin, begin)
        words = f"{task.stage} {show_seconds(task.end - task.begin)}"
        bar = Bar((shown_from - begin) / seconds, (task.end - shown_from) / seconds, words)
        rows.setdefault((task.where, task.stage), []).append(bar)
    return dict(sorted(rows.items()))
