"""Direct access to the parameters of a placed model returns true values or raises an error (Rule
6)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roadtrain
from roadtrain.errors import LoopError
from tests.support.models import Case, Net, new_scaler, place, run

BUDGET = {"host_budget": "128MiB"}


def roots(model):
    """The parameters of the root block, by name."""
    return {n: p for n, p in model.named_parameters() if not n.startswith("layers.")}


@pytest.mark.parametrize("store", [False, True], ids=["RAM", "files"])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_root_parameters_have_the_values_of_the_last_step(tmp_path, store, closed):
    case = Case(sgd=True)
    model, placed, scaler = place(case, tmp_path / "s" if store else None, **BUDGET)
    with placed:
        for steps in (1, 3):
            run(case, model, placed, scaler, placed.steps_done, steps)
            if closed and steps == 3:
                placed.close()
            expected = plain_values(case, steps)
            for name, p in roots(model).items():
                assert torch.equal(p, expected[name]) and torch.equal(p.data, expected[name]), name
                assert type(p) is nn.Parameter


def plain_values(case, steps):
    """Return the values of plain training, for a case whose update has torch's own bits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(tied=case.tied)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, foreach=False)
        run(case, model, optimizer, new_scaler(case), 0, steps)
        return model.state_dict()


@pytest.mark.parametrize("store", [False, True], ids=["RAM", "files"])
def test_a_write_to_a_root_parameter_is_refused(tmp_path, store):
    case = Case()
    model, placed, scaler = place(case, tmp_path / "s" if store else None, **BUDGET)
    run(case, model, placed, scaler, 0, 2)
    held = {n: p.detach().clone() for n, p in roots(model).items()}
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(LoopError, match=r"'head\.weight' was changed in place"):
        run(case, model, placed, scaler, 2, 3)
    saved = model.state_dict()
    assert all(torch.equal(saved[n], value) for n, value in held.items()), "the store changed"
    with pytest.raises(LoopError, match="was changed in place"):
        placed.close()


class Normalizing(nn.Module):
    """A block that writes to its own parameter while it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.div_(self.linear.weight.norm())
        return self.linear(x)


def test_a_block_that_writes_its_parameters_is_refused():
    model = nn.Sequential(*(Normalizing() for _ in range(3)))
    optimizer = roadtrain.place(model, torch.optim.SGD(model.parameters(), lr=0.1), **BUDGET)
    with pytest.raises(LoopError, match=r"weight' was changed in place"):
        model(torch.ones(2, 8))
    optimizer.close()


def test_block_parameters_cannot_be_read_between_passes():
    model, placed, scaler = place(Case(), None, **BUDGET)
    run(Case(), model, placed, scaler, 0, 1)
    for p in model.layers.parameters():
        assert p.shape and p.requires_grad and p.grad is None
        with pytest.raises(LoopError, match="in memory only while its block runs"):
            p.norm()
    placed.close()


def test_a_parameter_added_after_place_is_refused():
    model, placed, scaler = place(Case(), None, **BUDGET)
    run(Case(), model, placed, scaler, 0, 1)
    model.layers[0].register_parameter("late", nn.Parameter(torch.zeros(3)))
    with pytest.raises(LoopError, match=r"'layers\.0\.late' was added after place"):
        run(Case(), model, placed, scaler, 1, 2)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))  # a pass without gradients still works
    placed.close()
