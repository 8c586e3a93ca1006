"""Spans of work: bounded memory, whatever a step consists of (Rule 4)."""

from __future__ import annotations

import time

from roadtrain.servers.trace import CLOCK, KEPT_S, MOST_SPANS, Span, Stages, joined


def test_a_span_has_its_time_and_bytes_and_totals_stay() -> None:
    stages = Stages("worker 3")
    before = time.time()
    start = time.perf_counter()
    stages.span("Read", "disk of server 0", start, 100)
    with stages.timed("Push", 7):
        pass
    read, push = stages.spans()
    assert read[:2] == ("Read", "disk of server 0") and read.nbytes == 100
    assert push[:2] == ("Push", "worker 3") and push.nbytes == 7
    assert abs(read.begin - (CLOCK + start)) < 1e-6 and before - 1 < read.begin <= read.end
    assert {name: total.nbytes for name, total in stages.take().items()} == {"Push": 7}
    assert stages.spans(take=True) == [read, push] and stages.spans() == []


def test_spans_are_bounded_and_none_of_the_bytes_is_lost() -> None:
    stages = Stages()
    for i in range(20 * MOST_SPANS):
        stages.span("Read" if i % 3 else "Write", f"disk {i % 4}", time.perf_counter(), 1)
        if i % 1000 == 0:
            assert len(stages.spans()) < MOST_SPANS
    spans = stages.spans()
    assert spans[-1].end - spans[0].begin < KEPT_S, "too slow a machine: spans were dropped"
    assert sum(span.nbytes for span in spans) == 20 * MOST_SPANS


def test_only_close_neighbors_of_a_lane_and_stage_are_joined() -> None:
    spans = [
        Span("Read", "a", 0.0, 1.0, 1),
        Span("Read", "b", 0.5, 1.5, 2),
        Span("Write", "a", 1.0, 2.0, 4),
        Span("Read", "a", 1.05, 2.0, 8),
        Span("Read", "a", 3.0, 4.0, 16),
    ]
    assert joined(spans, 0.1) == [
        Span("Read", "a", 0.0, 2.0, 9),
        Span("Read", "b", 0.5, 1.5, 2),
        Span("Write", "a", 1.0, 2.0, 4),
        Span("Read", "a", 3.0, 4.0, 16),
    ]
    assert joined(spans, 0.0) == spans
