"""The state of a job as bytes: values survive a round trip, anything else is a typed error, and
nothing is executed (Rule 8)."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roadtrain.errors import ConfigError, DamagedError, ForeignError, StoreError
from roadtrain.streaming import plain

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8)
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


def raw_of(tensor) -> bytes:
    return bytes(
        torch.empty(tensor.shape, dtype=tensor.dtype)
        .copy_(tensor)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
    )


def same(a, b) -> bool:
    """Whether values and types are equal; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        inside = list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        return inside and getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw_of(a) == raw_of(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return (
        (a == b and math.copysign(1, a) == math.copysign(1, b)) or a != a
        if isinstance(a, float)
        else a == b
    )


@FUZZ
@given(values)
@pytest.mark.slow
def test_values_come_back_with_their_types(value):
    assert same(plain.decode(plain.encode(value)), value)


@pytest.mark.parametrize("dtype", plain.DTYPES.values(), ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype):
    raw = torch.randint(0, 2, (24 * dtype.itemsize,), dtype=torch.uint8)
    for tensor in (
        raw.view(dtype).reshape(2, 3, 4),
        raw.view(dtype)[:1].reshape(()),
        raw.view(dtype)[:0],
        raw.view(dtype).reshape(4, 6).t()[1::2],
        raw.view(dtype)[:1].as_strided((1,), (0,)),
    ):
        assert same(plain.decode(plain.encode([tensor, "behind"])), [tensor.contiguous(), "behind"])


def test_the_state_of_a_job_survives_a_round_trip():
    random.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5]),  # holds a Counter
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    state = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "buffers": dict(model.named_buffers()),
        "extra": {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            **{str(i): scheduler.state_dict() for i, scheduler in enumerate(schedulers)},
        },
        "numpy": list(np.random.get_state()),
        "scalar": np.float64(0.1),
        "count": np.int64(7),
        "odd": [
            Counter("abca"),
            torch.Size([2, 3]),
            torch.bfloat16,
            torch.device("cpu"),
            2j,
            {1, 2},
            1 << 200,
        ],
    }
    back = plain.decode(plain.encode(state))
    assert same(back["odd"], state["odd"]) and back["count"] == 7 and same(back["scalar"], 0.1)
    assert back["python"] == state["python"]
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    for name, thing in (
        ("model", model),
        ("optimizer", optimizer),
        ("0", schedulers[0]),
        ("2", schedulers[2]),
    ):
        thing.load_state_dict(back["extra"][name])
    assert type(back["extra"]["0"]["milestones"]) is Counter
    assert back["extra"]["model"]._metadata == model.state_dict()._metadata


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, Odd()]}, r"extra\['a'\]\[1\] is a .*Odd, which cannot be saved"),
        ({"f": len}, r"extra\['f'\] is a builtins.builtin_function_or_method"),
        ([torch.ones(2, device="meta")], r"extra\[0\] is a tensor .* on meta"),
        ([torch.eye(2).to_sparse()], r"extra\[0\] is a tensor of .* torch.sparse_coo"),
        ([np.array([Odd()])], "numpy.ndarray"),
        ([np.datetime64("2026-11-23")], "datetime.date"),
    ],
)
def test_other_types_are_refused_on_saving(value, words):
    with pytest.raises(ConfigError, match=words):
        plain.encode(value, "extra")


def test_a_value_that_contains_itself_is_refused():
    value: list = []
    value.append({"again": value})
    with pytest.raises(ConfigError, match="contains itself"):
        plain.encode(value)


GOOD = plain.encode(
    {"a": [1, "text", (None, 2.5)], "t": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).bool()}
)


def test_every_truncated_state_is_an_error():
    for length in range(len(GOOD)):
        with pytest.raises(StoreError):
            plain.decode(GOOD[:length])
    with pytest.raises(DamagedError, match="1 unexpected bytes follow"):
        plain.decode(GOOD + b"x")


@FUZZ
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.binary(max_size=20))
def test_spoiled_bytes_give_a_value_or_a_typed_error(at, byte, more):
    for raw in (
        GOOD[:at] + bytes([byte]) + GOOD[at + 1 :],
        GOOD[:at] + more + GOOD[at:],
        more,
        plain.MAGIC + more,
        plain.MAGIC + plain.LENGTH.pack(len(more)) + more,
    ):
        try:
            plain.decode(raw)
        except StoreError:
            pass


@pytest.mark.parametrize(
    "tree",
    [
        ["tensor", "float32", [1 << 60]],
        ["tensor", "float32", [-1]],
        ["tensor", "no", [1]],
        ["tensor"],
        ["run", "x"],
        [],
        ["dict", 1],
        ["dict", ["list"], 1],
        ["set", ["list"]],
        ["array", "O", [0]],
        ["array", "<f4", [9]],
        [["list"]],
        ["device", "x:y"],
        ["dtype", "q"],
        ["int", "x"],
    ],
)
def test_an_impossible_header_is_refused(tree):
    header = plain.msgspec.msgpack.encode(tree)
    with pytest.raises(DamagedError):
        plain.decode(plain.MAGIC + plain.LENGTH.pack(len(header)) + header)


def test_bytes_of_something_else():
    with pytest.raises(ForeignError, match="begins with b'somethin"):
        plain.decode(b"something else")
