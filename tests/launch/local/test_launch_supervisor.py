"""A launched run: its supervisor with an engine of small processes, and whole runs on this host
through the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roadtrain.config.job import Job, make_job
from roadtrain.config.plan_file import make_plan_file
from roadtrain.errors import FullError, LaunchError
from roadtrain.launch import supervisor
from roadtrain.launch.control_socket import ControlClient, ask_supervisor
from roadtrain.launch.home import LaunchRecord, RunHome, RunState
from roadtrain.launch.launch_engine import HostSeen
from roadtrain.launch.logs import RunLogs
from roadtrain.launch.processes import Process, WorkerSet
from roadtrain.launch.protocol import run_state
from roadtrain.launch.protocol.run_events import (
    HostJoined,
    HostLost,
    Output,
    ProcessEnded,
    RunEvent,
    WorkersEnded,
)
from roadtrain.launch.resolve import ResolvedRun, resolve
from roadtrain.launch.supervisor import Supervisor
from roadtrain.training.metrics import read_metrics
from roadtrain.training.train import train
from tests.support.processes import free_port
from tests.support.warm_python import warm_python

PATIENCE_S = 60.0
RUN_S = 200.0  # a whole run on a busy machine
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def wait_for(condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {within_s:.0f} s"
        time.sleep(0.05)
    return result


def job_tree(directory: Path, steps: int) -> dict[str, Any]:
    text = directory / "text.txt"
    text.write_text("".join(f"line {n} of {n * n}\n" for n in range(2000)))
    return {
        "run": {"dir": str(directory / "run"), "steps": steps, "log_every": 1},
        "model": {"dtype": "fp32", "config": MODEL},
        "data": {"paths": [str(text)], "seq_len": 32, "batch_size": 2},
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }


def plan_tree(directory: Path, workers: int) -> dict[str, Any]:
    hosts: list[dict[str, Any]] = [
        {"name": f"gpu{n}", "kind": "gpu", "address": "127.0.0.1", "workers": 1}
        for n in range(workers)
    ]
    place = {"store": str(directory / "store"), "port": free_port()}
    hosts.append({"name": "s0", "kind": "spare", "address": "127.0.0.1", "servers": [place]})
    return {
        "placement": "server",
        "parallelism": {"dp": workers},
        "micro_batch": 2 // workers,  # a step of the job has 2 samples
        "machines": {"rendezvous_port": free_port(), "hosts": hosts},
    }


class SmallProcesses:
    """A LaunchEngine whose services sleep and whose workers run `script`."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.workers: tuple[int, list[subprocess.Popen[bytes]]] | None = None
        self.step = -1
        self.jobs: list[Job] = []  # the job file of each attempt
        self.refuses = 0  # number of service starts to refuse
        self.finishes_its_step = False  # ignore requests to stop
        self.pending: list[RunEvent] = []  # returned by the next `events`
        self.closed = False

    def hosts(self) -> Sequence[HostSeen]:
        return [HostSeen(name, "127.0.0.1", 0) for name in ("gpu0", "s0")]

    def ask(self, host: str, words: Sequence[str], request: Any) -> Any:
        stages = [[["stage 0", "predicted", "measured", "ratio"]]]
        return {"step": self.step, "code": 0, "lines": [f"asked on {host}"], "stages": stages}

    def run_verb(self, words: Sequence[str]) -> str:
        raise LaunchError(f"{words[0]} is no verb of this engine")

    def start(self, process: Process) -> None:
        if self.refuses:
            self.refuses -= 1
            raise LaunchError("host s0 cannot be reached")
        self.services[process.name] = subprocess.Popen(["sleep", "1000"])

    def start_workers(self, workers: WorkerSet) -> None:
        attempt = str(workers.attempt)
        files = {Path(file.path).name: file.content for file in workers.processes[0].files}
        self.jobs.append(make_job(tomllib.loads(files["job.toml"])))
        run = [subprocess.Popen(["sh", "-c", self.script, attempt]) for _ in workers.processes]
        self.workers = workers.attempt, run

    def stop(self, name: str, grace_s: float) -> None:
        if self.finishes_its_step:
            return
        for process in self.workers[1] if name == "workers" else [self.services[name]]:
            process.kill()

    def events(self, timeout_s: float) -> Sequence[RunEvent]:
        time.sleep(min(0.02, timeout_s))
        out, self.pending = self.pending, list[RunEvent]()
        for name, process in list(self.services.items()):
            if (code := process.poll()) is not None:
                del self.services[name]
                out.append(ProcessEnded(name, code, "its last line"))
        if self.workers is not None and all(p.poll() is not None for p in self.workers[1]):
            attempt, run = self.workers
            self.workers = None
            out.append(Output("worker 0", "gpu0", f"attempt {attempt} is over"))
            out.append(WorkersEnded(attempt, run[0].returncode, "worker 0"))
        return out

    def close(self) -> None:
        self.closed = True
        for process in (*self.services.values(), *(self.workers[1] if self.workers else ())):
            process.kill()
            process.wait()


