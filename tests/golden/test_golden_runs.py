"""Run directories of earlier code resume with the same lines, report their status, and are exported
(Rule 3)."""

from __future__ import annotations

import re
from pathlib import Path

import cases
import fixtures
import pytest

RUNS = ("files", "served")


@pytest.mark.parametrize("name", RUNS)
def test_a_kept_run_resumes(name: str, tmp_path: Path) -> None:
    """The servers of the run with served state listen at other ports than before."""
    kept = fixtures.load("runs.json")[name]
    fixtures.unpack("runs.tar.xz", tmp_path, name)
    lines = cases.train_job(tmp_path / name, 6)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    # a kept run gets a history when it trains, so its new lines name their session
    assert ["session" in line for line in lines] == [False] * 3 + [True] * 3
    types = [cases.types_of(line | {"session": ""}) for line in lines]
    assert types == [kept_types | {"session": "str"} for kept_types in kept["types"]]
    assert cases.stages_in(lines[3:]) <= cases.ALWAYS | cases.SOMETIMES
    assert name == "served" or cases.stages_in(lines[3:]) >= cases.ALWAYS
    assert [cases.lasting(line) for line in lines[:3]] == kept["lines"][:3], (
        "existing lines were changed"
    )
    found = cases.exported(tmp_path / name)
    fixtures.same_job_arithmetic()
    assert [cases.lasting(line) for line in lines] == kept["lines"]
    assert found == kept["after"]


@pytest.mark.parametrize("name", RUNS)
def test_a_kept_run_is_exported(name: str, tmp_path: Path) -> None:
    kept = fixtures.load("runs.json")[name]
    fixtures.unpack("runs.tar.xz", tmp_path, name)
    assert cases.exported(tmp_path / name) == {part: kept[part] for part in ("exported", "masters")}


def test_a_new_run_has_the_same_lines(tmp_path: Path) -> None:
    kept = fixtures.load("runs.json")["files"]
    (tmp_path / "text.txt").write_text(cases.TEXT)
    (tmp_path / "job.toml").write_text(cases.JOB)
    lines = cases.train_job(tmp_path, 3)
    fixtures.same_job_arithmetic()
    assert [cases.lasting(line) for line in lines] == kept["lines"][:3]


def test_the_status_of_a_kept_run(tmp_path: Path) -> None:
    """The same figures; the words may change."""
    kept = fixtures.load("runs.json")["status"]
    fixtures.unpack("runs.tar.xz", tmp_path, "files")
    assert figures(cases.at(tmp_path / "files", "status", "run")) == figures(kept)


def figures(text: str) -> list[str]:
    return re.findall(r"\d[\d.,]*", text)


def test_a_copy_of_a_run_uses_its_own_directories(tmp_path: Path) -> None:
    """Its job.toml names the directories inside the copy."""
    fixtures.unpack("runs.tar.xz", tmp_path, "files")
    home = tmp_path / "files"
    (home / "run").rename(home / "moved")
    with cases.inside(home):
        output = cases.at(home, "train", "moved/job.toml", "--run.dir", "moved", "--run.steps", "3")
    assert "3" in output and not (home / "run").exists()
