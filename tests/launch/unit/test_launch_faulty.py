"""Faults around a launched run: probes of locks, full disks, simultaneous commands."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from roadtrain.config.job import make_job
from roadtrain.errors import ConfigError, FullError, LaunchError
from roadtrain.launch import home as launch_home
from roadtrain.launch import launch, supervise, supervisor_process
from roadtrain.launch.control_socket import ControlClient, ControlSocket
from roadtrain.launch.engines import STANDBY, is_alive
from roadtrain.launch.follow import follow
from roadtrain.launch.home import LaunchRecord, RunHome, RunState, StartPhase
from roadtrain.launch.logs import RunLogs
from roadtrain.launch.run_verbs import resume_run


@pytest.fixture
def home(tmp_path: Path) -> RunHome:
    home = RunHome(tmp_path / "r")
    home.write(
        LaunchRecord(name="r", engine="here", launched=time.time(), directory=str(tmp_path)), "", ""
    )
    return home


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Limit the size of every file to `nbytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_supervisor_starts_although_its_lock_is_probed_constantly(home: RunHome) -> None:
    probing, seen = True, set[bool]()

    def probe() -> None:
        while probing:
            seen.add(home.is_supervised())

    threads = [threading.Thread(target=probe) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.05)
        assert seen <= {False}  # a probe does not take another for a supervisor
        for _ in range(50):
            with home.supervised():
                pass
    finally:
        probing = False
        for thread in threads:
            thread.join()


def test_only_one_command_at_a_time_launches_a_run(home: RunHome) -> None:
    with home.starting():
        with pytest.raises(LaunchError, match="another command is launching"), home.starting():
            pass
        with pytest.raises(LaunchError, match="another command is launching"):
            resume_run("r", "keep", True)
    assert home.record().start == 0


@pytest.fixture(autouse=True)
def runs_are_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(RunHome, "of", staticmethod(lambda name: RunHome(tmp_path / name)))


def test_logs_on_a_full_disk(home: RunHome) -> None:
    """The run survives, and lost lines are reported."""
    with RunLogs(home) as logs:
        with full_disk(5000):
            for n in range(2000):
                logs.write("worker 0", "a", f"line {n} of a worker that says a lot")
            logs.flush()
        logs.flush()
        logs.notify("there is room again")
    text = home.all_log.read_text()
    assert "lines of these logs were lost: File too large" in text
    assert "there is room again" in text


class NoHosts:
    """A LaunchEngine without hosts."""

    resumed = False
    closed = False

    def hosts(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def no_hosts(monkeypatch: pytest.MonkeyPatch) -> NoHosts:
    monkeypatch.setattr(supervise, "load_plan_file", lambda path: None)
    monkeypatch.setattr(supervise, "load_job", lambda path: None)
    monkeypatch.setattr(supervise, "resolve", lambda *_, **__: _Run())
    monkeypatch.setattr(supervise, "replace", lambda run, **_: run)
    monkeypatch.setattr(supervise, "check", lambda *_: [])
    monkeypatch.setattr(supervise, "without_unfit_spares", lambda run, _: (run, []))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    engine = NoHosts()
    monkeypatch.setattr(supervise, "function_of", lambda _: lambda *_: engine)
    return engine


def test_a_refusal_on_a_full_disk_is_in_the_log(
    home: RunHome, monkeypatch: pytest.MonkeyPatch, no_hosts: Any
) -> None:
    def full(self: RunHome, state: RunState) -> None:
        raise FullError("state.json: 0 B are free")

    monkeypatch.setattr(RunHome, "write_state", full)
    assert supervise.supervise(home) == 2
    assert no_hosts.closed
    assert "0 B are free" in home.all_log.read_text()


@pytest.mark.usefixtures("no_hosts")
def test_a_token_that_others_may_read_is_refused(home: RunHome) -> None:
    """Rule 8."""
    home.token_path.chmod(0o644)
    assert supervise.supervise(home) == 2
    assert "other users can read or change the token" in home.state().why
    assert f"hint: chmod 600 {home.token_path}" in home.state().why


def test_a_run_continues_although_its_home_is_full(home: RunHome, no_hosts: Any) -> None:
    """A standby takes over on a full disk (Rule 3)."""
    home.write_state(RunState(phase="going", attempt=3, step=7, stamps={StartPhase.CHECKED: 1.0}))
    with RunLogs(home) as logs:
        with full_disk(1):
            supervise.prepare(home, home.record(), logs)
        logs.flush()
    assert not no_hosts.closed and home.state().attempt == 3
    assert home.all_log.read_text().count("the run goes on, though its home is full") == 2


def test_without_room_a_state_replaces_the_previous_one(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_state(RunState(step=1))
    home.write_state(RunState(step=2))
    real, before = launch_home.replace_file, home.path / "state.before.json"

    def nearly_full(path: Path, content: bytes, doing: str) -> None:
        if before.exists():
            raise FullError(f"{path}: 0 B are free")
        real(path, content, doing)

    monkeypatch.setattr(launch_home, "replace_file", nearly_full)
    home.write_state(RunState(step=3))
    assert home.state().step == 3 and not before.exists()


class _Run:
    class job:
        class parallelism:
            used = False


def test_a_missing_directory_is_reported(home: RunHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    record = LaunchRecord(name="r", engine="here", launched=0.0, directory="/not/there")
    home.write_record(record)
    assert supervise.supervise(home) == 2
    assert "/not/there" in home.state().why
    # a launcher tied to the run also reports the supervisor's refusal
    with pytest.raises(LaunchError, match="/not/there"):
        follow(home, LaunchRecord(**{**_fields(record), "if_launcher_dies": "stop"}))


def _fields(record: LaunchRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_a_supervisor_that_never_listens_is_not_waited_for(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_process, "CHECKS_S", 0.3)
    with home.supervised(), pytest.raises(LaunchError, match=r"not answered within 0 s"):
        supervisor_process.ask_to_stop(home)  # Rule 5


def test_too_many_open_files_do_not_end_a_supervisor(home: RunHome) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ControlSocket(home) as control, closing(ControlClient(home)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            assert control.requests() == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_start_that_fails_leaves_a_run_that_has_ended(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is free again, and its status states the reason."""

    def fails(_: RunHome) -> None:
        raise LaunchError("the cluster does not answer")

    monkeypatch.setattr(supervisor_process, "start_supervisor", fails)
    with pytest.raises(LaunchError, match="does not answer"):
        supervisor_process.start(home, home.record())
    state = home.state()
    assert (state.phase, state.code) == ("ended", 2) and "does not answer" in state.why
    assert not is_alive(home)  # another run may use the name


