"""The command line: fast help, a clear message for each mistake, no traceback."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roadtrain
from benchmarks.__main__ import main as benchmarks_main
from roadtrain import cli
from roadtrain.errors import BudgetError
from roadtrain.launch import status_command as status
from roadtrain.training import command as train_command
from roadtrain.training import verify
from roadtrain.training.metrics import Metrics


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Record calls of `train`, `verify` and `status`, with a job file a.toml in the current
    folder."""
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("[model.config]\nmodel_type = 'llama'\n")
    calls: list[Any] = []
    for module in (train_command, verify, status):
        monkeypatch.setattr(
            module, "command", lambda *words, **keywords: calls.append((words, keywords))
        )
    yield calls


def test_arguments_options_and_job_keys_are_parsed(recorded: list[Any]) -> None:
    assert cli.main(["train", "a.toml", "--run.steps", "3", "--compress.error_feedback"]) == 0
    assert cli.main(["verify", "--steps", "5", "--optimizer.lr=1e-3", "a.toml"]) == 0
    assert cli.main(["status", "runs/x", "--endurance-tbw=150"]) == 0
    assert recorded == [
        (("a.toml",), {"overrides": {"run.steps": 3, "compress.error_feedback": True}}),
        (("a.toml",), {"steps": 5, "overrides": {"optimizer.lr": 1e-3}}),
        (("runs/x",), {"endurance_tbw": 150.0}),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian", "x"], "unknown command `trian`\nhint: did you mean `train`?"),
        (["train"], "`roadtrain train` takes JOB.toml, got nothing"),
        (["train", "a", "b"], "got a b"),
        (["train", "a", "--run.step", "3"], "did you mean `run.steps`?"),
        (["train", "a", "--quick"], "unknown option `--quick`"),
        (["verify", "a", "--step", "3"], "did you mean `--steps`?"),
        (["verify", "a", "--steps", "three"], "--steps: 'three' is not a number"),
        (["verify", "a", "--steps"], "--steps needs a value"),
        (["train", "a", "--new-store=no"], "--new-store takes no value, got no"),
        (["lab", "run", "lab.toml", "host"], "takes LAB.toml HOST -- CMD..., got lab.toml host"),
        (["lab", "u"], "unknown command `lab u`\nhint: did you mean `lab up`?"),
        (
            ["status", "r", "--run.dir", "x"],
            "unknown option `--run.dir`\nhint: `roadtrain status` takes no keys of a job: write",
        ),
        (
            ["serve", "127.0.0.1:0", "--sum", "--link", "tpc"],
            "unknown link `tpc`\nhint: did you mean `tcp`?",
        ),
        (["bench", "no-such"], "unknown benchmark `no-such`"),
        (["soak", "everything"], "`roadtrain soak` takes options only, got everything"),
        (["soak", "--only", "first"], "--only 'first' is not a fault's number"),
        (["status", "/no/such/run"], "is not a run directory"),
    ],
)
def test_mistakes_end_in_a_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert message in err and "Traceback" not in err and not out