class SupervisedRun:
    """A supervisor in a thread."""

    def __init__(
        self, directory: Path, script: str, *, stops: bool = False, new_store: bool = False
    ) -> None:
        self.home = RunHome(directory / "home")
        record = LaunchRecord(name="r", engine="here", launched=time.time(), directory="/")
        self.home.write(record, "", "")
        self.engine = SmallProcesses(script)
        run = resolve(
            make_plan_file(plan_tree(directory, 1)),
            make_job(job_tree(directory, 5)).changed({"run.new_store": new_store}),
            name="r",
            addresses={},
            token="secret",
        )
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(run, stops))

    def _run(self, run: ResolvedRun, stops: bool) -> None:
        with self.home.supervised(), RunLogs(self.home) as logs:
            supervisor = Supervisor(run, self.engine, self.home, logs, ends_with_launcher=stops)
            self.code = supervisor.run()

    def __enter__(self) -> SupervisedRun:
        self._thread.start()
        return self

    def ended(self) -> RunState:
        self._thread.join(PATIENCE_S)
        assert self.code is not None
        return self.home.state()

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            with suppress(LaunchError):
                ask_supervisor(self.home, "stop")
        self._thread.join(PATIENCE_S)
        assert self.engine.closed and not self._thread.is_alive()

    def log(self) -> str:
        return self.home.all_log.read_text() if self.home.all_log.exists() else ""


def test_workers_that_fail_once_are_restarted(tmp_path: Path) -> None:
    with SupervisedRun(tmp_path, "exit $((1 - $0))") as run:
        state = run.ended()
    assert (state.phase, state.code, state.why) == ("ended", 0, "all workers are done")
    assert state.attempt == 1
    by_name = {process.name: process for process in state.processes}
    assert by_name["worker 0"].restarts == 1 and by_name["server s0 0"].restarts == 0
    log = run.log()
    restart = log.index("all workers restart from the committed step at once")
    assert "[worker 0 gpu0] attempt 0 is over" in log[:restart]  # the restart follows
    assert "[worker 0 gpu0] attempt 1 is over" in log[restart:]


def test_a_service_restart_is_shown_by_status(tmp_path: Path) -> None:
    with SupervisedRun(tmp_path, "exec sleep 1000") as run:
        server = wait_for(lambda: run.engine.services.get("server s0 0"), "a server")
        server.kill()

        def restarted() -> Any:
            with suppress(LaunchError):
                reply = ask_supervisor(run.home, "status")
                row = next(p for p in reply["state"]["processes"] if p["name"] == "server s0 0")
                return reply if row["restarts"] == 1 and row["state"] == "running" else None

        reply = wait_for(restarted, "a restart")
        assert reply["run"]["lines"] == ["asked on gpu0"]
        assert [table[0][0] for table in reply["run"]["stages"]] == ["stage 0"]
        ask_supervisor(run.home, "stop", ["enough"])
        state = run.ended()
    assert (state.code, state.why) == (130, "enough")
    assert "server s0 0 on s0 ended (signal 9), it is restarted at once: its last line" in run.log()


def test_a_start_refused_by_the_engine_is_retried(tmp_path: Path) -> None:
    run = SupervisedRun(tmp_path, "exit 0")
    run.engine.refuses = 1
    with run:
        assert run.ended().code == 0
    assert "host s0 cannot be reached" in run.log()


