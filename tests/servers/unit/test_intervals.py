"""Spans of work: bounded memory, whatever a step consists of (Rule 4)."""

from __future__ import annotations

import time

from roadtrain.servers.trace import CLOCK, KEPT_S, MOST_INTERVALS, Interval, Stages, joined


def test_a_interval_has_its_time_and_bytes_and_totals_stay() -> None:
    stages = Stages("worker 3")
    before = time.time()
    start = time.perf_counter()
    stages.interval("Read", "disk of server 0", start, 100)
    with stages.timed("Push", 7):
        pass
    read, push = stages.intervals()
    assert read[:2] == ("Read", "disk of server 0") and read.nbytes == 100
    assert push[:2] == ("Push", "worker 3") and push.nbytes == 7
    assert abs(read.begin - (CLOCK + start)) < 1e-6 and before - 1 < read.begin <= read.end
    assert {name: total.nbytes for name, total in stages.take().items()} == {"Push": 7}
    assert stages.intervals(take=True) == [read, push] and stages.intervals() == []


def test_intervals_are_bounded_and_none_of_the_bytes_is_lost() -> None:
    stages = Stages()
    for i in range(20 * MOST_INTERVALS):
        stages.interval("Read" if i % 3 else "Write", f"disk {i % 4}", time.perf_counter(), 1)
        if i % 1000 == 0:
            assert len(stages.intervals()) < MOST_INTERVALS
    intervals = stages.intervals()
    assert intervals[-1].end - intervals[0].begin < KEPT_S, (
        "too slow a machine: intervals were dropped"
    )
    assert sum(interval.nbytes for interval in intervals) == 20 * MOST_INTERVALS


def test_only_close_neighbors_of_a_lane_and_stage_are_joined() -> None:
    intervals = [
        Interval("Read", "a", 0.0, 1.0, 1),
        Interval("Read", "b", 0.5, 1.5, 2),
        Interval("Write", "a", 1.0, 2.0, 4),
        Interval("Read", "a", 1.05, 2.0, 8),
        Interval("Read", "a", 3.0, 4.0, 16),
    ]
    assert joined(intervals, 0.1) == [
        Interval("Read", "a", 0.0, 2.0, 9),
        Interval("Read", "b", 0.5, 1.5, 2),
        Interval("Write", "a", 1.0, 2.0, 4),
        Interval("Read", "a", 3.0, 4.0, 16),
    ]
    assert joined(intervals, 0.0) == intervals
