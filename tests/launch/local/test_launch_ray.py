"""`roadtrain launch --on ray`, on two Ray nodes on this machine: a run from its two files to its
end. After a kill of any process the run continues by itself with the same losses."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from roadtrain.launch.home import RunHome
from roadtrain.training.metrics import read_metrics
from tests.support.processes import free_port
from tests.support.warm_python import warm_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: pip install ray"),
]
SUPPORT = Path(__file__).parents[2] / "support"
PATIENCE_S = 120.0
END_S = 300.0  # enough for a run of 600 steps
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + patience_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {patience_s:.0f} s"
        time.sleep(0.1)
    return result


class RayNodes:
    """A cluster of two nodes, a (the head) and b."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [warm_python(), str(SUPPORT / "ray_nodes.py")],
            executable=sys.executable,  # Ray starts its own processes normally, roadtrain warm
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.address = self._line()
        self.do("add b")

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the cluster's process has ended"
        return line

    def do(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    def close(self) -> None:
        """End the cluster and kill the processes that do not end by themselves."""
        assert self._process.stdin is not None and self._process.stdout is not None
        own = psutil.Process(self._process.pid).children(recursive=True)
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        _, left = psutil.wait_procs(own, timeout=10)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes()
    yield nodes
    nodes.close()


class LaunchedRun:
    """A run of two workers on a and b, and a server on b."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.directory, self.steps = directory, steps
        self.launches: list[subprocess.Popen[str]] = []
        monkeypatch.setenv("HOME", str(directory))
        self.home = RunHome(directory / ".roadtrain" / "runs" / "r")
        (directory / "text").write_text("".join(f"line {n} of {n * n}\n" for n in range(2000)))
        job = {
            "run": {"dir": str(directory / "run"), "steps": steps, "log_every": 1},
            "model": {"dtype": "fp32", "config": MODEL},
            "data": {"paths": [str(directory / "text")], "seq_len": 32, "batch_size": 4},
            "optimizer": {"name": "adamw", "lr": 1e-3},
        }
        (directory / "job.toml").write_text(tomli_w.dumps(job))

    def plan(self, address: str = "") -> Path:
        store = {"store": str(self.directory / "store"), "port": free_port()}
        hosts: list[dict[str, Any]] = [
            {"name": name, "kind": "gpu", "workers": 1} for name in ("a", "b")
        ]
        hosts[1]["servers"] = [store]
        for host in hosts:
            host["address"] = address
        plan = {
            "placement": "server",
            "parallelism": {"dp": 2},
            "micro_batch": 2,
            "machines": {"rendezvous_port": free_port(), "hosts": hosts},
        }
        path = self.directory / "plan.toml"
        path.write_text(tomli_w.dumps(plan))
        return path

    def launch(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [warm_python(), "-m", "roadtrain.cli", "launch", *words],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.launches.append(process)
        return process

    def close(self) -> None:
        for process in self.launches:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def on_ray(self, nodes: RayNodes, *words: str) -> subprocess.Popen[str]:
        files = (str(self.plan()), "job.toml")
        return self.launch(
            *files, "--on", "ray", "--ray-address", nodes.address, "--name", "r", *words
        )

    def losses(self) -> dict[int, float]:
        path = self.directory / "run" / "metrics.jsonl"
        return {
            row["step"]: row["loss"]
            for row in (read_metrics(path) if path.exists() else [])
            if "loss" in row
        }

    def log(self) -> str:
        return self.home.all_log.read_text() if self.home.all_log.exists() else ""

    def pids(self, *words: str) -> list[int]:
        """Return the pids of this run's processes whose command line contains all `words`."""
        pids = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if all(word in line for word in (*words, str(self.directory))):
                pids.append(process.pid)
        return pids

    def kill(self, *words: str) -> None:
        pids = wait_for(lambda: self.pids(*words), f"no process of {words}")
        os.kill(pids[0], signal.SIGKILL)

    def reach(self, step: int) -> None:
        wait_for(lambda: len(self.losses()) >= step, f"step {step}\n{self.log()}")

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.home.path / "state.json").read_text())
        return state


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchedRun]:
    run = LaunchedRun(tmp_path, monkeypatch, steps=6)
    yield run
    run.close()


def end_of(process: subprocess.Popen[str], run: LaunchedRun) -> str:
    try:
        out, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"the launch has not ended\n{out}") from None
    assert process.returncode == 0, out + run.log()
    return out


