"""Every key of every file that a user writes, with values of every TOML type: a wrong value is a
ConfigError that names the file and the key, never a traceback, and is never read as another
value."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.job import Job, make_job
from roadtrain.config.plan_file import Plan, make_plan
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab.lab_command import LabFile
from roadtrain.options.schema import checked, keys_of, section_in

OF_EVERY_TYPE: tuple[Any, ...] = (
    True,
    -7,
    10**30,
    0.5,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    "no such word",
    [],
    [1],
    ["a", 2],
    [[]],
    [{}],
    {},
    {"a": 1},
    {"a": {"b": [1]}},
    datetime.date(2026, 11, 23),
)
HOST = {"name": "a", "memory": "1GB", "nics": [{"rate": "1GB/s"}]}
SSD = {"read": "1GB/s", "write": "1GB/s"}
DEVICE = {"flops": "1TFLOP/s", "memory": "1GB"}
LINK = {"between": ["s", "t"], "rate": "1GB/s"}
SWITCHES = [{"name": "s"}, {"name": "t"}]
STORAGE = {"size": "1GB", "read": "1GB/s", "write": "1GB/s"}
LAB_HOST = {"name": "a", "nics": [{"rate": "1GB/s"}], "storage": STORAGE}
STAGED = {"networks": [{"hosts": ["a"]}], "placements": [{"stage": 0, "memory": True}]}
FILES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "job": (
        Job,
        lambda tree: make_job(tree, where="file"),
        {
            "model": {"pretrained": "here"},
            "parallelism": STAGED,
            "servers": {"switches": [{"address": "a:1"}]},
        },
    ),
    "cluster": (
        Cluster,
        lambda tree: make_cluster(tree, "file"),
        {
            "hosts": [HOST | {"ssds": [SSD], "device": DEVICE}],
            "switches": SWITCHES,
            "links": [LINK],
        },
    ),
    "plan": (Plan, lambda tree: make_plan(tree, where="file"), {"placement": "ddp"}),
    "lab": (
        LabFile,
        lambda tree: checked(LabFile, tree, "file"),
        {"hosts": [LAB_HOST], "links": [LINK], "switches": ["s", "t"]},
    ),
}


def paths(kind: Any, tree: Any, before: tuple[str | int, ...] = ()) -> Iterator[Any]:
    """Path of each key below `kind`, through the first item of each list in `tree`."""
    for key, about in keys_of(kind).items():
        way = (*before, key)
        yield way
        inner, held = section_in(about.annotation), tree.get(key, {})
        if inner is not None:
            more, held = ((0,), held[0]) if isinstance(held, list) else ((), held)
            if isinstance(held, dict):
                yield from paths(inner, held, (*way, *more))


def with_value(tree: Any, way: tuple[str | int, ...], to: Any) -> Any:
    if not way:
        return to
    first, *rest = way
    if isinstance(tree, list):
        return [with_value(tree[0], tuple(rest), to), *tree[1:]]
    return {**tree, first: with_value(tree.get(first, {}), tuple(rest), to)}


EVERY = [(name, way) for name, (kind, _, tree) in FILES.items() for way in paths(kind, tree)]


@pytest.mark.parametrize(("name", "way"), EVERY, ids=lambda value: str(value))
@pytest.mark.slow
def test_a_wrong_value_of_any_key_is_refused(name: str, way: tuple[str | int, ...]) -> None:
    _, make, tree = FILES[name]
    for wrong in OF_EVERY_TYPE:
        try:
            read: Any = make(with_value(tree, way, wrong))
        except ConfigError as error:
            message = str(error)
            assert message.startswith("file: "), message
            names = [str(way[-1]), *(str(part).removesuffix("es") for part in way[:1])]
            assert ".".join(map(str, way)) in message or any(map(message.count, names)), message
            assert "pydantic" not in message
            continue
        for part in way:
            named = isinstance(part, str) and not hasattr(read, part)
            part = "copy_rate" if named else part
            read = getattr(read, part) if isinstance(part, str) else read[part]
        same = type(read) is type(wrong) or isinstance(wrong, dict) or wrong in ([], "")
        listed = isinstance(read, list | tuple) and (not wrong or isinstance(wrong, str | list))
        size = isinstance(wrong, int) and read == str(wrong)
        number = isinstance(wrong, int | float) and isinstance(read, float) and read == float(wrong)
        assert same or listed or size or number, (wrong, read)
        assert type(wrong) is bool or read is not True or isinstance(wrong, dict)


def test_all_files_have_keys_of_every_depth() -> None:
    depths = {name: max(len(way) for n, way in EVERY if n == name) for name in FILES}
    assert depths == {"job": 4, "cluster": 5, "plan": 2, "lab": 5} and len(EVERY) > 120


def test_an_unknown_key_at_any_depth_gets_the_nearest_as_a_hint() -> None:
    for name, way in EVERY:
        _, make, tree = FILES[name]
        *before, last = way
        near = [*before, f"{last}x"]
        with pytest.raises(
            ConfigError, match=f"unknown key `{'.'.join(map(str, near))}`"
        ) as caught:
            make(with_value(tree, tuple(near), 1))
        assert "did you mean" in str(caught.value) or "valid keys are" in str(caught.value)


def test_a_wrong_table_raises_a_roadtrain_error() -> None:
    for (_, make, _), wrong in itertools.product(FILES.values(), ([], "x", 3)):
        with pytest.raises(RoadtrainError):
            make({"hosts": wrong, "placement": wrong, "model": wrong})
