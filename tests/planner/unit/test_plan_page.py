"""A plan as an HTML page: shares of axes, a row per resource and stage, and escaped text."""

from __future__ import annotations

import re

from roadtrain.planner.page import Point, page, timeline
from roadtrain.simulator.engine import Task


def test_the_front_of_time_and_cost() -> None:
    shown = page("a <b>", "1 < 2", None, [Point(2.0, 1.0, "slow"), Point(1.0, 4.0, "dear & fast")])
    assert "<h1>a &lt;b&gt;</h1>" in shown and "<pre>1 &lt; 2</pre>" in shown
    assert re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', shown) == [
        ("960.0", "172.5"),
        ("510.0", "30.0"),
    ]
    assert "dear &amp; fast: 1 s, 4</title>" in shown and "The last step" not in shown


def test_a_single_plan_has_no_front() -> None:
    assert "<svg" not in page("title", "told", None, [Point(1.0, 1.0, "alone")])


def test_a_timeline_begins_where_the_step_does() -> None:
    def task(stage: str, begin: float, end: float, where: str = "ssd") -> Task:
        made = Task(stage, 0.0, (), 0)
        made.where, made.begin, made.end = where, begin, end
        return made

    trace = [
        task("Read", 0, 3),  # begins before the last two seconds
        task("Read", 0, 1),  # ends before them
        task("Write", 2, 3),
        task("Wait", 1, 3, where=""),
    ]
    rows = timeline(trace, seconds=2)
    assert [*rows] == [("ssd", "Read"), ("ssd", "Write")]
    assert rows["ssd", "Read"] == [(0, 1, "Read 3 s")]
    assert rows["ssd", "Write"] == [(0.5, 0.5, "Write 1 s")]
