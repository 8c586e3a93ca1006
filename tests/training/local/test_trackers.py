"""Trackers: the values of a run in the files of each library, also after kills, and what happens
when a library fails. Each library runs in a process of its own, because it keeps threads."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roadtrain.errors import ConfigError
from roadtrain.training.metrics import read_metrics
from roadtrain.training.tracker_libraries import LIBRARIES, OpenRun
from roadtrain.training.trackers import Trackers, check_installed
from tests.support.small_job import write_small_job

MORE = """
[budget]
host = "60MiB"
[compress]
keep = 0.5
"""
READ = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(f"{run}/tensorboard", size_guidance={"scalars": 0})
found.Reload()
steps = [(event.step, event.value) for event in found.Scalars("loss")]
config = str(found.Tensors("config/text_summary")[0].tensor_proto)
config += str(found.Tensors("lossy/text_summary")[0].tensor_proto)
""",
    "wandb": """
from wandb.proto import wandb_internal_pb2

def records(data):
    # a file header of 7 bytes, then records in blocks of 32 KiB: checksum, length, type, bytes
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""

steps, config, ids = [], "", set()
for path in sorted(pathlib.Path(run, "wandb").glob("offline-run-*/*.wandb")):
    ids.add(path.name)
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        if "loss" in items:
            steps.append((int(items["_step"]), float(items["loss"])))
        config += str(record.run.config) + str(record.run.tags)
assert len(ids) == 1, ids
""",
    "trackio": """
import sqlite3
(path,) = pathlib.Path(os.environ["TRACKIO_DIR"]).glob("*.db")
base = sqlite3.connect(path)
rows = base.execute("select step, metrics from metrics order by id").fetchall()
steps = [(step, json.loads(text)["loss"]) for step, text in rows]
assert len(base.execute("select distinct run_id from metrics").fetchall()) == 1
config = str(base.execute("select config from configs").fetchall())
""",
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient(f"sqlite:///{run}/mlflow.db")
(found,) = client.search_runs([client.get_experiment_by_name("roadtrain").experiment_id])
steps = [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "loss")]
config = str(found.data.params) + str(found.data.tags)
assert found.info.status == "FINISHED", found.info.status
""",
}
CONFIG_WORDS = {
    "tensorboard": ("hidden_size", "keep"),
    "wandb": ("hidden_size", "lossy: keep 0.5"),
    "trackio": ("hidden_size", '"lossy":{"keep":0.5'),
    "mlflow": ("hidden_size", "'lossy.keep': '0.5'"),
}


def installed() -> Iterator[Any]:
    for name, (_, modules) in LIBRARIES.items():
        lacking = [module for module in modules if importlib.util.find_spec(module) is None]
        yield pytest.param(
            name, marks=pytest.mark.skipif(bool(lacking), reason=f"{name}: no {lacking}")
        )


def environment(home: Path) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    return keep | {
        "TRACKIO_DIR": str(home / "trackio"),
        "WANDB_ERROR_REPORTING": "false",
        "HOME": str(home),  # where nobody is logged in to wandb, which is then offline
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }


def write_job(home: Path, names: list[str], steps: int) -> Path:
    path = write_small_job(home, steps, MORE)
    path.write_text(f"run.report_to = {json.dumps(names)}\n{path.read_text()}")
    return path


def train(path: Path, *args: str, kill_at: int = 0) -> str:
    """Run `roadtrain train`; with `kill_at`, kill it when it prints that step."""
    command = [sys.executable, "-m", "roadtrain", "train", str(path), *args]
    with subprocess.Popen(
        command,
        env=environment(path.parent),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        printed = ""
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            if kill_at and line.startswith(f"step {kill_at}/"):
                process.kill()
    if not kill_at:
        assert process.returncode == 0, printed
    return printed


def read_back(name: str, home: Path) -> tuple[list[tuple[int, float]], str]:
    code = f"import json, os, pathlib\nrun = {str(home / 'run')!r}\n{READ[name]}"
    code += "print('FOUND', json.dumps([steps, config]))\n"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    steps, config = json.loads(out.stdout.rpartition("FOUND ")[2])
    return [(step, value) for step, value in steps], config


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with all trackers that was killed and resumed, and what the second start printed."""
    home = tmp_path_factory.mktemp("resumed")
    path = write_job(home, [name for name in LIBRARIES if not lacks(name)], 300)
    train(path, kill_at=60)
    return home, train(path, "--run.steps", "70")


