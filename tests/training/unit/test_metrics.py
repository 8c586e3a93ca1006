"""metrics.jsonl has every step exactly once, wherever a run was interrupted."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from roadtrain.errors import DamagedError, FullError
from roadtrain.training.metrics import Metrics, committed_by, read_metrics, sessions_in


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
def test_lines_of_uncommitted_steps_are_cut(path: Path, done: int) -> None:
    with Metrics(path, done) as metrics:
        assert metrics.dropped == 5 - done
        metrics.append({"step": done + 1, "loss": 0.5})
    assert steps(path) == list(range(1, done + 2))
    if done < 5:  # moved to another file, not deleted
        aside = path.with_name("metrics.uncommitted.jsonl" if done else "metrics.before-1.jsonl")
        lines = [json.loads(line) for line in aside.read_text().splitlines()]
        assert [line["step"] for line in lines if "step" in line] == list(range(done + 1, 6))
        assert not done or f"from step {done}" in aside.read_text()


def test_a_file_of_another_store_is_renamed(path: Path) -> None:
    content = path.read_bytes()
    with Metrics(path, 3, fresh=True) as metrics:
        assert (
            metrics.aside == path.with_name("metrics.before-1.jsonl")
            and metrics.aside.read_bytes() == content
        )
        metrics.append({"step": 4, "loss": 0.5})
    with Metrics(path, 0) as metrics:
        assert metrics.aside == path.with_name("metrics.before-2.jsonl")
    assert steps(path) == []


@pytest.mark.parametrize("at", [0, 2, 24, 26])
def test_a_damaged_line_is_an_error_and_leaves_the_file_unchanged(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="the lines of the last steps are missing"):
        Metrics(path, 5)
    assert path.read_bytes() == content


def test_a_damaged_line_hides_no_later_line(path: Path) -> None:
    """Rule 6: `status` shows the last step, and resuming blames this file, not the store."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"garbage{{\n", *lines[3:]]))
    assert steps(path) == [1, 2, 4, 5] and [*sessions_in(path)] == [1, 2, 4, 5]
    with pytest.raises(DamagedError, match="the last intact line is of step 2"):
        Metrics(path, 5)


def test_lines_prove_committed_steps(path: Path, tmp_path: Path) -> None:
    """Line 5 is written only after at least step 3 is committed."""
    assert committed_by(path) == 3 and committed_by(tmp_path / "none") == -1
    late = tmp_path / "late.jsonl"
    for staleness, proven in [(1, 18), (3, 17), ("none", 4)]:
        late.write_text(json.dumps({"step": 20, "lossy": {"staleness": staleness}}) + "\n")
        assert committed_by(late) == proven


@pytest.mark.parametrize("step, proven", [(1, -1), (10, -1), (11, 10), (25, 20)])
def test_lines_prove_committed_steps_with_snapshots(tmp_path: Path, step: int, proven: int) -> None:
    with Metrics(tmp_path / "metrics.jsonl", step - 1) as metrics:
        metrics.append({"step": step, "snapshot_every": 10})
    assert committed_by(tmp_path / "metrics.jsonl") == proven


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The line of the step is complete or absent, and writing continues once there is room."""
    write = os.write

    def full(fd: int, data: bytes = b"") -> int:
        if call == "write" and len(data) > 10:
            return write(fd, data[:10])  # a short write first, as the system does
        raise OSError(errno.ENOSPC, "No space left on device")

    with Metrics(path, 5) as metrics:
        monkeypatch.setattr(os, call, full)
        with pytest.raises(FullError, match="the line of step 6 needs"):
            metrics.append({"step": 6, "loss": 0.5})
        monkeypatch.undo()
        assert steps(path) == [1, 2, 3, 4, 5] and path.read_bytes().endswith(b"\n")
        metrics.append({"step": 6, "loss": 0.5})
    assert steps(path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", [b'{"step": 6, "lo', b'{"step": 6}', b"\0\0\0\0\n", b"\n"])
def test_a_torn_last_line(path: Path, torn: bytes) -> None:
    path.write_bytes(path.read_bytes() + torn)
    assert steps(path) == [1, 2, 3, 4, 5]
    with Metrics(path, 5) as metrics:
        metrics.append({"step": 6, "loss": 0.5})
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_committed_step_without_its_line(path: Path) -> None:
    with pytest.raises(
        DamagedError,
        match=r"7 steps are committed, but the lines of the last steps are missing.* of step 5",
    ):
        Metrics(path, 7)


def test_a_new_file_may_begin_late(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m", 7) as metrics:
        metrics.append({"step": 8, "loss": 0.5})
    with Metrics(tmp_path / "m", 8):
        pass
    assert steps(tmp_path / "m") == [8]
