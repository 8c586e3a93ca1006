"""A job of `roadtrain init` trains unchanged; completion in real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roadtrain import cli
from roadtrain.config.job import all_keys
from roadtrain.training.metrics import read_metrics
from tests.support.warm_python import warm_python


@pytest.mark.slow
def test_a_new_job_trains_unchanged(tmp_path: Path) -> None:
    steps: list[list[str]] = [["init"], ["train", "job.toml", "--run.steps", "2"]]
    for words in steps:
        done = subprocess.run(
            [warm_python(), "-m", "roadtrain", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lines = read_metrics(tmp_path / "runs" / "job" / "metrics.jsonl")
    assert len(lines) == 2 and lines[1]["loss"] < 6


@pytest.fixture(scope="module")
def script() -> str:
    return printed("bash")


def printed(shell: str) -> str:
    command = [sys.executable, "-m", "roadtrain", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def completed(script: str, *words: str) -> list[str]:
    """Return the words that bash offers for the last of `words`."""
    code = f"""{script}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD={len(words) - 1}
_roadtrain
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_keys_and_files(script: str) -> None:
    assert completed(script, "roadtrain", "") == [
        *dict.fromkeys(name.split()[0] for name in cli.COMMANDS)
    ]
    assert completed(script, "roadtrain", "st") == ["status"]
    keys = completed(script, "roadtrain", "train", "job.toml", "--run.")
    assert keys == [f"--{key}" for key, _, _ in all_keys() if key.startswith("run.")]
    assert completed(script, "roadtrain", "serve", "--met") == ["--metrics"]
    assert completed(script, "roadtrain", "lab", "u") == ["up"]
    assert completed(script, "roadtrain", "lab", "up", "--d") == ["--detach"]
    # no words, so bash completes names of files (complete -o default)
    assert completed(script, "roadtrain", "train", "--run.dir", "ru") == []
    assert "complete -o default" in script
    assert completed(script, "roadtrain", "nothing", "--x") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(shell: str, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(printed(shell))
    assert "run.steps" in path.read_text() and "status" in path.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bsh"]) == 2
    assert "did you mean `bash`" in capsys.readouterr().err
