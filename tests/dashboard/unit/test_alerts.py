"""Findings and tables of a run: its state, alerts, rates and tables."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from array import array
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.json import encode

from roadtrain import cli, environment
from roadtrain.config.cluster import Host
from roadtrain.dashboard import alerts as module
from roadtrain.dashboard import watch
from roadtrain.dashboard.alerts import LaneRate, alerts, busy_seconds, lane_rates, limit_line
from roadtrain.dashboard.watch import NodeWatch, RunWatch
from roadtrain.errors import ConfigError
from roadtrain.launch.home import LaunchRecord, ProcessRow, RunHome, RunState
from roadtrain.servers.trace import Interval
from roadtrain.training.timeline import TimelineLine
from tests.support.large_run import write_large_run

drawing = pytest.importorskip("roadtrain.dashboard.drawing", reason="no bokeh")


def part(name: str, run: RunWatch | None, found: Any = ()) -> str:
    return str(drawing.part(name, run, found, None))


JOB = """
[run]
dir = "{home}/run"
steps = 100
[model.config]
model_type = "llama"
[store]
files = ["{home}/ssd0"]
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run that has trained 60 of 100 steps."""
    write_large_run(tmp_path / "run", JOB.format(home=tmp_path), 60, 2)
    return tmp_path / "run"


def change_last(directory: Path, **changes: Any) -> None:
    lines = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines[-20:]:
        line |= changes
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def test_a_run_that_trains_has_no_alert(directory: Path) -> None:
    run = RunWatch(str(directory))
    assert run.state() == "training" and run.durable == 59 and [*run.ranks] == [0, 1]
    assert alerts(run, lane_rates(run, None)) == []
    assert limit_line(run) == "limited by computing"
    assert "about" not in part("top", run) and "20 s left" in part("top", run)


# Rule 5
def test_a_stalled_run_and_a_run_that_does_not_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = time.time() - 60
    for path in directory.iterdir():
        os.utime(path, (old, old))
    assert RunWatch(str(directory)).state() == "not running"
    store = directory.parent / "ssd0"
    store.mkdir()
    fd = os.open(store, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    run = RunWatch(str(directory))
    # the process that holds the store has just started, so its first step is not late yet
    began = SimpleNamespace(create_time=partial(float, time.time()))
    monkeypatch.setattr(watch.psutil, "Process", lambda pid: began)
    assert run.state() == "starting" and alerts(run, []) == []
    assert "starting: step 60 of 100" in part("top", run)
    monkeypatch.setattr(watch, "FIRST_S", 0.0)
    assert run.state() == "stalled" and alerts(run, [])[0].startswith("stalled: no new step for ")
    monkeypatch.undo()
    began = SimpleNamespace(create_time=lambda: old - 60)
    monkeypatch.setattr(watch.psutil, "Process", lambda pid: began)
    assert run.state() == "stalled"
    assert alerts(run, []) == ["stalled: no new step for 60 s, a step takes 500 ms"]
    os.close(fd)
    assert run.state() == "not running" and alerts(run, []) == []


def test_a_loss_that_diverges_or_is_not_finite(directory: Path) -> None:
    change_last(directory, loss=9.0)
    assert "the loss diverges: 9 over the last 20 steps" in alerts(RunWatch(str(directory)), [])[0]
    change_last(directory, loss=None)
    assert alerts(RunWatch(str(directory)), []) == ["the loss of step 60 is not finite"]


def test_a_disk_that_is_nearly_full(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(directory)._replace(total=100 << 30, free=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    (alert,) = alerts(RunWatch(str(directory)), [])
    assert alert.startswith("disk full soon: 1.0 GiB of 100.0 GiB are free at ")


def test_a_disk_that_fills_before_the_run_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # 40 steps, of 0.5 s each, are left
        line["memory"]["disk"] = {"bytes": line["step"] << 30, "budget": 70 << 30}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    run = RunWatch(str(directory))
    assert alerts(run, []) == []  # too short for a trend
    monkeypatch.setattr(module, "TREND_S", 10.0)
    assert alerts(run, []) == [
        "disk full soon: 10.0 GiB are free, enough for 5.08 s at the rate of the last 30 s, but"
        " training takes 20 s more"
    ]
    for line in lines:
        line["memory"]["disk"]["budget"] = 1 << 50
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert alerts(RunWatch(str(directory)), []) == []


def test_a_slow_disk_beside_others_or_its_probed_rate(directory: Path) -> None:
    run = RunWatch(str(directory))
    rates = [
        LaneRate(f"disk of server {i}", 1e9, rate, 1.0) for i, rate in enumerate((3e9, 3e9, 1e9))
    ]
    assert alerts(run, rates) == [
        "slow disk: 1.00 GB/s at server 2, the other disks reach 3.00 GB/s"
    ]
    assert alerts(run, rates[:2]) == []
    probed = LaneRate("disk of server 0", 1e9, 1e9, 1.0, 7e9)
    assert "its probed rate is 7.00 GB/s" in alerts(run, [probed])[0]
    idle = LaneRate("disk of server 0", 1e3, 1e3, 0.001, 7e9)
    assert alerts(run, [idle]) == []


def test_silent_nodes_and_ended_processes(directory: Path) -> None:
    run = RunWatch(str(directory))
    late = NodeWatch("server", "10.0.0.9:7000", error="connection refused")
    late.answered -= 5
    run.nodes = [NodeWatch("server", "10.0.0.8:7000"), late]
    run.processes = (ProcessRow("worker 1", "b", "ended", 0, 0.0),)
    silent, ended = alerts(run, [])
    assert silent.startswith("server 10.0.0.9:7000 has not answered for 5.")
    assert silent.endswith("s (connection refused)")
    assert ended == "worker 1 on b is ended"
    state = part("state", run)
    assert "has not answered for 5." in state and "ended on b" in state


def test_a_launched_run_is_found_by_its_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    home = RunHome.of("first")
    home.path.mkdir(parents=True)
    job = JOB.format(home=directory.parent)
    record = LaunchRecord(name="first", engine="here", launched=0.0, directory="/")
    home.write(record, "", job)
    rows = (
        ProcessRow("worker 0", "a", "running", 0, 0.0),
        ProcessRow("s 0", "b", "waiting", 2, 0.0),
    )
    home.write_state(RunState(phase="going", processes=rows))
    served = job + '[servers]\naddresses = ["127.0.0.1:1"]\n'
    (directory / "job.toml").write_text(served)  # where the launcher has put the servers
    run = RunWatch("first")
    try:
        assert run.directory == directory and run.state() == "training"
        assert [node.address for node in run.nodes] == ["127.0.0.1:1"]
        assert alerts(run, []) == ["s 0 on b is waiting"]
        shown = part("state", run)
        assert "running on a" in shown and "waiting on b" in shown
    finally:
        run.close()
    home.write_ended(1, "failed")
    run.refresh()
    assert run.state() == "not running" and alerts(run, []) == []


def test_a_launched_run_whose_files_are_on_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = RunHome.of("far")
    home.path.mkdir(parents=True)
    job = JOB.format(home="/far/away") + '[servers]\naddresses = ["10.9.9.9:1"]\n'
    record = LaunchRecord(name="far", engine="ray", launched=0.0, directory="/")
    home.write(record, "", job + 'token_file = "/far/away/token"\n')
    rows = tuple(ProcessRow(f"worker {i}", f"host{i}", "running", 0, 0.0) for i in range(2))
    home.write_state(RunState(phase="going", step=7, processes=rows))
    run = RunWatch("far")
    try:
        assert limit_line(run).startswith(
            "steps of 2 of 2 workers: their files are on host0, host1"
        )
        assert "`roadtrain show /far/away/run` shows them there" in limit_line(run)
        assert run.durable == 7 and [node.role for node in run.nodes] == ["supervisor"]
        state = part("state", run)
        assert "servers are not asked: " in state and "running on host1" in state
        assert "step 7" in state
    finally:
        run.close()


def test_rates_are_compared_with_those_of_the_probe() -> None:
    intervals = [
        Interval("Read", "x", 0.0, 2.0, 3),
        Interval("Write", "x", 1.0, 3.0, 3),
        Interval("Read", "x", 5, 6),
    ]
    assert busy_seconds(intervals) == 4.0
    run = RunWatch.__new__(RunWatch)
    run.name, run.ranks, run.nodes = "r", {}, []
    lanes = ("disk of server 0 (/mnt/a/run)", "disk of server 1 (/mnt/b/run)", "worker 0")
    links = (
        "link of worker 0 to server 0 (10.0.0.1:7000)",
        "link of worker 0 to server 1 (127.0.0.1:7)",
    )
    own = [Interval("Read", lane, 0.0, 1.0, 10**9) for lane in (*lanes, *links)]
    own += [Interval("Write", lanes[1], 0.0, 1.0, 10**9), Interval("Wait", "worker 0", 0.0, 4.0)]
    run.by_process = lambda: {"worker 0": own}  # type: ignore[method-assign]
    ssds = [
        {"read": "4GB/s", "write": "2GB/s", "mixed": 2, "directories": ["/mnt/a"]},
        {"read": "4GB/s", "write": "2GB/s", "mixed": 1.5, "directories": ["/mnt/b"]},
    ]
    tree = {"name": "h", "memory": "1GiB", "ssds": ssds, "nics": [{"rate": "10Gbit/s"}]}
    found = {rate.lane: rate for rate in lane_rates(run, Host.model_validate(tree))}
    assert [*found] == [lanes[0], lanes[1], *links]
    assert found[lanes[0]].probed == 4e9 and found[lanes[0]].mean == 0.25e9
    assert found[lanes[1]].probed == pytest.approx(2 / (1 / 4e9 + 1 / 2e9) * 1.5)
    assert found[links[0]].probed == 1.25e9 and found[links[1]].probed is None
    assert all(rate.probed is None for rate in lane_rates(run, None))
    html = part("rates", None, [*found.values()])
    assert "not measured" in html and "4.00 GB/s" in html


def test_tables_escape_what_they_show(directory: Path) -> None:
    evil = directory.parent / "<script>"
    directory.rename(evil)
    run = RunWatch(str(evil))
    run.nodes = [NodeWatch("server", "h:1", text="<b>")]
    shown = part("top", run) + part("state", run) + part("memory", run)
    assert "<script" not in shown and "<b>" not in shown.replace("<b>" + "/", "").replace(
        f"<b>{'&'}", ""
    )
    assert "&lt;script&gt;" in shown and "&lt;b&gt;" in shown


def test_older_runs_and_runs_without_a_step(directory: Path) -> None:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    old = [
        {k: v for k, v in json.loads(x).items() if k not in ("memory", "committed")} for x in lines
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in old))
    (directory / "metrics.1.jsonl").unlink()
    run = RunWatch(str(directory))
    assert run.durable == 58 and "not recorded" in part("memory", run)
    (directory / "metrics.jsonl").unlink()
    empty = RunWatch(str(directory))
    assert limit_line(empty) == "no step yet" and "step 0 of 100" in part("top", empty)


def test_lines_that_were_dropped_are_forgotten(directory: Path) -> None:
    run = RunWatch(str(directory))
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = [*lines[:50], *(x.replace('"loss"', '"lr": 0.5, "loss"') for x in lines[50:]), *lines]
    (directory / "metrics.jsonl").write_text("".join(again[:60]))
    with open(directory / "metrics.jsonl", "a") as file:  # the same length, then more
        file.write(lines[52])
    run.refresh()
    assert [*run.lines.curves["step"]][-2:] == [60.0, 53.0]
    assert len(run.lines.curves["step"]) == 61


def test_the_timeline_of_a_run_that_repeats_steps(directory: Path) -> None:
    run = RunWatch(str(directory))
    assert [*run.ranks[0].steps] == [*range(53, 61)]
    again = TimelineLine(58, [Interval("Read", "disk of server 0", 5.0, 6.0, 7)])
    with open(directory / "timeline.jsonl", "ab") as file:
        file.write(encode(again) + b"\n")
    run.refresh()
    assert [*run.ranks[0].steps] == [*range(53, 59)] and run.ranks[0].steps[58] == again.intervals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "not a run directory"),
        ([""], "not a run directory"),
        (["127.0.0.1:7000"], "names servers"),
        (["RUN", "--listen", "0.0.0.0:0"], "needs a token"),
        (["RUN", "--port", "1", "--listen", "127.0.0.1:0", "--token-file", "x"], "both set"),
        (["RUN", "--theme", "pink"], "neither light nor dark"),
        (["RUN", "--png", "/nowhere/a.png"], "is not a directory"),
    ],
)
def test_wrong_inputs(directory: Path, capsys: Any, words: list[str], message: str) -> None:
    assert cli.main(["show", *(str(directory) if word == "RUN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_without_bokeh(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = pytest.importorskip("roadtrain.dashboard.show")

    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'bokeh'", name="bokeh")

    monkeypatch.setattr(environment.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"bokeh is not installed[\s\S]*roadtrain\[dashboard\]"):
        show.command(str(directory))


def test_curves_are_thinned_without_losing_their_extremes() -> None:
    steps = array("d", range(10_000))
    losses = array("d", [math.sin(step) for step in steps])
    losses[1234], losses[777] = 50.0, math.nan
    x, y = drawing.thinned(steps, losses)
    assert len(x) <= drawing.POINTS and max(y[y == y]) == 50.0 and x[y == 50.0] == [1234]
    assert [*drawing.thinned(steps[:10], losses[:10])[1]] == [*losses[:10]]
    missing = array("d", [math.nan] * 10_000)
    assert len(drawing.thinned(steps, missing)[0]) <= drawing.POINTS
