"""A run's home, its logs and its control socket."""

from __future__ import annotations

import itertools
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from roadtrain import cli
from roadtrain.config.plan_file import Plan, PlanFile, placement
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch import home as home_module
from roadtrain.launch import lab_engine as lab
from roadtrain.launch.control_socket import ControlClient, ControlSocket, short_path
from roadtrain.launch.follow import LauncherHello, first_step
from roadtrain.launch.home import LaunchRecord, RunHome, RunState, StartPhase
from roadtrain.launch.logs import LogTail, RunLogs
from roadtrain.launch.run_verbs import renew

RECORD = LaunchRecord(name="r", engine="here", launched=1.5, directory="/")


@pytest.fixture
def home(tmp_path: Path) -> RunHome:
    deep = tmp_path / ("d" * 120)  # exceeds the length limit of a Unix socket's name
    home = RunHome(deep / "r")
    home.write(RECORD, "plan", "job")
    return home


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 65])
def test_names_that_cannot_be_files_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid run name"):
        RunHome.of(name)


def test_a_home_holds_the_record_state_and_token_of_a_launch(home: RunHome) -> None:
    assert home.exists and home.record() == RECORD
    assert home.state() == RunState(stamps={"launched": 1.5})
    # Rule 8
    assert stat.S_IMODE(home.token_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="no run 'other' was launched"):
        RunHome(home.path.with_name("other")).record()


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    content = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "flipped": whole.replace(b'"step": 7', b'"step": 9').replace(b'"step": 3', b'"step": 9'),
    }
    path.unlink() if how == "absent" else path.write_bytes(content[how])


@pytest.mark.parametrize("how", ["empty", "cut", "flipped", "absent"])
def test_a_damaged_state_is_replaced_by_the_previous_one(home: RunHome, how: str) -> None:
    """Rules 3 and 6."""
    home.write_state(
        RunState(phase="going", attempt=1, step=3, stops="", stamps={StartPhase.LAUNCHED: 1.5})
    )
    home.write_state(RunState(phase="going", attempt=2, step=7))
    lines: list[str] = []
    assert home.state(lines.append).step == 7 and not lines
    damage(home.path / "state.json", how)
    state = home.state(lines.append)
    assert (state.phase, state.step) == ("unknown", 3) and state.stamps[StartPhase.LAUNCHED] == 1.5
    assert state.attempt == 2  # the lost state may have begun this attempt
    assert lines and "state.before.json is used" in lines[0]
    damage(home.path / "state.before.json", how)
    state = home.state(lines.append)
    assert (state.phase, state.attempt, state.step) == ("unknown", 0, 0)
    assert (
        StartPhase.CHECKED in state.stamps
    )  # so that a supervisor that cannot continue is no refusal
    home.write_state(RunState(phase="going", step=8))
    assert home.state().step == 8
    (home.path / "state.json").unlink()
    (home.path / "launch.json").unlink()  # as while the run's home is being removed
    with pytest.raises(LaunchError, match=r"damaged or absent(.|\n)*hint: launch the same plan"):
        home.state()


def test_the_state_of_an_earlier_run_of_the_same_name_is_not_used(home: RunHome) -> None:
    home.write_state(RunState(phase="ended", attempt=5, step=90))
    home.write(RECORD, "plan", "job")
    damage(home.path / "state.json", "empty")
    assert home.state().step == 0


def test_a_damaged_state_does_not_overwrite_the_previous_one(home: RunHome) -> None:
    home.write_state(RunState(step=3))
    home.write_state(RunState(step=7))
    damage(home.path / "state.json", "flipped")
    home.write_state(RunState(step=8))
    damage(home.path / "state.json", "empty")
    assert home.state().step == 3


def test_a_state_without_a_checksum_is_read(home: RunHome) -> None:
    """A state written by commit 05e66bc is read; a state with a checksum is still JSON."""
    home.write_state(RunState(phase="going", attempt=4))
    written = json.loads((home.path / "state.json").read_text())
    assert len(written.pop("xxh3")) == 16
    (home.path / "state.json").write_text(json.dumps(written, indent=2))
    assert home.state() == RunState(phase="going", attempt=4)


def test_a_resumed_run_that_made_a_step_does_not_start_over(home: RunHome) -> None:
    """A run that never made a step may start over (step -1); the others may not, even if no step is
    known to be committed."""
    home.write_state(RunState(phase="going", stamps={StartPhase.STEPPED: 1.0}))
    renew(home, "keep", "")
    assert home.state().step == 0
    home.write_state(RunState(phase="going"))
    renew(home, "keep", "")
    assert home.state().step == -1


@pytest.mark.slow
def test_a_run_has_one_supervisor_at_a_time(home: RunHome) -> None:
    assert not home.is_supervised()
    with home.supervised():
        assert home.is_supervised()
        with pytest.raises(LaunchError, match="already has a supervisor"), home.supervised():
            pass
    assert not home.is_supervised()


