"""A mistake on the command line gives one message and exit code 2, quickly, and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roadtrain import cli

JOB = """
[run]
dir = "run"
[model.config]
model_type = "llama"
[data]
paths = ["text.txt"]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder that holds a file, a folder, a job and a run that has not started."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("hello")
    Path("folder").mkdir()
    os.symlink("nowhere", "dangling")
    Path("text.txt").write_text("text " * 1000)
    Path("job.toml").write_text(JOB)
    Path("auto.toml").write_text(f'parallelism = "auto"\n{JOB}')
    Path("unknown.toml").write_text(f"{JOB}\n[optimiser]\nlr = 1\n")
    Path("broken.toml").write_text("x = = 1")
    Path("run").mkdir()
    Path("run/job.toml").write_text(JOB)


def refusal_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    before = sorted(Path().rglob("*"))
    assert cli.main([*args]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "serving" not in out
    assert err.startswith("roadtrain: ") and len(err.splitlines()) <= 2, err
    assert sorted(Path().rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("export run file", "file cannot be a directory: "),
        ("export run file/in", "file/in cannot be a directory: "),
        ("export run dangling", "is a broken link"),
        ("export folder out", "folder is not a run directory"),
        ("export file out", "file is not a run directory"),
        ("import folder --run.dir out", "no config.json in 'folder'"),
        ("train job.toml --run.dir file", "file cannot be a directory"),
        ("train job.toml --run.dir file/in", "file/in cannot be a directory"),
        ("train folder", "cannot read job file folder: Is a directory"),
        ("status file", "file is not a run directory"),
        ("serve 127.0.0.1:0 --store file", "file cannot be a directory: "),
        ("serve 127.0.0.1:0 --store file/in", "file/in cannot be a directory: "),
        ("serve 127.0.0.1:0 --store folder --snapshot file", "file cannot be a directory: "),
        ("probe --out folder", "folder is a directory, not a file"),
        ("probe --out none/cluster.toml", "none/cluster.toml cannot be written"),
        ("plan absent.toml --out folder", "folder is a directory, not a file"),
        ("plan absent.toml --json file/in", "file/in cannot be written"),
        ("simulate absent.toml --trace folder", "folder is a directory, not a file"),
    ],
)
def test_paths(args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal_of(capsys, *args.split())


def test_a_directory_that_must_not_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes fail as on a read-only file system, since root passes all other checks."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    for args in (
        "export run out",
        "serve 127.0.0.1:0 --store folder",
        "train job.toml --run.dir r",
    ):
        assert "this user may not write to" in refusal_of(capsys, *args.split())


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", ":", "host:", ":7000", "host:99999", "host:abc", "[::1]", "::1", "h:²", "[]:80"],
)
@pytest.mark.parametrize("command", ["serve {} --sum", "serve {}", "serve {} --store folder"])
def test_addresses(address: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal_of(capsys, *command.format(address).split())
    assert f"{address!r} is not an address" in message and "hint: write HOST:PORT" in message
    assert "None" not in message


@pytest.mark.parametrize(
    "args",
    [
        "",
        "--sum --store folder",
        "--sum --snapshot folder",
        "--store folder --formats torch",
        "--store folder --snapshot folder",
        "--store folder --snapshot-every 5",
    ],
)
def test_a_server_without_a_duty(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal_of(capsys, "serve", "127.0.0.1:0", *args.split())
    assert "None" not in message and "False" not in message and "hint: " in message


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("train unknown.toml", "optimiser"),
        ("train broken.toml", "broken.toml is not TOML"),
        ("train absent.toml", "cannot read job file absent.toml"),
        ("train auto.toml", 'parallelism = "auto"'),
        ("verify unknown.toml", "optimiser"),
        ("preflight unknown.toml", "optimiser"),
        ("calibrate cluster.toml unknown.toml", "optimiser"),
    ],
)
@pytest.mark.slow
def test_a_wrong_job_is_refused_before_torch_is_imported(args: str, words: str) -> None:
    code = f"""
import sys
from roadtrain import cli
code = cli.main({args.split()})
print("torch" in sys.modules, code)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "False 2\n" and words in done.stderr, done
