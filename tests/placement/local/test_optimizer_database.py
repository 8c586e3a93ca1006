"""Every optimizer and option set of torch's own optimizer database, placed in RAM and compared with
plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

import roadtrain
from roadtrain.errors import RuleError

STEPS = 5
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
# they cannot run on flat slices (README, honest limits)
REFUSED = {"LBFGS", "SparseAdam", "Adafactor", "Muon"}
SPEED_ONLY = ("capturable", "differentiable", "foreach", "fused")


class Net(nn.Module):
    """Two blocks and a root block with parameters of awkward sizes."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 7)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)) for _ in range(2)]
        )
        self.leave = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        h = self.enter(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.leave(h)


def database():
    for info in optim_db:
        for inputs in info.optim_inputs_func(device="cpu"):
            yield pytest.param(
                info.optim_cls, inputs.kwargs, id=f"{info.optim_cls.__name__}-{inputs.desc}"
            )


def build(cls, kwargs):
    torch.manual_seed(3)
    model = Net()
    params = (
        [p for p in model.parameters() if p.ndim == 2]
        if cls.__name__ == "Muon"
        else model.parameters()
    )
    return model, cls(params, **copy.deepcopy(kwargs))


def train(model, optimizer):
    generator = torch.Generator().manual_seed(4)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(6, 5, generator=generator)
        loss = (model(x) - x[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("cls", "kwargs"), database())
def test_a_placed_optimizer_trains_as_plain_torch(cls, kwargs):
    if cls.__name__ in REFUSED:
        model, optimizer = build(cls, kwargs)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuleError, match=cls.__name__):
            roadtrain.place(model, optimizer, report=lambda _: None)
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items()), (
            "the refusal changed the model"
        )
        return
    plain, optimizer_of_plain = build(cls, {"foreach": False, **kwargs})
    begin = copy.deepcopy(plain.state_dict())
    losses = train(plain, optimizer_of_plain)

    model, optimizer = build(cls, kwargs)
    with roadtrain.place(
        model, optimizer, host_budget="128MiB", deadline_s=30, report=lambda _: None
    ) as placed:
        placed_losses = train(model, placed)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(
                torch.from_numpy(placed.read(name)), p.detach(), **ROUNDING, msg=name
            )
            assert not torch.equal(begin[name], p), f"{name} did not train: nothing was compared"
        placed_state = placed.state_dict(gather=True)["state"]
    plain_state = optimizer_of_plain.state_dict()["state"]
    assert {number for number, entries in placed_state.items() if entries} == plain_state.keys()
    for number, entries in plain_state.items():
        for key, value in entries.items():
            if value is not None:
                value, found = torch.as_tensor(value), torch.as_tensor(placed_state[number][key])
                most = 2e-5 * max(1.0, value.abs().max().item())
                torch.testing.assert_close(found, value, rtol=1e-5, atol=most, check_dtype=False)
    torch.testing.assert_close(placed_losses, losses, **ROUNDING)


@pytest.mark.parametrize("option", SPEED_ONLY)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_options_for_speed_change_no_loss(cls, option):
    kwargs = {"lr": 1e-2, option: True}
    try:
        build(cls, kwargs)
    except (TypeError, RuntimeError):
        pytest.skip(f"torch has no such option on the CPU\n{option} of {cls.__name__}")
    plain, optimizer = build(cls, {"lr": 1e-2})
    losses = train(plain, optimizer)
    model, optimizer = build(cls, kwargs)
    with roadtrain.place(
        model, optimizer, host_budget="128MiB", deadline_s=30, report=lambda _: None
    ) as placed:
        torch.testing.assert_close(train(model, placed), losses, **ROUNDING)