def test_a_probe_of_the_lock_blocks_no_supervisor(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long this process pauses between two tries."""
    free, now = iter([False, False, True]), itertools.count(0.0, 60.0)
    monkeypatch.setattr(home_module, "_lock", lambda descriptor: next(free))
    monkeypatch.setattr(home_module.time, "monotonic", lambda: next(now))
    with home.supervised():
        assert next(free, None) is None


def test_lines_of_all_processes(home: RunHome) -> None:
    tail = LogTail(home)
    assert tail.lines() == []
    with RunLogs(home) as logs:
        logs.write("worker 0", "gpu0", "step 1")
        logs.write("server a/../b 0", "s0", "serving [x] y")
        logs.flush()
        assert tail.lines() == ["step 1", "[server a/../b 0 s0] serving [x] y"]
        logs.notify("all is well")
    (line,) = tail.lines()
    assert line.startswith("[launch] ") and line.endswith(" all is well")
    assert (home.log_directory / "worker_0.log").read_text() == "step 1\n"
    assert (home.log_directory / "server_a_.._b_0.log").read_text() == "serving [x] y\n"
    with RunLogs(home) as logs:  # a resumed run appends
        logs.write("worker 0", "gpu0", "step 2")
    assert tail.lines() == ["step 2"]


@contextmanager
def connected_client(home: RunHome) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        with short_path(home.path / "control") as short:
            client.connect(short)
        client.settimeout(5)
        yield client


def test_requests_and_answers(home: RunHome) -> None:
    with ControlSocket(home) as control, connected_client(home) as client:
        assert stat.S_IMODE((home.path / "control").stat().st_mode) == 0o600  # Rule 8
        client.sendall(b'nonsense\n{"verb": "tell", "words": ["comes", "a"]}\n')
        (request,) = control.requests()
        assert (request.verb, request.words) == ("tell", ("comes", "a"))
        request.connection.answer({"said": "yes"})
        with client.makefile("rb") as answers:
            assert b"invalid request" in answers.readline()
            assert answers.readline() == b'{"said": "yes"}\n'
    with pytest.raises(LaunchError, match=r"the supervisor of run '.*' does not answer"):
        ControlClient(home)


def test_a_lost_launcher_is_noticed(home: RunHome) -> None:
    with ControlSocket(home) as control:
        with connected_client(home) as client:
            client.sendall(b'{"verb": "hello"}\n')
            assert control.requests() == [] and control.greeted
        assert [request.verb for request in control.requests()] == ["gone"]


def test_a_launcher_greets_the_next_supervisor_too(home: RunHome) -> None:
    """A restarted supervisor must not end the run because it sees no launcher."""
    with closing(LauncherHello(home)) as greeting:
        greeting.say()  # nobody listens yet
        for _ in range(2):
            with ControlSocket(home) as control:
                assert hello_arrives(control, greeting)
                greeting.say()
                assert not control.requests()
    with ControlSocket(home) as control:
        assert not control.requests() and not control.greeted


def hello_arrives(control: ControlSocket, greeting: LauncherHello) -> bool:
    thread = threading.Thread(target=greeting.say)
    thread.start()
    deadline = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < deadline:
        control.requests()
    thread.join(1)
    return control.greeted


def test_the_time_to_the_first_step_is_split_into_phases() -> None:
    stamps = {"launched": 1.0, "ready": 6.0, "checked": 7.0, "services": 7.0, "workers": 8.0}
    assert not first_step(RunState(stamps=stamps), "ray")
    stamps |= {"placed": 12.0, "imported": 17.5, "joined": 18.0, "stepped": 20.0}
    text = first_step(RunState(stamps=stamps), "ray")
    assert text == (
        "first step 19.0 s after launch: Ray 9.0 s, Python and imports 5.5 s, ours 4.5 s"
    )
    del stamps["placed"]  # an engine that looks for no nodes
    text = first_step(RunState(stamps=stamps), "here")
    assert "engine `here` 5.0 s, Python and imports 9.5 s, ours 4.5 s" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "x", "--dry-run"], "--dry-run and --resume cannot be combined"),
        (["--stop", "x", "--dry-run"], "--dry-run and --stop cannot be combined"),
        (["p", "j", "--write", "slurm", "--dry-run"], "--dry-run and --write cannot be combined"),
        (["--resume", "x", "--if-launcher-dies", "Stop"], "did you mean `stop`?"),
        (["--resume", "x", "--detach", "--if-launcher-dies", "stop"], "--if-launcher-dies is stop"),
    ],
)
def test_incompatible_arguments_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_launch_is_no_run(home: RunHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 6: the files of two launches are never mixed."""
    record = LaunchRecord(name=home.name, engine="here", launched=1.0, directory="/")
    home.write(record, "a plan", "a job")
    assert home.exists
    monkeypatch.setattr(RunHome, "write_record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        home.write(record, "another plan", "another job")
    assert not home.exists


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("trained", [False, True])
def test_a_new_run_does_not_find_stores_of_an_earlier_run_in_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(lab, "SHM", tmp_path / "shm")
    monkeypatch.setattr(lab, "LabEngine", lambda *_: None)
    record = LaunchRecord(name="r", engine="lab", launched=1.0, directory=str(tmp_path))
    home = RunHome.of("r")
    home.write(record, "", '[run]\ndir = "run"\n[model.config]\nmodel_type = "llama"\n')
    kept = [lab.kept_memory(record.mark) / "gpu0" / "store", home.path / "lab" / "gpu0"]
    for directory in kept:
        directory.mkdir(parents=True)
    if trained:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").touch()
    lab.lab_engine(PlanFile(Plan(placement("server"))), record)
    assert [path.exists() for path in kept] == [trained, trained]


def test_a_notice_must_be_a_duration(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--leaves", "run:gpu1", "--notice", "-1"]) == 2
    assert "--notice is -1 s, but must be at least 0" in capsys.readouterr().err
