"""Options of the wrong type or value are a ConfigError that names the option, the value and the
accepted values."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field
from torch import nn

import roadtrain
from roadtrain import (
    Delay,
    Downcast,
    FanIn,
    Files,
    MicroBatch,
    Parallelism,
    ParallelOptions,
    Servers,
    SwitchNode,
    TopK,
)
from roadtrain.errors import ConfigError, UnitError
from roadtrain.options.check import check_options
from roadtrain.transport.tcp import TcpOptions, Tls

VALUES = {
    Delay: {},
    Downcast: {"dtype": "bf16"},
    FanIn: {"switches": (SwitchNode("a:1"),)},
    Files: {"directories": "here"},
    MicroBatch: {},
    ParallelOptions: {"parallelism": Parallelism(), "num_microbatches": 1},
    Servers: {"addresses": ["a:1"]},
    SwitchNode: {"address": "a:1"},
    TcpOptions: {},
    Tls: {},
    TopK: {"keep": 0.1},
}
UNLIMITED = {"target"}  # fields that may hold anything


class Stranger:
    """A type that no option accepts."""

    def __repr__(self) -> str:
        return "a stranger"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def place(**options: Any) -> None:
    net = options.pop("model", None) or model()
    options = {"optimizer": torch.optim.SGD(model().parameters(), lr=0.1), **options}
    roadtrain.place(net, **options)


def of_function(function: Callable[..., Any]) -> list[str]:
    kinds = inspect.signature(function).parameters.values()
    return [p.name for p in kinds if p.kind is not p.VAR_KEYWORD]


@pytest.mark.parametrize("name", of_function(roadtrain.place))
def test_every_option_of_place_is_checked(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^place\(\): `{name}` cannot be a stranger\nhint: `{name}` must be"
    ):
        place(**{name: Stranger()})


@pytest.mark.parametrize("name", of_function(roadtrain.parallelize))
def test_every_option_of_parallelize_is_checked(name: str) -> None:
    net = model()
    good = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "options": ParallelOptions(Parallelism(), 1),
        "example": MicroBatch(),
    }
    with pytest.raises(
        ConfigError,
        match=rf"^parallelize\(\): `{name}` cannot be a stranger\nhint: `{name}` must be",
    ):
        roadtrain.parallelize(**{**good, name: Stranger()})


@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, f.name) for k in VALUES for f in dataclasses.fields(k) if f.name not in UNLIMITED],
)
def test_every_field_of_a_value_is_checked(kind: type, name: str) -> None:
    kind(**VALUES[kind])
    with pytest.raises(
        ConfigError,
        match=rf"^{kind.__name__}: `{name}` cannot be a stranger\nhint: `{name}` must be",
    ):
        kind(**{**VALUES[kind], name: Stranger()})


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("compress", "topk", "TopK, Downcast or None"),
        ("compress", TopK, "TopK, Downcast or None"),
        ("delay", 1, "Delay or None"),
        ("delay", True, "Delay or None"),
        ("store", 0, "a path, a list in which each item is a path, Files, Memory, Servers or None"),
        ("store", ["a", 5], "a path, a list"),
        ("store", "", "a path, a list"),
        ("dtype", "bf16", "torch.float32, torch.bfloat16, torch.float16 or None"),
        ("dtype", torch.int8, "torch.float32, torch.bfloat16, torch.float16 or None"),
        ("host_budget", 1.5, "a size such as '900MiB', a number of bytes or None"),
        ("host_budget", True, "a size"),
        ("host_budget", -1, "a size"),
        ("host_budget", "lots", "a size"),
        ("device_budget", "lots", "a size"),
        ("blocks", [5], "a string, a list in which each item is a string or None"),
        ("compile", 1, "True or False"),
        ("backwards_per_step", 0, "an integer at least 1 or None"),
        (
            "chunk_elements",
            65537,
            "an integer at least 65,536 and at most 1,048,576 and a multiple",
        ),
        ("chunk_elements", 1 << 21, "an integer at least"),
        ("device", "nonsense", "'cuda', 'cuda:N' or 'cpu'"),
        ("weights", "/nope", "a path or None"),
        ("extra", {"a": 1}, "a dict whose values are each an object with state_dict()"),
        ("deadline_s", float("nan"), "a number above 0"),
        ("deadline_s", float("inf"), "a number above 0"),
        ("deadline_s", 0, "a number above 0"),
        ("report", None, "a function"),
    ],
)
def test_a_wrong_value_is_refused(option: str, value: object, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place(**{option: value})
    message, hint = str(caught.value).split("\n")
    assert f"`{option}` cannot be {value!r}" in message
    assert hint.startswith(f"hint: `{option}` must be {accepted}")


def test_a_block_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="blocks: no module with parameters is named 'nope'"):
        place(report=lambda _: None, blocks=["nope"])


def test_model_and_optimizer_swapped() -> None:
    net = model()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"`model` cannot be SGD .*\n.*a torch\.nn\.Module"):
        roadtrain.place(optimizer, net)  # type: ignore[arg-type]


def test_a_size_without_a_known_unit_is_a_unit_error() -> None:
    with pytest.raises(UnitError, match=r"place\(\): `host_budget` cannot be 'lots' .*not a size"):
        place(host_budget="lots")


def test_a_directory_named_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="name each directory once"):
        Files([tmp_path, tmp_path / "link"])


@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_store_that_is_a_file(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    net = model()
    with pytest.raises(ConfigError, match=f"cannot be a directory: {file} is a file"):
        roadtrain.place(net, torch.optim.SGD(net.parameters(), lr=0.1), store=file / below)
    assert file.read_text() == "mine" and [*tmp_path.iterdir()] == [file]


def test_weights_are_checked_before_a_store_is_created(tmp_path: Path) -> None:
    net, store = model(), tmp_path / "store"
    with pytest.raises(ConfigError, match="there is no safetensors file"):
        roadtrain.place(
            net, torch.optim.SGD(net.parameters(), lr=0.1), store=store, weights=tmp_path
        )
    assert not store.exists()


def test_arguments_given_twice_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Parallelism\(\)"):
        Parallelism(2, dp=3)
    with pytest.raises(TypeError, match=r"Parallelism\(\)"):
        Parallelism(1, 1, 1, (), 1, 1, 1, (), 9)


def test_accepted_values_are_described_in_words() -> None:
    def made(
        a: int, b: Literal["x", "y"], c: Annotated[float, Field(ge=0, lt=2)] | None, d: list[str]
    ) -> None: ...

    made.__annotations__ = {
        "a": int,
        "b": Literal["x", "y"],
        "c": Annotated[float, Field(ge=0, lt=2)] | None,
        "d": list[str],
    }
    check_options(made, {"a": 1, "b": "x", "c": 1, "d": []})
    for arguments, words in (
        ({"a": True}, r"made\(\): `a` cannot be True\nhint: `a` must be an integer$"),
        ({"b": "z"}, "`b` cannot be 'z'\nhint: `b` must be 'x' or 'y'$"),
        ({"c": 2.0}, r"`c` cannot be 2\.0\nhint: .* a number at least 0 and below 2 or None$"),
        ({"d": "text"}, "`d` cannot be 'text'\nhint: .* a list in which each item is a string$"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_options(made, arguments)