def test_a_host_lost_before_the_first_turn_gets_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted supervisor sees this order of events."""
    monkeypatch.setattr(run_state, "BACK_S", 0.5)
    run = SupervisedRun(tmp_path, "exit 0")
    run.engine.pending.append(HostLost("gpu0", "it is gone"))
    with run:
        wait_for(lambda: "workers wait: gpu0 must be back" in run.log(), "a message")
        assert run.engine.workers is None
        run.engine.pending.append(HostJoined("gpu0", "127.0.0.1", 1))
        assert run.ended().code == 0


def test_a_joined_host_that_cannot_run_workers_is_reported(tmp_path: Path) -> None:
    run = SupervisedRun(tmp_path, "exec sleep 1000")
    with run:
        wait_for(lambda: run.engine.workers, "workers")
        run.engine.pending.append(HostJoined("new", "127.0.0.2", 1))
        message = "host new joined, but is not used for workers: it does not answer"
        wait_for(lambda: message in run.log(), "a message")
        ask_supervisor(run.home, "stop")
        assert run.ended().code == 130


def test_a_run_can_be_stopped_while_it_is_measured(tmp_path: Path) -> None:
    """The measurement ends without a result."""
    run = SupervisedRun(tmp_path, "exec sleep 1000")
    run.engine.finishes_its_step = True
    with run:
        workers = wait_for(lambda: run.engine.workers, "workers")
        ask_supervisor(run.home, "measure")
        ask_supervisor(run.home, "stop", ["the user asked for it"])
        run.engine.finishes_its_step = False
        workers[1][0].kill()
        state = run.ended()
    assert (state.code, state.why) == (130, "the user asked for it")
    assert not run.home.measured_path.exists()


def test_a_full_home_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """state.json waits for free space, which is reported once (Rules 3 and 6)."""
    real, full = RunHome.write_state, threading.Event()

    def write_state(home: RunHome, state: RunState) -> None:
        if full.is_set():
            raise FullError("state.json: writing the run's state needs 500 B, 0 B are free")
        real(home, state)

    monkeypatch.setattr(RunHome, "write_state", write_state)
    monkeypatch.setattr(supervisor, "WRITE_AGAIN_S", 0.1)
    with SupervisedRun(tmp_path, "exec sleep 1000") as run:
        wait_for(lambda: run.engine.workers, "workers")
        full.set()
        for attempt in (1, 2):
            wait_for(lambda: run.engine.workers, "workers")[1][0].kill()
            wait_for(lambda attempts=attempt + 1: len(run.engine.jobs) == attempts, "a restart")
        time.sleep(0.5)
        full.clear()
        wait_for(lambda: run.home.state().attempt == 2, "a state")
        ask_supervisor(run.home, "stop")
        assert run.ended().code == 130
    assert run.log().count("writing state.json failed") == 1
    assert run.log().count("state.json can be written again") == 1


def test_the_next_supervisor_completes_a_requested_stop(tmp_path: Path) -> None:
    """The first supervisor was killed before the run ended."""
    run = SupervisedRun(tmp_path, "exec sleep 1000")
    run.home.write_state(msgspec.structs.replace(run.home.state(), stops="the user asked for it"))
    with run:
        state = run.ended()
    assert (state.code, state.why) == (130, "the user asked for it")
    assert "starting" not in run.log()


def test_steps_of_an_older_run_do_not_count_for_a_new_run(tmp_path: Path) -> None:
    """The directory holds the older run's steps until the new workers have started (Rule 6)."""
    run = SupervisedRun(tmp_path, "exec sleep 1000", new_store=True)
    run.engine.step = 998
    with run:
        first = wait_for(lambda: run.engine.workers, "workers")
        ask_supervisor(run.home, "status")
        first[1][0].kill()
        wait_for(lambda: len(run.engine.jobs) == 2, "a second attempt")
        assert run.home.state().step == -1
        run.engine.pending.append(Output("worker 0", "gpu0", "step 1/5  loss 5.0"))
        run.engine.step = 1
        wait_for(lambda: "step 1/5" in run.log(), "a step")
        wait_for(lambda: run.engine.workers, "workers")[1][0].kill()
        wait_for(lambda: len(run.engine.jobs) == 3, "a third attempt")
        ask_supervisor(run.home, "stop")
        assert run.ended().step == 1
    assert [job.run.new_store for job in run.engine.jobs] == [True, True, False]
    assert [job.launched.committed for job in run.engine.jobs] == [0, 0, 1]