def test_roadtrain_errors_print_no_traceback(
    recorded: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BudgetError("needs 9 GiB, 2 GiB are free", hint="less")

    monkeypatch.setattr(train_command, "command", refuse)
    assert cli.main(["train", "a.toml"]) == 2
    assert capsys.readouterr().err == "roadtrain: needs 9 GiB, 2 GiB are free\nhint: less\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert all(f"\n{title}:\n" in shown for title in cli.COMMAND_GROUPS)
    for name, command in cli.COMMANDS.items():
        assert cli.main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert (
            cli.summary_of(command.target) in shown and ("--run.steps" in shown) == command.job_keys
        )


def test_help_without_the_benchmarks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The benchmarks are not installed with the package."""
    installed = tmp_path / "lib" / "roadtrain"
    installed.parent.mkdir()
    installed.symlink_to(Path(cli.__file__).parent)
    monkeypatch.setattr(cli, "__file__", str(installed / "cli.py"))
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out.count("Needs a clone of the repository\n") == 3


def test_the_package_runs_as_a_module_and_knows_its_version() -> None:
    """`python -m` runs the same command, and the version is declared once."""
    for words, expected in (
        (["--version"], roadtrain.__version__),
        (["--help"], "roadtrain COMMAND"),
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "roadtrain", *words], capture_output=True, text=True, check=True
        )
        assert expected in ran.stdout
    ran = subprocess.run([sys.executable, "-m", "roadtrain", "nonsense"], capture_output=True)
    assert ran.returncode == cli.REFUSED and b"unknown command" in ran.stderr
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    declared = Path(roadtrain.__file__).parents[2] / project["tool"]["hatch"]["version"]["path"]
    assert declared.samefile(roadtrain.__file__)


@pytest.mark.slow
def test_help_and_mistakes_are_answered_before_torch_is_imported() -> None:
    """pydantic is imported only to list the keys of a job."""
    code = """
import sys
from roadtrain import cli

def imported(*words):
    cli.main([*words])
    return {"torch", "numpy", "rich", "pydantic"} & {*sys.modules}

assert not imported("--help")
for name in sorted(cli.COMMANDS, key=lambda name: cli.COMMANDS[name].job_keys):
    found = imported(*name.split(), "--help") | imported(*name.split(), "--no-such-option")
    assert found <= ({"pydantic"} if cli.COMMANDS[name].job_keys else set()), (name, found)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_function_of_a_command_accepts_its_arguments_and_options(name: str) -> None:
    command = cli.COMMANDS[name]
    options = cli.options_of(command.target)
    module, _, function = command.target.partition(":")
    found = getattr(importlib.import_module(module), function)
    summary = cli.summary_of(command.target)
    assert summary and (inspect.getdoc(found) or "").replace("\n", " ").startswith(summary)
    signature = inspect.signature(found)
    keywords = {*options} | ({"overrides"} if command.job_keys else set())
    signature.bind(*command.words, **dict.fromkeys(keywords))
    left = {*signature.parameters} - keywords - {"report"}
    assert len(left) == len(command.words), f"under Args: {sorted(left)}"


def test_bench_writes_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []

    class Report:
        def print(self) -> None:
            shown.append(True)

        def to_json(self) -> str:
            return '{"name": "update"}'

    module = types.ModuleType("benchmarks.kernels.update")
    module.run = lambda quick: Report()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.kernels.update", module)
    assert cli.main(["bench", "update", "--quick", "--json", str(tmp_path / "r.json")]) == 0
    assert shown and json.loads((tmp_path / "r.json").read_text()) == {"name": "update"}


def test_benchmarks_of_items(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks_main(["fanin", "--only", "model,tre"]) == 2
    assert "unknown item `tre`" in (error := capsys.readouterr().err) and "`tree`" in error
    assert benchmarks_main(["update", "--only", "model"]) == 2
    assert "benchmark update has no items" in capsys.readouterr().err


def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(
        '[model.config]\nmodel_type = "llama"\n[store]\nfiles = ["/a", "/b"]\n'
    )
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "0 of 1000" in capsys.readouterr().out
    with Metrics(tmp_path / "metrics.jsonl", 0) as metrics:
        for step in (1, 2):
            stages = {
                "Write": {"seconds": 0.1, "bytes": 10**12},
                "Read": {"seconds": 0.1, "bytes": 5},
            }
            metrics.append(
                {"step": step, "loss": 2.0, "tokens": 50, "seconds": 0.5, "stages": stages}
            )
    assert cli.main(["status", str(tmp_path), "--endurance-tbw", "100"]) == 0
    out = capsys.readouterr().out
    assert "2 of 1000" in out and "100 tokens/s" in out
    assert "1.8 TiB to 2 directories" in out
    # 1 TB was written to each of two devices
    assert "1.0000% of 100 TBW per device (as specified)" in out
