"""planner/measure.py: the shape of any module from a forward on `meta`, against closed formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.planner.paper_clusters import gpt
from roadtrain import cli
from roadtrain.errors import ModelError
from roadtrain.planner.measure import shape_of


class Layer(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(h), nn.LayerNorm(h)])
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 8, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        )
        return x + self.down(self.up(self.norms[1](x)).relu())


class Model(nn.Module):
    def __init__(self, layers: int = 3, h: int = 64, vocab: int = 100) -> None:
        super().__init__()
        self.embed, self.at = nn.Embedding(vocab, h), nn.Embedding(32, h)
        self.layers = nn.ModuleList([Layer(h) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.at(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def on_meta() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Model(), torch.zeros(4, 32, dtype=torch.long)


def test_parameters_and_flops_equal_the_formula() -> None:
    model, x = on_meta()
    found, expected = shape_of(model, x, samples=4), gpt(3, 64, 8, vocab=100, seq_len=32)
    assert [b.params for b in found.blocks] == [b.params for b in expected.blocks]
    assert [b.flops for b in found.blocks] == [b.flops for b in expected.blocks]
    assert (found.tokens, found.hidden, found.layers) == (32, 64, 3)


def test_saved_bytes_equal_those_kept_by_autograd() -> None:
    """For a linear layer and a relu, the input and the output of the relu are kept."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.ReLU())
    found = shape_of(model, torch.zeros(5, 8), samples=5, blocks=["1"])
    (block,) = [b for b in found.blocks if "." in b.name]
    assert (block.saved, block.input) == (2 * 16, 2 * 16)


class Repeating(Layer):
    """A layer whose attribute decides how much it computes."""

    runs = 0

    def __init__(self, h: int, times: int) -> None:
        super().__init__(h)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Repeating.runs += 1
        for _ in range(self.times):
            x = super().forward(x)
        return x


def test_two_blocks_of_each_kind_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are those of a model whose blocks are all run, since no two are alike."""
    monkeypatch.setattr(Repeating, "runs", 0)
    found = []
    for alike, runs in ((True, 4), (False, 9)):
        with torch.device("meta"):
            model, x = Model(), torch.zeros(4, 32, dtype=torch.long)
            kinds = [Repeating(64, 2 if i in (1, 4, 8) else 1) for i in range(9)]
        for layer in kinds:
            layer.made_from = None if alike else object()
        model.layers = nn.ModuleList(kinds)
        Repeating.runs = 0
        found.append(shape_of(model, x, samples=4, name="model"))
        assert Repeating.runs == runs
        assert not any("forward" in vars(layer) for layer in kinds)
    assert found[0] == found[1]
    assert found[0].blocks[2].flops == 2 * found[0].blocks[1].flops


def test_frozen_blocks_are_another_kind() -> None:
    model, x = on_meta()
    model.layers = nn.ModuleList([Layer(64).to("meta") for _ in range(6)])
    model.layers[4:].requires_grad_(False)
    saved = [block.saved for block in shape_of(model, x, samples=4).blocks[1:7]]
    assert saved[3] > saved[4] > 0 and saved[4] == saved[5]


def test_a_failing_forward_is_reported() -> None:
    model, _ = on_meta()
    with pytest.raises(ModelError, match="Model's forward failed"):
        shape_of(model, torch.zeros(4, 32), samples=4)


def test_simulate_accepts_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert (
        cli.main(
            ["simulate", "workstation", "--model", "test_measure:on_meta", "--placement", "ddp"]
        )
        == 0
    )
    assert "on_meta (0.2 M parameters)" in capsys.readouterr().out
    assert cli.main(["simulate", "workstation", "--model", "test_measure:nothing"]) == 2
    assert "does not return a model and arguments" in capsys.readouterr().err
