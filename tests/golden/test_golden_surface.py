"""The user interface is unchanged: options of commands, keys of a job, options of place()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import fixtures
import pytest
import surface

OPTIONS = fixtures.load("options.json")
JOB = fixtures.load("job.json")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_kept_option_of_a_command_exists(name: str) -> None:
    code, text = surface.command(*name.split(), "--help")
    assert code == 0
    missing = set(OPTIONS[name]) - surface.options_in(text)
    assert not missing, f"roadtrain {name}: {sorted(missing)}"


def test_every_kept_command_exists() -> None:
    code, text = surface.command("--help")
    assert code == 0
    assert not [name for name in OPTIONS if name not in text]


def test_the_defaults_of_a_job_are_unchanged() -> None:
    now = {key: fixtures.without_machine(text) for key, text in surface.job_defaults().items()}
    assert {key: now.get(key) for key in JOB["defaults"]} == JOB["defaults"]


def without_later_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out the sections and keys that were added later."""
    return {
        section: {key: tree[section].get(key) for key in kept} if isinstance(kept, dict) else kept
        for section, kept in JOB["tree"].items()
    }


def test_a_job_file_with_every_key_gives_the_kept_values(tmp_path: Path) -> None:
    assert cases.JOB_VALUES.keys() | {"model.pretrained"} == JOB["defaults"].keys()
    path = tmp_path / "job.toml"
    path.write_text(fixtures.job_with(cases.JOB_VALUES))
    assert without_later_keys(surface.job_of(path)) == JOB["tree"]


def test_every_key_on_the_command_line_gives_the_kept_values(tmp_path: Path) -> None:
    """Values are plain words for text and JSON for the rest."""
    path = tmp_path / "job.toml"
    path.write_text('[run]\ndir = "here"\n[model.config]\nmodel_type = "llama"\n')
    words: list[str] = []
    for key, value in cases.JOB_VALUES.items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    assert without_later_keys(surface.job_of(path, words)) == JOB["tree"]


def test_the_options_of_place_are_unchanged() -> None:
    """Each option is accepted, and its default is unchanged."""
    now = surface.place_options()
    assert {name: now.get(name) for name in JOB["place"]} == JOB["place"]
