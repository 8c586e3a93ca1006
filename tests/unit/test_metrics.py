"""metrics.jsonl: every step exactly once, wherever a run was cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roadtrain.errors import DamagedError
from roadtrain.metrics import Metrics, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        for step in range(1, 6):
            metrics.append({"step": step, "loss": 1 / step})
    return path


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


@pytest.mark.parametrize("done", range(6))
def test_lines_that_were_not_committed_are_cut(path: Path, done: int) -> None:
    with Metrics(path, done) as metrics:
        assert metrics.dropped == 5 - done
        metrics.append({"step": done + 1, "loss": 0.5})
    assert steps(path) == list(range(1, done + 2))


@pytest.mark.parametrize("torn", [b'{"step": 6, "lo', b'{"step": 6}', b"\0\0\0\0\n", b"\n"])
def test_a_torn_last_line(path: Path, torn: bytes) -> None:
    path.write_bytes(path.read_bytes() + torn)
    assert steps(path) == [1, 2, 3, 4, 5]
    with Metrics(path, 5) as metrics:
        metrics.append({"step": 6, "loss": 0.5})
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_committed_step_without_its_line(path: Path) -> None:
    with pytest.raises(DamagedError, match="has lines up to step 5, 7 steps are committed"):
        Metrics(path, 7)


def test_a_new_file_may_begin_late(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m", 7) as metrics:
        metrics.append({"step": 8, "loss": 0.5})
    with Metrics(tmp_path / "m", 8):
        pass
    assert steps(tmp_path / "m") == [8]
