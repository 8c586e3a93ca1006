"""Staleness 1: a step computes with the parameters from before the last step's update, as the plain loop here does."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import roadtrain
from roadtrain import placing
from roadtrain.errors import ConfigError, ForeignError
from roadtrain.spec.plan import derive
from roadtrain.store.file import FileTier


class Branchy(nn.Module):
    """Its middle layer is used in some steps only."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 300)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(300, 300), nn.Tanh()) for _ in range(4))
        self.gate = nn.Parameter(torch.ones(300))
        self.last = nn.Linear(300, 8)

    def forward(self, x, skip):
        h = self.first(x)
        for i, layer in enumerate(self.layers):
            if not (skip and i == 1):
                h = layer(h)
        return self.last(h if skip else h * self.gate)


SKIPS = [False, False, True, True, False, True, False, False]


def batch(step):
    torch.manual_seed(step)
    return torch.randn(4, 8), torch.randn(4, 8)


def plain():
    """Two copies of the model: gradients are taken at what the other was one update ago."""
    torch.manual_seed(0)
    now, torch_rng = Branchy(), torch.get_rng_state()
    torch.set_rng_state(torch_rng)
    late = Branchy()
    late.load_state_dict(now.state_dict())
    optimizer = torch.optim.AdamW(now.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step, skip in enumerate(SKIPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(late(x, skip), y)
        late.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for p, q in zip(now.parameters(), late.parameters()):
            p.grad = None if q.grad is None else q.grad.clone()
        late.load_state_dict(now.state_dict())  # before the update
        optimizer.step()
    return losses, {n: p.detach().clone() for n, p in now.named_parameters()}


def placed(stops, dtype=torch.float32, **options):
    losses, found = [], {}
    for stop in stops:
        torch.manual_seed(0)
        model = Branchy()
        optimizer = roadtrain.place(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), staleness=1, report=lambda _: None,
            chunk_elements=1 << 16, dtype=dtype, **options)
        with optimizer:
            while optimizer.steps_done < stop:
                step = optimizer.steps_done
                x, y = batch(step)
                loss = nn.functional.mse_loss(model(x.to(dtype), SKIPS[step]).float(), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found = {spec.name: torch.from_numpy(optimizer.read(spec.name).copy()) for spec in optimizer.params}
    return losses, found


@pytest.mark.parametrize("promise", [None, 1])
def test_trains_as_the_plain_delayed_loop(promise, tmp_path):
    losses, weights = plain()
    ram = placed([8], backwards_per_step=promise)
    assert ram[0] == pytest.approx(losses, rel=1e-4)
    for name, p in weights.items():
        assert torch.allclose(ram[1][name], p, rtol=0, atol=1e-4), name
    for stops, options in (([8], {}), ([1, 3, 4, 5, 8], {}), ([2, 6, 7, 8], {"budget": "200MiB"})):
        home = tmp_path / str(len(stops))
        seen = placed(stops, backwards_per_step=promise, store=[home / "a", home / "b"], **options)
        assert seen[0] == ram[0], stops  # Rules 1 and 3: at every step it stopped at, the same bits
        assert all(torch.equal(seen[1][name], ram[1][name]) for name in weights)


def test_a_device_that_writes_late(tmp_path, monkeypatch):
    """Both versions are asked for while the record still waits to be written, also where only its copy is in memory."""
    ram = placed([8], backwards_per_step=1, dtype=torch.bfloat16)
    write = FileTier.write
    monkeypatch.setattr(FileTier, "write", lambda *a: (time.sleep(0.05), write(*a))[1])
    for i, kept in enumerate(("resident", "public_resident", "nothing")):
        def only(*args, kept=kept, **options):
            budgets = derive(*args, **options)
            every = frozenset(range(len(args[0].chunks)))
            return replace(budgets, resident=every if kept == "resident" else frozenset(),
                           public_resident=every if kept == "public_resident" else frozenset())

        monkeypatch.setattr(placing, "derive", only)
        seen = placed([8], backwards_per_step=1, dtype=torch.bfloat16, store=tmp_path / str(i))
        assert seen[0] == ram[0], kept
        assert all(torch.equal(seen[1][name], p) for name, p in ram[1].items())


@pytest.mark.parametrize("where", [None, "a"])
def test_what_is_read_and_exported_is_the_newest(where, tmp_path):
    """The public part of a record is one update behind; nobody outside sees that."""
    model = Branchy()
    optimizer = roadtrain.place(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), staleness=1, dtype=torch.bfloat16,
        store=where and tmp_path / where, report=lambda _: None)
    with optimizer:
        for step in range(3):
            x, y = batch(step)
            nn.functional.mse_loss(model(x.bfloat16(), False).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for spec in optimizer.params:
            master = torch.from_numpy(optimizer.read(spec.name).copy())
            public = torch.from_numpy(optimizer.read(spec.name, "public").copy().view("int16")).view(torch.bfloat16)
            assert torch.equal(master.bfloat16(), public), spec.name


def test_what_it_does_not_do_is_said(tmp_path):
    placed([2], store=tmp_path / "a")
    model = Branchy()
    with pytest.raises(ForeignError, match="trained with staleness 1, asked for is 0"):
        roadtrain.place(model, torch.optim.AdamW(model.parameters()), store=tmp_path / "a", chunk_elements=1 << 16)
    with pytest.raises(ConfigError, match="is not converted"):
        placed([3], store=[tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ConfigError, match="staleness 2"):
        roadtrain.place(model, torch.optim.AdamW(model.parameters()), staleness=2)
    with pytest.raises(ConfigError, match="error feedback"):
        roadtrain.place(model, torch.optim.AdamW(model.parameters()), staleness=1, topk=0.1, error_feedback=True)
    assert len(placed([3], store=tmp_path / "a")[0]) == 1  # nothing of it was lost