@pytest.mark.slow
def test_a_run_whose_standby_is_slow_to_take_over_is_alive(home: RunHome) -> None:
    """This happens on a busy machine. Without the standby the run is no longer alive."""
    code = (
        "import sys, time; from pathlib import Path; from roadtrain.launch.home import RunHome\n"
        "print('started', flush=True); time.sleep(1.0)\n"
        "with RunHome(Path(sys.argv[-1])).taking_over(): time.sleep(60)"
    )
    words = [sys.executable, "-c", code, STANDBY, str(home.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as standby:
        try:
            assert standby.stdout
            standby.stdout.readline()  # Linux shows no words of a process that is just starting
            assert not home.is_supervised()
            assert is_alive(home) and home.is_supervised()
        finally:
            standby.kill()
    assert not is_alive(home)


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(target: str) -> None:
        raise LaunchError(f"{target} is not installed here")

    monkeypatch.setattr(launch, "function_of", lacks)
    with pytest.raises(LaunchError, match="is not installed here"):
        launch.check_engine("ray")
    with pytest.raises(ConfigError, match="rya"):
        launch.check_engine("rya")


def test_two_runs_do_not_train_in_one_directory(home: RunHome, tmp_path: Path) -> None:
    job = make_job({"run": {"dir": "run"}, "model": {"config": {"model_type": "llama"}}})
    home.job_path.write_text(job.to_toml())
    other = RunHome(home.path.parent / "other")
    same = job.changed({"run.dir": str(tmp_path / "elsewhere" / ".." / "run")})
    launch.check_directory(other, same)  # no run trains there now
    with home.supervised():
        with pytest.raises(ConfigError, match=r"run 'r' is training in .*/run"):
            launch.check_directory(other, same)
        launch.check_directory(home, same)  # another check reports that the run is alive
        launch.check_directory(other, job.changed({"run.dir": str(tmp_path / "of its own")}))
