"""The schema of a job: the command line overrides the file, and errors suggest the nearest valid
name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from roadtrain.config.job import (
    Job,
    all_keys,
    load_job,
    make_job,
    parse_overrides,
)
from roadtrain.errors import ConfigError, UnitError

MODEL = '[model.config]\nmodel_type = "llama"\nhidden_size = 64\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(MODEL + '[optimizer]\nlr = 1e-4\n[store]\nfiles = ["{run}/a", "/ssd/b"]\n')
    return path


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(path: Path) -> None:
    job = load_job(path, parse_overrides(["--optimizer.weight_decay", "0.1", "--run.steps=20"]))
    assert (job.optimizer.lr, job.optimizer.weight_decay, job.run.steps) == (1e-4, 0.1, 20)
    assert load_job(path, {"optimizer.lr": 3e-3}).optimizer.lr == 3e-3
    assert job.run.dir == "runs/small"
    assert job.store.files == ["runs/small/a", "/ssd/b"]


def test_the_resolved_job_resolves_to_itself(path: Path, tmp_path: Path) -> None:
    job = load_job(path, {"run.dir": "x", "budget.host": "900MiB", "optimizer.betas": [0.9, 0.95]})
    again = tmp_path / "job.toml"
    again.write_text(job.to_toml())
    assert load_job(again) == job


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optimizer.lrr": 1}, r"unknown key `optimizer.lrr`\nhint: did you mean `optimizer.lr`"),
        ({"optimiser.lr": 1}, r"unknown key `optimiser`\nhint: did you mean `optimizer`"),
        ({"run.steps": -1}, "`run.steps`: .* not -1"),
        ({"run.steps": "many"}, "`run.steps`: .* not 'many'"),
        ({"optimizer.name": "adamww"}, "unknown optimizer 'adamww'; did you mean `adamw`"),
        ({"model.dtype": "fp8"}, "`model.dtype`: .* not 'fp8'"),
        ({"model.pretrained": "x"}, "not both"),
        ({"model.config.model_type": None}, "give pretrained, or config"),
        ({"optimizer": 3}, "`optimizer`"),
        ({"run.steps.x": 3}, "`run.steps`"),
    ],
)
def test_mistakes_are_refused_with_a_hint(
    path: Path, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_job(path, overrides)


def test_a_size_without_a_known_unit(path: Path) -> None:
    with pytest.raises(UnitError, match="9 parsecs"):
        load_job(path, {"budget.host": "9 parsecs"})


def test_mistakes_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_job(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_job(bad)
    bad.write_text("[run]\nsteps = 3\n")
    with pytest.raises(ConfigError, match="`model` is missing"):
        load_job(bad)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--run.dir", "20"], {"run.dir": "20"}),  # a text field takes its value literally
        (["--run.steps", "20"], {"run.steps": 20}),
        (["--optimizer.lr", "1e-4"], {"optimizer.lr": 1e-4}),
        (["--optimizer.lr", "-1"], {"optimizer.lr": -1}),
        (["--optimizer.betas", "[0.9, 0.95]"], {"optimizer.betas": [0.9, 0.95]}),
        (["--store.files", "a,b"], {"store.files": ["a", "b"]}),
        (["--store.files", ""], {"store.files": []}),
        (["--data.paths", '["a b", "c"]'], {"data.paths": ["a b", "c"]}),
        (
            ["--compress.error_feedback", "--compress.keep", "0.01"],
            {"compress.error_feedback": True, "compress.keep": 0.01},
        ),
        (["--model.config.n_layer", "3"], {"model.config.n_layer": 3}),
        (["--optimizer.options", '{"amsgrad": true}'], {"optimizer.options": {"amsgrad": True}}),
        (["--optimizer.clip_norm", "null"], {"optimizer.clip_norm": None}),
    ],
)
def test_command_line(args: list[str], expected: dict[str, object]) -> None:
    assert parse_overrides(args) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--run.step", "3"], "did you mean `run.steps`"),
        (["--run.steps"], "needs a value"),
        (["run.steps", "3"], "unexpected argument"),
        (["--run.steps", "3", "4"], "unexpected argument"),
    ],
)
def test_mistakes_of_the_command_line(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_overrides(args)


def test_null_goes_back_to_the_default(path: Path) -> None:
    assert load_job(path, {"optimizer.lr": None}).optimizer.lr == 3e-4


def test_lossy_is_a_choice(path: Path) -> None:
    """Rule 2."""
    assert load_job(path).lossy == {}
    assert load_job(path, {"compress.keep": 0.1}).lossy == {"keep": 0.1, "error_feedback": False}
    assert load_job(path, {"compress.downcast": "bf16"}).lossy == {"downcast": "bf16"}
    with pytest.raises(ConfigError, match="downcast"):
        load_job(path, {"compress.downcast": "fp32"})


def test_every_key_is_on_the_command_line_and_in_the_file(path: Path) -> None:
    tree = tomllib.loads(load_job(path).to_toml())
    for key, default, _ in all_keys():
        section, name = key.split(".")
        assert name in tree[section] or default in ("", "{}"), key
    assert {k.partition(".")[0] for k, _, _ in all_keys()} == set(Job.model_fields)


def test_switches_are_an_address_or_tables() -> None:
    switches = [{"address": "r:1"}, {"address": "s:1", "parent": "r:1", "workers": [0, 1]}]
    tables = make_job({"model": {"pretrained": "x"}, "servers": {"switches": switches}})
    plan = tables.servers.fan_in
    assert plan is not None and plan.root.address == "r:1"
    assert plan.place_of(1, 2) == (plan.switches[1], 1) and tables.lossy == {"fan_in": "int32"}
    again = make_job(tomllib.loads(tables.to_toml()))
    assert again == tables
    words = parse_overrides(["--servers.switches", "r:1", "--servers.wire=int8"])
    alone = make_job({"model": {"pretrained": "x"}}).changed(words)
    plan = alone.servers.fan_in
    assert plan is not None and (plan.wire, plan.place_of(3, 4)[1]) == ("int8", 3)
    assert make_job({"model": {"pretrained": "x"}}).servers.fan_in is None


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ({"wire": "int8"}, "is given, but no switches"),
        ({"switches": ["a:1", "b:1"]}, "2 switches have no parent"),
        ({"switches": ["a:1"], "window": 100}, "a window of 100 packets"),
        (
            {"switches": [{"address": "a:1", "parent": "b:1"}]},
            "parent b:1 of switch a:1 is not listed",
        ),
        ({"switches": ["a:1"], "wire": "int4"}, "`servers.wire`: .*int4"),
        ({"switches": [{"addres": "a:1"}]}, "unknown key `servers.switches.0.addres`"),
    ],
)
def test_switches_that_form_no_tree_are_refused(servers: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_job({"model": {"pretrained": "x"}, "servers": servers})
