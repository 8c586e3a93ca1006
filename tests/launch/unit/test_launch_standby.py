"""The standby takes over a run whose supervisor is killed."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roadtrain.launch import standby_main, supervise
from roadtrain.launch.home import LaunchRecord, RunHome
from roadtrain.launch.supervise import Standby


@pytest.fixture
def home(tmp_path: Path) -> RunHome:
    home = RunHome(tmp_path / "r")
    home.write(LaunchRecord(name="r", engine="here", launched=1.0, directory="/"), "", "")
    return home


@pytest.fixture
def tries(home: RunHome, monkeypatch: pytest.MonkeyPatch) -> list[RunHome]:
    """Record the attempts to supervise a run that cannot continue."""
    made: list[RunHome] = []

    def fails(home: RunHome) -> int:
        made.append(home)
        return 1

    monkeypatch.setattr(standby_main, "supervise_locked", fails)
    monkeypatch.setattr(standby_main, "AGAIN_S", 0.0)
    return made


def test_the_standby_waits_until_the_supervisor_is_gone(
    home: RunHome, tries: list[RunHome]
) -> None:
    """Rule 3."""
    with home.supervised():
        waits = threading.Thread(target=standby_main.stand_by, args=(home,))
        waits.start()
        time.sleep(0.2)
        assert not tries
    waits.join(10)
    assert tries
    assert "the supervisor was killed; the standby goes on" in home.all_log.read_text()


def test_an_ended_run_is_not_supervised_again(home: RunHome, tries: list[RunHome]) -> None:
    home.write_state(msgspec.structs.replace(home.state(), phase="ended", code=130, why="enough"))
    assert standby_main.stand_by(home) == 130 and home.state().why == "enough" and not tries


def test_a_run_that_cannot_continue_is_recorded_as_ended(
    home: RunHome, tries: list[RunHome]
) -> None:
    assert standby_main.stand_by(home) == 1 and len(tries) == standby_main.TRIES
    state = home.state()
    assert (state.phase, state.code) == ("ended", 1) and "attempts to go on failed" in state.why


def test_an_empty_state_does_not_end_the_standby(home: RunHome, tries: list[RunHome]) -> None:
    (home.path / "state.json").write_bytes(b"")
    assert standby_main.stand_by(home) == 1 and len(tries) == standby_main.TRIES


POPEN = subprocess.Popen  # the real class


class Started:
    """A Popen whose process does nothing."""

    made = 0

    def __init__(self, words: list[str], **options: Any) -> None:
        Started.made += 1
        assert words[1:3] == ["-m", "roadtrain.launch.standby_main"]
        self._real = POPEN(["sleep", "60"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_killed_standby_is_restarted(home: RunHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise.subprocess, "Popen", Started)
    monkeypatch.setattr(Started, "made", 0)
    standby = Standby(home, print)
    for now in (1.0, 2.0, 20.0):
        standby.keep(now)
    assert Started.made == 1
    standby.close()
    standby.keep(21.0)
    assert Started.made == 2
    standby.close()
    standby.keep(22.0)
    assert Started.made == 2  # no sooner than after 10 s
    standby.close()


@pytest.mark.slow
def test_a_failed_start_of_the_standby_does_not_end_the_run(
    home: RunHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise OSError("no processes left")

    monkeypatch.setattr(supervise.subprocess, "Popen", refuses)
    lines: list[str] = []
    standby = Standby(home, lines.append)
    standby.keep(1.0)
    standby.keep(2.0)
    standby.close()
    assert lines == ["the standby could not be started, another try follows: no processes left"]