@pytest.mark.exhaustive
def test_a_run_from_two_files_completes(nodes: RayNodes, run: LaunchedRun) -> None:
    """Each host runs the processes of the plan, and no process is left."""
    out = end_of(run.on_ray(nodes), run)
    assert sorted(run.losses()) == list(range(1, run.steps + 1))
    assert "starting server b 0 on b" in out and "starting workers on a, b (2 workers)" in out
    assert "[worker 0 a] " in run.log() and "[server b 0 b] serving" in run.log()
    assert "first step" in out and "run r is done" in out
    wait_for(lambda: not run.pids("roadtrain"), "a process of the run is left")
    assert not (run.home.path / "ray").exists() and not (run.directory / "ray_results").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(400)  # each start takes a minute on a busy machine
def test_a_run_can_be_resumed_right_after_a_stop(nodes: RayNodes, run: LaunchedRun) -> None:
    """The actor of its supervisor still exists for a moment."""
    starts = 2
    run.steps = 400
    job = (run.directory / "job.toml").read_text().replace("steps = 6", "steps = 400")
    (run.directory / "job.toml").write_text(job)
    run.on_ray(nodes, "--detach")
    for start in range(1, starts + 1):
        run.reach(5 * start)
        stopping = run.launch("--stop", "r")
        wait_for(lambda: run.state()["phase"] == "ended", f"the end\n{run.log()}")
        wait_for(lambda: not run.home.is_supervised(), "the supervisor's end")
        resumed = run.launch("--resume", "r", "--detach")
        out, _ = resumed.communicate(timeout=90)
        assert resumed.returncode == 0, out + run.log()
        stopping.communicate(timeout=60)
        assert run.home.record().start == start
    run.reach(5 * starts + 5)
    end_of(run.launch("--stop", "r"), run)
    assert sorted(run.losses()) == list(range(1, len(run.losses()) + 1))


def test_an_absent_cluster_is_reported_in_a_sentence(run: LaunchedRun) -> None:
    """Rule 5: Ray itself would try for minutes."""
    where = f"127.0.0.1:{free_port()}"
    words = ("--on", "ray", "--ray-address", where, "--name", "r")
    process = run.launch(str(run.plan()), "job.toml", *words)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert f"cannot connect to a Ray cluster at {where}" in out and "Traceback" not in out


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_run_continues_with_the_same_losses_after_any_kill(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules 1 and 3: a worker, a server, a server's actor, the supervisor, the supervisor's actor,
    a node and the launcher are killed. The reference run is on this host, without Ray."""
    steps = 600
    (tmp_path / "plain").mkdir()
    plain = LaunchedRun(tmp_path / "plain", monkeypatch, steps)
    (tmp_path / "killed").mkdir()
    try:
        end_of(
            plain.launch(str(plain.plan("127.0.0.1")), "job.toml", "--on", "here", "--name", "r"),
            plain,
        )
    finally:
        plain.close()
    run = LaunchedRun(tmp_path / "killed", monkeypatch, steps)
    try:
        first = run.on_ray(nodes)
        for n, fault in enumerate(FAULTS):
            run.reach(10 + 20 * n)
            if fault == "node":
                nodes.do("kill b")
                nodes.do("add b")
            elif fault == "launcher":
                os.killpg(first.pid, signal.SIGKILL)
            elif fault == "actor":
                kill_actor_of(run, "roadtrain.cli serve")
            elif fault == "supervisor's actor":
                kill_actor_of(run, "launch.supervise")
            else:
                run.kill(fault)
            print_fault(fault)
            run.reach(len(run.losses()) + 4)
        wait_for(lambda: run.state()["phase"] == "ended", "the end", END_S)
        assert run.state()["code"] == 0, run.log()
        assert run.losses() == plain.losses()
        wait_for(lambda: not run.pids("roadtrain"), "a process of the run is left")
    finally:
        run.close()


FAULTS = (
    "launcher",
    "roadtrain.cli train",
    "roadtrain.cli serve",
    "actor",
    "launch.supervise",
    "supervisor's actor",
    "node",
)


def print_fault(fault: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} killed: {fault}", flush=True)


def kill_actor_of(run: LaunchedRun, *words: str) -> None:
    """Kill the Ray actor of a process of the run, which is the parent of its agent."""
    (pid, *_) = wait_for(lambda: run.pids(*words), f"no process of {words}")
    psutil.Process(pid).parent().parent().kill()
