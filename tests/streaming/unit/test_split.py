"""The choice of modules that become blocks, and the owners of tied parameters."""

import pytest
import torch
from torch import nn

from roadtrain.chunks import SEGMENT
from roadtrain.errors import ConfigError, ModelError
from roadtrain.streaming.split import split, table


class Layer(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(experts)])


class Coder(nn.Module):
    def __init__(self, n=2, experts=0):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Layer(experts) for _ in range(n)])
        self.norm = nn.LayerNorm(4)


def names(s):
    return [b.name for b in s.blocks]


def check(model, s):
    """Check that every parameter is in exactly one part, under its canonical name."""
    held = [(n, id(p)) for part in (s.root, *s.blocks) for n, p in part.params]
    assert sorted(held) == sorted((n, id(p)) for n, p in model.named_parameters())


def test_outermost_lists():
    model = nn.ModuleDict({"encoder": Coder(2, experts=3), "decoder": Coder(3)})
    s = split(model)
    assert names(s) == [
        *(f"encoder.layers.{i}" for i in range(2)),
        *(f"decoder.layers.{i}" for i in range(3)),
    ]
    assert len(s.blocks[0].params) == 8
    assert [n for n, _ in s.root.params][:1] == ["encoder.embed.weight"]
    check(model, s)


def test_short_lists_are_searched():
    model = nn.ModuleList([Coder(2)])
    assert names(split(model)) == ["0.layers.0", "0.layers.1"]
    assert names(split(nn.ModuleList([Coder(1)]))) == []
    assert names(split(nn.ModuleDict({"x": nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)])}))) == []


def test_sequential():
    big = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    )
    model = nn.ModuleDict({"small": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "big": big})
    assert names(split(model)) == ["big.0", "big.2", "big.3"]
    check(model, split(model))


def test_nothing_found():
    model = nn.Linear(3, 3)
    s = split(model)
    assert not s.blocks and len(s.root.params) == 2
    with pytest.raises(ModelError, match="no parameters"):
        split(nn.ReLU())


def test_named():
    model = nn.ModuleDict({"model": Coder(12)})
    assert names(split(model, ["model.layers.*"])) == [f"model.layers.{i}" for i in range(12)]
    assert names(split(model, ["model.layers.1*"])) == [
        "model.layers.1",
        "model.layers.10",
        "model.layers.11",
    ]
    assert names(split(model, ["model.layers.3", "model.norm"])) == ["model.layers.3", "model.norm"]
    assert names(split(model, "model.layers.3.a")) == ["model.layers.3.a"]
    with pytest.raises(ConfigError, match=r"hint: did you mean `model.layers.0`"):
        split(model, ["model.layer.0"])
    with pytest.raises(ConfigError, match=r"name the items of the block instead: model.layers.\*"):
        split(model, ["model.layers"])
    with pytest.raises(ConfigError, match=r"'model.layers.0.a' is inside block 'model.layers.0'"):
        split(model, ["model.layers.0", "model.layers.0.a"])


def test_tied():
    model = Coder(4)
    model.layers[1].a.weight = model.layers[0].a.weight  # two blocks
    model.layers[2].a.bias = model.norm.bias  # shared by a block and the root
    model.layers[3] = model.layers[2]  # the same block twice
    s = split(model)
    assert names(s) == ["layers.0", "layers.1", "layers.2"]
    assert {"layers.0.a.weight", "layers.2.a.bias"} < {n for n, _ in s.root.params}
    assert [n for n, _ in s.blocks[1].params] == ["layers.1.a.bias"]
    check(model, s)


def test_block_module_also_used_outside():
    model = Coder(2)
    model.alias = model.layers[0].a  # a part of a block reached by another path
    s = split(model)
    assert {n for n, _ in s.root.params} >= {"layers.0.a.weight", "layers.0.a.bias"}
    assert names(s) == ["layers.1"]
    check(model, s)


def test_table():
    model = Coder(2)
    model.layers[0].a.bias.requires_grad_(False)
    groups = {p: int(p.ndim < 2) for n, p in model.named_parameters() if n != "layers.1.a.bias"}
    s = split(model)
    t = table(s, groups, torch.bfloat16, SEGMENT)
    assert [b.name for b in t.blocks] == ["root", "layers.0", "layers.1"]
    spec = {p.name: p for p in t.params}
    assert (
        spec["norm.bias"].group == 1
        and spec["norm.bias"].trainable
        and spec["norm.bias"].dtype == "bf16"
    )
    assert not spec["layers.0.a.bias"].trainable and spec["layers.0.a.bias"].group == -1
    assert not spec["layers.1.a.bias"].trainable
    assert table(s, groups, None, SEGMENT).params[0].dtype == "fp32"
    model.embed.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match="complex64"):
        table(split(model), {}, None, SEGMENT)