def test_the_end_of_the_launcher_ends_the_run(tmp_path: Path) -> None:
    with SupervisedRun(tmp_path, "exec sleep 1000", stops=True) as run:
        wait_for(lambda: run.engine.workers, "workers")
        with closing(ControlClient(run.home)) as launcher:
            launcher.ask("hello")
            with pytest.raises(LaunchError, match="no verb of this engine"):
                launcher.ask("tell", "dance")
            with pytest.raises(LaunchError, match="unknown verb 'dance'"):
                launcher.ask("dance")
            assert run.code is None
        state = run.ended()
    assert (state.code, state.why) == (130, "the launcher ended")


# -- whole runs --


class LaunchedRun:
    """A run named `tiny`, launched through the command."""

    def __init__(self, directory: Path, workers: int, steps: int) -> None:
        self.directory = directory
        self.environment = {**os.environ, "HOME": str(directory), "OMP_NUM_THREADS": "1"}
        self.home = RunHome(directory / ".roadtrain" / "runs" / "tiny")
        self.plan, self.job = directory / "plan.toml", directory / "job.toml"
        self.plan.write_text(make_plan_file(plan_tree(directory, workers)).to_toml())
        self.job.write_text(make_job(job_tree(directory, steps)).to_toml())

    def command(self, *words: str) -> list[str]:
        return [warm_python(), "-m", "roadtrain.cli", *words]

    def launch(self, *words: str) -> subprocess.Popen[bytes]:
        """Launch in the foreground, with the output in a file."""
        named = words or ("launch", str(self.plan), str(self.job), "--name", "tiny")
        with open(self.directory / "launcher.log", "ab") as log:
            return subprocess.Popen(
                self.command(*named),
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.directory,
                start_new_session=True,
            )

    def run(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            cwd=self.directory,
            timeout=RUN_S,
        )
        return done.returncode, done.stdout.decode()

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.directory / "run" / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    def step_reached(self, step: int) -> None:
        wait_for(lambda: len(self.lines) >= step, f"step {step}", RUN_S)

    def processes(self, *words: str) -> list[int]:
        """Return the pids of this run's processes whose command line contains all `words`."""
        pids = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode() if entry.name.isdigit() else ""
                if str(self.directory) in line and all(word in line for word in words):
                    pids.append(int(entry.name))
        return [pid for pid in pids if pid != os.getpid()]

    def kill(self, *words: str) -> None:
        (pid, *_) = self.processes(*words)
        os.kill(pid, signal.SIGKILL)

    def nothing_runs(self) -> bool:
        return not self.processes("roadtrain")


@contextmanager
def launched(directory: Path, workers: int, steps: int) -> Iterator[LaunchedRun]:
    run = LaunchedRun(directory, workers, steps)
    try:
        yield run
    finally:
        # the standby first: it continues if only its supervisor is killed
        for module in ("standby_main", "supervise"):
            for pid in run.processes(f"roadtrain.launch.{module}"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        wait_for(run.nothing_runs, "the end of all processes")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_continues_after_its_server_is_killed(tmp_path: Path) -> None:
    """Rules 1 and 3: the losses equal those of an undisturbed run in a single process."""
    steps = 100
    with launched(tmp_path, 1, steps) as run:
        launcher = run.launch()
        run.step_reached(8)
        run.kill("serve", "--store")
        _, output = run.run("status", "tiny")
        assert "server s0 0" in output and "worker 0" in output, output
        assert launcher.wait(RUN_S) == 0, (tmp_path / "launcher.log").read_text()
        printed = (tmp_path / "launcher.log").read_text()
        assert "server s0 0 on s0 ended (signal 9), it is restarted at once" in printed
        assert f"step {steps}/{steps}" in printed and "first step " in printed
        assert "run tiny is done: all workers are done" in printed
        state = run.home.state()
        assert {process.name: process.restarts for process in state.processes}["server s0 0"] == 1
        code, output = run.run("status", "tiny")
        assert code == 0 and f"{steps} of {steps}" in output, output
        assert "does not answer" not in output  # the server has ended with the run
        assert run.losses() == plain_losses(tmp_path, steps)


@contextmanager
def small_disk(directory: Path, nbytes: int) -> Iterator[None]:
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(directory)]
    if os.getuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.lab
