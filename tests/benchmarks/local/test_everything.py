"""benchmarks/everything.py: all benchmarks in a go that can be interrupted."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from benchmarks import everything
from benchmarks.__main__ import items_of, modules
from benchmarks.everything import Job, jobs, run_jobs
from roadtrain.errors import RoadtrainError

# A program that takes the place of a benchmark: it counts its starts, and writes its result.
PROGRAM = """
import pathlib, subprocess, sys, time
what, json = sys.argv[1], pathlib.Path(sys.argv[-1])
with open("starts", "a") as starts:
    print(what, file=starts)
json.write_text("{}")
if what == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("child").write_text(str(child.pid))
    time.sleep(600)
sys.exit(what == "bad")
"""


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that has may wait for its parent as a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(everything, "LOGS", tmp_path / "logs")
    return tmp_path


def test_every_item_of_every_benchmark_is_listed() -> None:
    found = {job.name for job in jobs([], quick=True)}
    for name in modules():
        assert {f"{name}-{item}" for item in items_of(name)} <= found
        assert name in found or items_of(name)
    assert {"soak", "soak-sums", "reproduce"} <= found


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(RoadtrainError, match="updat"):
        jobs(["updat"], quick=False)


def test_an_item_with_a_file_is_skipped_and_a_failed_one_runs_again(folder: Path) -> None:
    todo = [Job("good", ["program", "good"]), Job("bad", ["program", "bad"])]
    assert run_jobs(todo, folder, "2026-01-01", 60) == ["bad"]
    assert (folder / "good-2026-01-01.json").exists()
    assert not list(folder.glob("bad-*"))
    assert run_jobs(todo, folder, "2026-01-01", 60) == ["bad"]
    assert (folder / "starts").read_text().split() == ["good", "bad", "bad"]
    assert run_jobs(todo[:1], folder, "2026-01-02", 60) == []
    assert (folder / "starts").read_text().split()[-1] == "good"


def test_an_item_beyond_its_limit_is_killed_with_its_processes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs([Job("hang", ["program", "hang"])], folder, "2026-01-01", 3) == ["hang"]
    assert "1/1 hang: FAILED, killed at the limit of 3 s" in capsys.readouterr().out
    assert not list(folder.glob("hang-*"))
    child = int((folder / "child").read_text())
    until = time.monotonic() + 10
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(child)
