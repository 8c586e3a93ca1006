"""Values that the network benchmarks compute rather than measure: floors, growth, and the time of a
step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from benchmarks.common.lab import Measured, step_seconds
from benchmarks.common.lab_worker import WARM_UP, WorkerSpec
from benchmarks.placement import delayed
from benchmarks.servers import scaling, workers
from roadtrain.lab import Traffic
from roadtrain.servers.protocol.prefetch import Prefetcher


def test_floor_with_buffering_is_one_pull_and_the_last_piece_at_staleness_0() -> None:
    assert scaling.floor_bytes(1000, 1000, 10, 1) == 1000
    assert scaling.floor_bytes(1000, 1000, 10, 0) == 1010
    assert scaling.floor_bytes(1000, 5000, 10, 1) == 1000  # more memory than bytes to keep
    assert scaling.floor_bytes(6, 6, 10, 0) == 12  # a piece is at most the whole


def test_floor_without_buffering_is_two_pulls() -> None:
    assert scaling.floor_bytes(1000, 0, 10, 1) == 2000
    assert scaling.floor_bytes(1000, 400, 10, 0) == 1610


@pytest.mark.parametrize(("slots", "kept"), [(2, 400), (4, 800), (8, 1000), (20, 1000)])
def test_the_prefetcher_pulls_kept_bytes_once(slots: int, kept: int) -> None:
    """5 blocks of 200 bytes are pulled in forward; each is updated once backward has left it."""
    assert scaling.kept_bytes(1000, 5, slots, 200) == kept
    fetch, pulled = Prefetcher(slots, range(1, 6)), 0

    def arrive(pulls: list[Any]) -> None:
        nonlocal pulled
        while pulls:
            pulled += 200
            pulls = [*pulls[1:], *fetch.arrived(pulls[0].slot)]

    for _ in range(4):
        before = pulled
        for block in (1, 2, 3, 4, 5, 5, 4, 3, 2, 1):
            arrive(fetch.request(block))
            slot = fetch.use(block)
            arrive(fetch.returned(slot))
            if len(fetch.now) > 5:
                fetch.updated([block])
        arrive(fetch.stepped())
    assert pulled - before == scaling.floor_bytes(1000, kept, 0, 1)


def test_a_step_ends_with_its_slowest_worker_and_the_first_steps_do_not_count() -> None:
    early = {"ends": [0.0] * WARM_UP + [10.0, 11.0, 12.0]}
    late = {"ends": [5.0] * WARM_UP + [9.0, 11.0, 14.0]}
    assert step_seconds([early, late]) == [1.0, 3.0]


def test_the_goal_of_scaling_is_a_tenth_above_the_floor() -> None:
    spec = WorkerSpec("ours", 5, "bf16", layers=4, width=64, inner=128, staleness=1, budget="")
    floor = spec.nbytes / (scaling.RATE * scaling.CARRIED)
    frames = {"w0": Traffic(spec.nbytes, spec.nbytes)}
    for factor, met in ((1.09, True), (1.11, False)):
        run = Measured([factor * floor] * 4, [{"kept_blocks": 4}], frames, 0.5, {"worker": 0.1})
        row, *_ = scaling.compare(spec, 1, run, None)
        assert row.met is met and row.peer is None and row.of_floor == pytest.approx(1 / factor)


def test_growth_of_a_worker_is_a_goal_of_the_deepest_model_only() -> None:
    def result(blocks: int, peak: float) -> dict[str, Any]:
        return {
            "blocks": blocks,
            "workers": 1,
            "parameters": blocks,
            "peak": peak,
            "training": 100.0,
            "bare": 1.0,
            "buffers": 10.0,
            "held": 1.0,
        }

    plain = {blocks: {"peak": 200.0, "training": 200.0, "bare": 1.0} for blocks in (8, 16, 64)}
    rows = workers.compare(
        [result(8, 100.0), result(16, 120.0), result(64, 106.0)], plain, 512, "96MiB"
    )
    grown = {
        (row.case.split(" blocks")[0][-2:], row.metric.split(": ")[1]): row
        for row in rows
        if "growth" in row.metric
    }
    assert grown["16", "of the peak"].met is None and grown["64", "of the peak"].met is False
    assert grown["64", "while training"].met is True and grown["64", "of the buffers"].met is True


def test_every_depth_runs_about_as_many_blocks() -> None:
    assert [blocks * workers.steps_of(blocks) for blocks in (8, 16, 32, 64)] == [96, 96, 96, 192]


def test_the_main_job_is_there_and_has_no_staleness() -> None:
    assert delayed.JOB.exists() and delayed.load_job(str(delayed.JOB), {}).optimizer.delay == 0
