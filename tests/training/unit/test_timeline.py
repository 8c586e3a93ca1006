"""timeline.jsonl: bounded, and never a reason to wait or to fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from roadtrain.servers.trace import Interval
from roadtrain.training import timeline as module
from roadtrain.training.run_lines import LineTail
from roadtrain.training.timeline import Timeline, before_of, timeline_of

INTERVALS = [Interval("Read", "disk of server 0 (/mnt/ssd0/run)", 1.5, 2.5, 100)] * 50


def test_names() -> None:
    assert timeline_of(Path("run/metrics.jsonl")) == Path("run/timeline.jsonl")
    assert timeline_of(Path("run/metrics.12.jsonl")) == Path("run/timeline.12.jsonl")
    assert before_of(Path("run/timeline.12.jsonl")) == Path("run/timeline.12.before.jsonl")


# Rule 4
def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 20_000)
    monkeypatch.setattr(module, "QUEUED", 1000)  # no line is dropped
    path = tmp_path / "timeline.jsonl"
    with Timeline(path, pytest.fail) as timeline:
        for step in range(200):
            timeline.add(step, INTERVALS)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) in (1, 2) and max(sizes) < 25_000
    last = (LineTail(path).read()[1] or LineTail(before_of(path)).read()[1])[-1]
    assert last["step"] == 199 and last["intervals"][0] == [*INTERVALS[0]]


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    notes: list[str] = []
    with Timeline(Path("/dev/full"), notes.append) as timeline:
        for step in range(10):
            timeline.add(step, INTERVALS)
            time.sleep(0.01)
    assert notes == ["/dev/full: no further intervals are written: No space left on device"]


def test_a_slow_disk_delays_no_step(tmp_path: Path) -> None:
    pipe = tmp_path / "timeline.jsonl"
    os.mkfifo(pipe)  # opening it blocks until there is a reader
    with Timeline(pipe, lambda note: None) as timeline:
        begin = time.monotonic()
        for step in range(1000):
            timeline.add(step, INTERVALS)
        assert time.monotonic() - begin < 1.0
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        while not os.read(reader, 1 << 20):
            time.sleep(0.01)
    os.close(reader)
