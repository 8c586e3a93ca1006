"""The out-of-core benchmark compares the same model, seed and data, and roadtrain trains it with the
losses of plain training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")
import torch

import roadtrain
from benchmarks.common import model420

SMALL: dict[str, Any] = {"layers": 3, "width": 128, "inner": 192}


def test_the_model_has_420_million_parameters() -> None:
    with torch.device("meta"):
        model = model420.build("fp32")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(420e6, rel=0.005)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_batches_depend_on_the_step_number_only() -> None:
    x = model420.batch(7, 2, 16)
    assert (
        x.shape == (2, 16)
        and x.dtype is torch.int64
        and 0 <= x.min() <= x.max() < model420.VOCABULARY
    )
    assert torch.equal(x, model420.batch(7, 2, 16)) and not torch.equal(x, model420.batch(8, 2, 16))


def test_a_wide_linear_layer_is_a_linear_layer_with_rounded_gradients() -> None:
    torch.manual_seed(1)
    plain = torch.nn.Linear(8, 4, bias=False)
    plain.weight.data = plain.weight.data.bfloat16().float()
    wide = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    wide.weight.data.copy_(plain.weight.data)
    wide.__class__ = model420.WideLinear
    x, y = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    y.data.copy_(x.data)
    y.requires_grad_()
    plain(x).square().sum().backward()
    wide(y).square().sum().backward()
    assert (
        plain.weight.grad is not None
        and wide.weight.grad is not None
        and x.grad is not None
        and y.grad is not None
    )
    assert torch.equal(x.grad, y.grad) and torch.equal(
        plain.weight.grad.bfloat16(), wide.weight.grad
    )


def test_roadtrain_has_the_losses_of_plain_training(tmp_path: Path) -> None:
    plain = model420.plain_losses(6, 2, 32, "fp32", **SMALL)
    model = model420.build("fp32", **SMALL)
    optimizer = roadtrain.place(
        model,
        model420.adamw(model.parameters()),
        store=tmp_path,
        dtype=torch.bfloat16,
        host_budget="200MiB",
        backwards_per_step=1,
        report=lambda line: None,
    )
    losses = model420.training(model, optimizer, range(6), 2, 32)[0]
    optimizer.close()
    assert losses == pytest.approx(plain, abs=1e-3) and losses[0] == plain[0]
