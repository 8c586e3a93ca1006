"""`roadtrain doctor`: the report as text, as JSON and for issues; errors; checks that fail."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from roadtrain import cli
from roadtrain.doctor import doctor_command
from roadtrain.doctor.diagnosis import Diagnosis, Subject
from roadtrain.doctor.doctor_command import DoctorReport, run_checks, subject_of, without_names
from roadtrain.errors import ConfigError

WRONG = Diagnosis("lock", "wrong", "it is locked", "end process 7")
NOTE = Diagnosis("memlock", "note", "RLIMIT_MEMLOCK is 8 MiB")
MACHINE = {"memory": "1 GiB free of 2 GiB"}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> DoctorReport:
    made = DoctorReport(MACHINE, {"device": "cpu"}, (WRONG, NOTE), 1.5)
    monkeypatch.setattr(doctor_command, "examine", lambda _: made)
    return made


def test_text_ends_with_what_is_wrong(
    report: DoctorReport, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "this machine",
        "  memory:        1 GiB free of 2 GiB",
        "roadtrain will use",
        "  device:        cpu",
        "note: [memlock] RLIMIT_MEMLOCK is 8 MiB",
        "wrong: [lock] it is locked",
        "  fix: end process 7",
        "doctor: 1 finding to fix (1.5 s)",
    ]


def test_notes_are_not_alarms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = DoctorReport(MACHINE, {}, (NOTE,), 1.5)
    monkeypatch.setattr(doctor_command, "examine", lambda _: healthy)
    assert cli.main(["doctor"]) == 0
    assert "doctor: nothing is wrong" in capsys.readouterr().out


def test_keys_of_the_json_report(report: DoctorReport, tmp_path: Path) -> None:
    """Programs read them: they may grow, with a new `format` if one changes."""
    assert cli.main(["doctor", "--json", str(tmp_path / "report.json")]) == 1
    found = json.loads((tmp_path / "report.json").read_text())
    assert list(found) == ["machine", "uses", "findings", "seconds", "format"]
    assert found["format"] == 1 and found["machine"] == MACHINE
    assert found["findings"][0] == {
        "fault": "lock",
        "level": "wrong",
        "what": "it is locked",
        "fix": "end process 7",
    }


def test_a_paste_names_no_host_no_user_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.lab.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    text = "node17: /home/ada/run at 10.1.2.3:7000 and fd00::17:2, hf_abcdef, /data/ada/x, 1.10.2"
    text += " 127.0.0.1"
    more = " node17.lab.example.org node170 adamw gpu3:7000"
    assert without_names(text + more, ["gpu3"]) == (
        "HOST: ~/run at ADDRESS:7000 and ADDRESS, SECRET, /data/USER/x, 1.10.2 127.0.0.1"
        " HOST node170 adamw HOST:7000"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dirs", ","], "--dirs ',' names no directory"),
        (["--peers", "host-without-port"], "'host-without-port' is not an address"),
        (["--json", "/no/such/folder/x.json"], "cannot be written"),
        (["no-such-job.toml"], "no-such-job.toml"),
        (["--pasta"], "unknown option `--pasta`\nhint: did you mean `--paste`?"),
    ],
)
def test_mistakes_of_users(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_job_names_what_is_examined(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "[model.config]\nmodel_type = 'llama'\n[servers]\naddresses = ['a:1', 'b:2']\n"
        "token_file = 'secret'\n"
    )
    of = subject_of(str(path), "", "", None)
    assert of.peers == ("a:1", "b:2") and of.token_file == "secret"
    of = subject_of(str(path), "x,y,x", "c:3", "other")
    assert of.dirs == (Path("x"), Path("y")) and of.peers == ("c:3",) and of.named
    assert of.token_file == "other"
    with pytest.raises(ConfigError):
        subject_of(str(path), "", "c", None)


def test_a_check_that_fails_or_hangs_is_a_note() -> None:
    def good(_: Subject) -> Iterator[Diagnosis]:
        yield WRONG

    def fails(_: Subject) -> Iterator[Diagnosis]:
        raise OSError("no /proc here")
        yield

    end = threading.Event()

    def hangs(_: Subject) -> Iterator[Diagnosis]:
        end.wait(10)
        yield WRONG

    found = run_checks((fails, good, hangs), Subject((Path(),)), 0.2)
    end.set()
    assert [(finding.fault, finding.level) for finding in found] == [
        ("not-checked", "note"),
        ("lock", "wrong"),
        ("not-checked", "note"),
    ]
    assert "no /proc here" in found[0].what and "hangs could not run" in found[2].what


@pytest.mark.slow
def test_the_command_itself_imports_no_torch() -> None:
    code = "import sys, roadtrain.doctor.doctor_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
