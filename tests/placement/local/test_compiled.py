"""Blocks under torch.compile train with the bits of plain training in which each block is compiled
(Rule 1). Except in the first test, the compiler's backend is aot_eager, which needs no C++
compiler."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo import graph_break
from torch._dynamo.utils import counters

import roadtrain
from roadtrain.errors import LoopError, ModelError
from tests.support.models import Case, Net, new_scaler, run
from tests.support.needs import needs

# torch's compiler reads .grad of the inputs of plain models
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

DEPTH, WIDTH = 10, 16  # more blocks than the 8 compilations that torch allows for a function
SGD = Case(sgd=True)
QUIET = {"report": lambda _: None, "host_budget": "128MiB", "deadline_s": 60}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(autouse=True)
def clean_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(DEPTH))
        self.shared = nn.Parameter(torch.ones(WIDTH))
        for module in self.layers.modules():
            if isinstance(module, Inner):
                module.shared = self.shared

    def forward(self, x):
        x = self.first(x) * self.shared
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x)


class Dropout(Plain):
    def forward(self, x):
        return x + nn.functional.dropout(self.linear(x), 0.3, self.training)


class Buffers(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        self.seen *= 0.75
        return x + self.norm(self.linear(x)) * self.seen


class Lora(Plain):
    def __init__(self):
        super().__init__()
        self.linear.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x):
        return x + self.linear(x) + self.up(self.down(x))


class Inner(nn.Module):
    """A module inside a block, with a parameter of the root block."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * self.shared


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return x + self.inner(x)


class Broken(Plain):
    def forward(self, x):
        y = self.linear(x)
        graph_break()
        return x + nn.functional.dropout(y, 0.3, self.training)


def steps(model, optimizer, *, autocast=False, number=3):
    """Train, and evaluate after each step; returns all losses."""
    losses = []
    for step in range(number):
        torch.manual_seed(step)
        x = torch.randn(8, WIDTH)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.train()(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += loss.item(), model.eval()(x).item()
    return losses


def optimizer_of(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=2**-12, foreach=False)


def compile_each(layers):
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


def frames():
    """Return the number of functions that were compiled since the last call."""
    number = counters["frames"]["ok"]
    counters.clear()
    return number


def compiled_runs(directory):
    """Train a model with compiled blocks, plain and placed; returns losses and the number of
    compiled functions of each."""
    runs = []
    for placed in (False, True):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Net(depth=DEPTH, width=WIDTH)
        optimizer = optimizer_of(model)
        if placed:
            optimizer = roadtrain.place(model, optimizer, store=directory, compile=True, **QUIET)
        else:
            compile_each(model.layers)
        runs.append((run(SGD, model, optimizer, new_scaler(SGD), 0, 4), frames()))
    optimizer.close()
    return runs


@pytest.mark.slow
@pytest.mark.timeout(400)  # the compiler's processes take minutes on a busy machine
@needs("g++", apt="g++")
def test_compiled_blocks_have_the_bits_of_a_compiled_model(tmp_path):  # Rule 1
    # torch's compiler leaves threads behind
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        plain, placed = process.submit(compiled_runs, tmp_path).result()
    assert placed == plain
    assert placed[1] == 1, "all blocks share their compiled code"


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("kind", [Dropout, Buffers, Lora, Tied, Broken])
def test_blocks_share_their_compiled_code(quick, kind, autocast):  # Rule 1
    counters.clear()
    model = Stack(kind)
    compile_each(model.layers)
    expected = steps(model, optimizer_of(model), autocast=autocast), frames()
    assert all(map(math.isfinite, expected[0]))
    torch.compiler.reset()
    model = Stack(kind)
    with roadtrain.place(model, optimizer_of(model), compile=True, **QUIET) as placed:
        assert (steps(model, placed, autocast=autocast), frames()) == expected
    assert expected[1] <= 4, "training and evaluation, each once or twice, for all blocks"


def test_a_placed_model_is_compiled_in_its_first_step_only(quick, tmp_path):
    model = Stack(Dropout)
    counters.clear()
    with roadtrain.place(
        model, optimizer_of(model), store=tmp_path, compile=True, **QUIET
    ) as placed:
        steps(model, placed, number=1)
        assert frames() == 2  # training and evaluation
        steps(model, placed, number=3)
    assert frames() == 0


class Hidden(Plain):
    other = torch.ones(WIDTH, requires_grad=True)

    def forward(self, x):
        return self.linear(x) * self.other


class Writes(Plain):
    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x)


class Peeks(Plain):
    seen: list[nn.Module] = []

    def forward(self, x):
        if not self.seen:
            self.seen.append(self)
        return self.linear(x) + self.seen[0].linear.weight.sum()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Hidden, ModelError, "neither an argument nor a parameter of the block"),
        (Writes, LoopError, "was changed in place"),
        (Peeks, LoopError, "its values are in memory only while its block runs"),
    ],
)
def test_a_compiled_block_is_checked_as_others_are(quick, kind, error, message):  # Rule 6
    Peeks.seen.clear()
    model = Stack(kind)
    with (
        roadtrain.place(model, optimizer_of(model), compile=True, **QUIET),
        pytest.raises(error, match=message),
    ):
        model(torch.randn(8, WIDTH))


def test_a_block_that_cannot_be_compiled_is_named(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=refuse))
    model = Stack(Plain)
    with (
        roadtrain.place(model, optimizer_of(model), compile=True, **QUIET),
        pytest.raises(ModelError, match=r"failed in block 'layers\.0'.*no compiler") as raised,
    ):
        model(torch.randn(8, WIDTH))
    assert raised.value.hint.endswith("or leave out compile=True")


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "in place", "each block"])
def test_torch_compile_around_blocks_is_reported(quick, when, compile):  # Rule 6
    model, lines = Stack(Plain), []
    optimizer = optimizer_of(model)
    if when == "before":
        model = torch.compile(model)
    for module in {"in place": [model], "each block": model.layers}.get(when, ()):
        module.compile(backend="aot_eager")
    options = {**QUIET, "report": lines.append, "compile": compile}
    with roadtrain.place(model, optimizer, **options) as placed:
        steps(torch.compile(model) if when == "after" else model, placed)
    reported = [line for line in lines if "call place() with compile=True" in line]
    assert len(reported) == (0 if compile else 1)