@pytest.mark.exhaustive
def test_a_run_with_a_full_home_continues_even_under_its_standby(tmp_path: Path) -> None:
    """Rule 3: a worker and the supervisor are killed while the home is full."""
    steps = 200
    with small_disk(tmp_path / ".roadtrain", 200_000), launched(tmp_path, 1, steps) as run:
        launcher = run.launch()
        run.step_reached(8)
        wait_for(lambda: run.processes("roadtrain.launch.standby_main"), "a standby")
        filling = tmp_path / ".roadtrain" / "filling"
        with suppress(OSError), filling.open("wb") as file:
            while True:
                file.write(bytes(100))
                file.flush()
        run.kill("run/launch/job.toml")
        run.step_reached(len(run.lines) + 8)
        run.kill("roadtrain.launch.supervise")
        run.step_reached(len(run.lines) + 8)
        filling.unlink()
        assert launcher.wait(RUN_S) == 0, (tmp_path / "launcher.log").read_text()
        assert run.home.state().code == 0
        assert run.losses() == plain_losses(tmp_path, steps)


def plain_losses(directory: Path, steps: int) -> list[float]:
    """Train in this process on files and return the losses."""
    job = make_job(job_tree(directory, steps)).changed({"run.dir": str(directory / "plain")})
    train(job, report=lambda _: None)
    return [line["loss"] for line in read_metrics(directory / "plain" / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_kills_of_launchers_and_supervisors_change_no_loss(tmp_path: Path) -> None:
    """Rule 3: the death of a launcher ends the run or leaves it running, as requested. After a kill
    of the supervisor its standby continues. After a kill of both no process is left, and the run
    can be resumed. The losses equal those of an undisturbed run."""
    steps = 400
    with launched(tmp_path, 1, steps) as run:
        words = ("launch", str(run.plan), str(run.job), "--name", "tiny")
        launcher = run.launch(*words, "--if-launcher-dies", "stop")
        run.step_reached(5)
        launcher.kill()
        launcher.wait()
        wait_for(
            lambda: not run.home.is_supervised(), "the end of a run without its launcher", RUN_S
        )
        assert (run.home.state().code, run.home.state().why) == (130, "the launcher ended")
        assert run.run("status", "tiny")[0] == 0
        wait_for(run.nothing_runs, "the end of all processes")

        assert run.run("launch", "--resume", "tiny", "--detach")[0] == 0
        run.step_reached(len(run.lines) + 5)
        assert "is running" in run.run(*words)[1]
        run.kill("roadtrain.launch.supervise")
        run.step_reached(len(run.lines) + 5)
        assert run.home.record().start == 1 and run.home.is_supervised()
        assert "the standby goes on" in run.home.all_log.read_text()
        for pid in run.processes("roadtrain.launch.standby_main"):  # and its own standby
            os.kill(pid, signal.SIGSTOP)
        for pid in run.processes("roadtrain.launch.standby_main"):
            os.kill(pid, signal.SIGKILL)
        wait_for(run.nothing_runs, "the end of the supervisor's processes")
        code, output = run.run("status", "tiny")
        assert code == 1 and "the supervisor was killed" in output

        launcher = run.launch("launch", "--resume", "tiny")
        run.step_reached(len(run.lines) + 5)
        launcher.kill()
        launcher.wait()
        assert run.home.is_supervised()  # and continues
        run.kill("train", "job.toml")
        wait_for(lambda: not run.home.is_supervised(), "the end of the run", RUN_S)
        assert run.home.state().code == 0, run.home.all_log.read_text()
        assert "worker 0 ended (signal 9)" in run.home.all_log.read_text()
        assert run.losses() == plain_losses(tmp_path, steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_a_run_is_stopped_and_refused_by_name(tmp_path: Path) -> None:
    with launched(tmp_path, 2, 3000) as run:
        launcher = run.launch()
        run.step_reached(3)
        code, output = run.run("launch", "--stop", "tiny")
        assert code == 0 and "run tiny is stopped: the user asked for it" in output
        assert launcher.wait(RUN_S) == 130
        wait_for(run.nothing_runs, "the end of all processes")
        done = len(run.lines)
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        code, output = run.run("launch", "--resume", "tiny")
        assert code == 2 and "are their disks mounted?" in output
        wait_for(run.nothing_runs, "the end of a supervisor that has refused")
        assert len(run.lines) == done