@pytest.mark.slow
@pytest.mark.parametrize("name", installed())
def test_a_killed_and_resumed_run_is_one_run_without_double_steps(
    name: str, resumed: tuple[Path, str]
) -> None:
    """Rules 2 and 3: the values are those of metrics.jsonl, and lossy options are recorded."""
    home, printed = resumed
    assert f"tracker {name}: " in printed and "failed" not in printed, printed
    lines = read_metrics(home / "run" / "metrics.jsonl")
    found, config = read_back(name, home)
    expected = [(line["step"], line["loss"]) for line in lines]
    assert [step for step, _ in expected] == list(range(1, 71))
    # a kill between two actions of the thread may lose that step, but never doubles it
    assert len(expected) - 1 <= len(found) == len(dict(found))
    assert found == [(s, pytest.approx(v, rel=1e-6)) for s, v in expected if s in dict(found)]
    for word in CONFIG_WORDS[name]:
        assert word in config, config


@pytest.mark.slow
def test_a_tracker_that_fails_prints_a_line_and_training_goes_on(tmp_path: Path) -> None:
    """Rule 6. Here mlflow's file is no database, and tensorboard's directory a file."""
    names = [name for name in ("tensorboard", "mlflow") if not lacks(name)]
    path = write_job(tmp_path, names, 5)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("")
    (tmp_path / "run" / "mlflow.db").write_text("this is not a database" * 100)
    printed = train(path)
    for name in names:
        assert printed.count(f"tracker {name}: failed after step 0 and is off") == 1, printed
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 5


def lacks(name: str) -> bool:
    return any(importlib.util.find_spec(module) is None for module in LIBRARIES[name][1])


@pytest.mark.slow
@pytest.mark.skipif(lacks("tensorboard"), reason="tensorboard is not installed")
def test_a_custom_loop_logs_its_measurements(tmp_path: Path) -> None:
    code = f"""
import torch, roadtrain
from roadtrain import Trackers
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters())
optimizer = roadtrain.place(model, optimizer, store={str(tmp_path / "run")!r}, host_budget="60MiB")
with Trackers("tensorboard", {str(tmp_path / "run")!r}, {{"lr": 1e-3}}) as trackers, optimizer:
    for step in range(optimizer.steps_done, optimizer.steps_done + 3):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trackers.log({{"loss": loss, **optimizer.metrics()}})
"""
    for _ in range(2):  # the second start continues
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
    found, config = read_back("tensorboard", tmp_path)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6] and "lr" in config


def test_a_run_that_begins_again_gets_a_new_tracker_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake library, which records what it gets."""
    opened, logged = [], []

    def open_fake(run: Any) -> Any:
        opened.append((run.id, run.last))
        log = lambda step, numbers: logged.append((run.id, step, numbers))  # noqa: E731
        return OpenRun("here", log, lambda: None)

    monkeypatch.setitem(LIBRARIES, "fake", (open_fake, ("json",)))  # type: ignore[misc]

    def start(*steps: int) -> None:
        with Trackers(["fake"], tmp_path, report=lambda _: None) as trackers:
            for step in steps:
                trackers.log({"step": step, "loss": 0.5, "note": "x", "lossy": {"keep": 0.1}})

    start(1, 2, 3)
    start(3, 4)  # the loop was killed before step 3 was committed
    start(1)
    ids = [run for run, _ in opened]
    assert ids[0] == ids[1] != ids[2] and [last for _, last in opened] == [0, 3, 0]
    assert [(ids.index(run), step) for run, step, _ in logged] == [
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
        (2, 1),
    ]
    assert logged[0][2] == {"loss": 0.5}
    monkeypatch.setenv("RANK", "1")
    start(2)
    assert len(opened) == 3


def test_lines_of_a_run_are_logged_once_they_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[int] = []

    def open_fake(run: Any) -> Any:
        log = lambda step, numbers: logged.append(step)  # noqa: E731
        return OpenRun("here", log, lambda: None)

    monkeypatch.setitem(LIBRARIES, "fake", (open_fake, ("json",)))  # type: ignore[misc]
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 6)]
    path.write_text("".join(lines)[:-5])  # the last line is still being written
    with Trackers(["fake"], tmp_path, report=lambda _: None) as trackers:
        trackers.follow(path, 2)
        trackers.follow(path, 3)
        trackers.follow(path, 5)
    assert logged == [1, 2, 3, 4]
    with Trackers(["fake"], tmp_path, report=lambda _: None) as trackers:
        with pytest.raises(ConfigError, match='no "step"'):
            trackers.log({"loss": 1.0})
        trackers.follow(path, 4)
    assert logged == [1, 2, 3, 4]


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 6."""
    monkeypatch.setitem(LIBRARIES, "wandb", (LIBRARIES["wandb"][0], ("no_such_module",)))  # type: ignore[misc]
    with pytest.raises(ConfigError, match="no_such_module") as raised:
        check_installed(["wandb"])
    assert "roadtrain[trackers]" in str(raised.value)
    with pytest.raises(ConfigError, match="did you mean `tensorboard`"):
        check_installed(["tensorbord"])
