"""With staleness 1 a step computes with the parameters from before the last step's update, like the
plain loop in this file. With a higher staleness it uses the newest parameters available."""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest
import torch
from torch import nn

import roadtrain
from roadtrain import Delay, Servers, TopK
from roadtrain.errors import BudgetError, ConfigError, ForeignError
from roadtrain.options.budgets import derive
from roadtrain.placement import session_plan
from roadtrain.storage.file import FileTier
from tests.support.models import Case
from tests.support.processes import HostProcess, Workers


class Branchy(nn.Module):
    """A model whose second layer is used in some steps only."""

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
    """Train with two copies: gradients are computed on a copy that is one update behind."""
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
    losses, values = [], {}
    for stop in stops:
        torch.manual_seed(0)
        model = Branchy()
        optimizer = roadtrain.place(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
            report=lambda _: None,
            chunk_elements=1 << 16,
            dtype=dtype,
            **{"delay": Delay(1), **options},
        )
        with optimizer:
            while optimizer.steps_done < stop:
                step = optimizer.steps_done
                x, y = batch(step)
                loss = nn.functional.mse_loss(model(x.to(dtype), SKIPS[step]).float(), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            values = {
                spec.name: torch.from_numpy(optimizer.read(spec.name).copy())
                for spec in optimizer.params
            }
            values["first.weight:step"], values["layers.1.0.weight:step"] = (
                torch.from_numpy(optimizer.read(name, "step"))
                for name in ("first.weight", "layers.1.0.weight")
            )
    return losses, values


@pytest.mark.parametrize("promise", [None, 1])
def test_trains_as_the_plain_delayed_loop(promise, tmp_path):
    losses, weights = plain()
    ram = placed([8], backwards_per_step=promise)
    assert ram[0] == pytest.approx(losses, rel=1e-4)
    for name, p in weights.items():
        assert torch.allclose(ram[1][name], p, rtol=0, atol=1e-4), name
    for stops, options in (
        ([8], {}),
        ([1, 3, 4, 5, 8], {}),
        ([2, 6, 7, 8], {"host_budget": "200MiB"}),
    ):
        home = tmp_path / str(len(stops))
        seen = placed(stops, backwards_per_step=promise, store=[home / "a", home / "b"], **options)
        assert seen[0] == ram[0], stops  # Rules 1 and 3: the same bits after stops at any step
        assert all(torch.equal(seen[1][name], ram[1][name]) for name in weights)


def test_a_device_that_writes_late_changes_no_bit(tmp_path, monkeypatch):
    """Both versions are requested while the record still waits to be written, also if only its copy
    is in memory."""
    ram = placed([5], backwards_per_step=1, dtype=torch.bfloat16)
    write = FileTier.write
    monkeypatch.setattr(FileTier, "write", lambda *a: (time.sleep(0.03), write(*a))[1])
    for i, kept in enumerate(("resident", "weights_resident", "nothing")):

        def derive_resident(*args, kept=kept):
            budgets = derive(*args)
            every = frozenset(range(len(args[0].chunks)))
            records = replace(
                budgets.records,
                resident=every if kept == "resident" else frozenset(),
                weights_resident=every if kept == "weights_resident" else frozenset(),
            )
            return replace(budgets, records=records)

        monkeypatch.setattr(session_plan, "derive", derive_resident)
        seen = placed([5], backwards_per_step=1, dtype=torch.bfloat16, store=tmp_path / str(i))
        assert seen[0] == ram[0], kept
        assert all(torch.equal(seen[1][name], p) for name, p in ram[1].items())


@pytest.mark.parametrize("where", [None, "a"])
def test_reads_and_exports_return_the_newest_values(where, tmp_path):
    """The weights part of a record is one update behind, which no caller sees."""
    model = Branchy()
    optimizer = roadtrain.place(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        delay=Delay(1),
        dtype=torch.bfloat16,
        store=where and tmp_path / where,
        report=lambda _: None,
    )
    with optimizer:
        for step in range(3):
            x, y = batch(step)
            nn.functional.mse_loss(model(x.bfloat16(), False).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for spec in optimizer.params:
            master = torch.from_numpy(optimizer.read(spec.name).copy())
            exported = torch.from_numpy(
                optimizer.read(spec.name, "weights").copy().view("int16")
            ).view(torch.bfloat16)
            assert torch.equal(master.bfloat16(), exported), spec.name


def test_unsupported_combinations_with_staleness_are_refused(tmp_path):
    placed([2], store=tmp_path / "a")
    model = Branchy()
    with pytest.raises(
        ForeignError, match="trained with staleness 1, but staleness 0 is requested"
    ):
        roadtrain.place(
            model,
            torch.optim.AdamW(model.parameters()),
            store=tmp_path / "a",
            chunk_elements=1 << 16,
        )
    with pytest.raises(ConfigError, match="cannot be converted"):
        placed([3], store=[tmp_path / "a", tmp_path / "b"])
    for wrong in (-1, 1.5, "all"):
        with pytest.raises(ConfigError, match="`steps` cannot be"):
            Delay(wrong)
    with pytest.raises(ConfigError, match="a block fetched again may differ"):
        roadtrain.place(
            model,
            torch.optim.AdamW(model.parameters()),
            delay=Delay(2),
            store=Servers(["a:1"], buffering="none"),
        )
    with pytest.raises(BudgetError, match=r"4 blocks .* in memory, but only 2 fit"):
        roadtrain.place(
            model,
            torch.optim.AdamW(model.parameters()),
            delay=Delay(2),
            host_budget="40MiB",
            store=tmp_path / "c",
        )
    with pytest.raises(ConfigError, match="error feedback"):
        roadtrain.place(
            model,
            torch.optim.AdamW(model.parameters()),
            delay=Delay(1),
            compress=TopK(0.05, error_feedback=True),
        )
    assert len(placed([3], store=tmp_path / "a")[0]) == 1  # the store lost nothing


class Wide(nn.Module):
    """A model with many chunks and little computation."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 512), nn.Linear(512, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)) for _ in range(12)
        )

    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.last(h)


def wide(steps, **options):
    torch.manual_seed(0)
    model, out = Wide(), []
    optimizer = roadtrain.place(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False),
        report=lambda _: None,
        deadline_s=30,
        chunk_elements=1 << 16,
        backwards_per_step=1,
        **options,
    )
    with optimizer:
        for step in range(steps):
            x, y = batch(step)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
    return out


@pytest.mark.exhaustive  # spilled gradients: test_gradients.py, test_golden_losses.py
def test_a_slow_server_spills_gradients_of_the_next_step(tmp_path):
    """Rules 1 and 5. The server's buffers fill with gradients of the next step while the current step
    waits for a commit message that the worker sends after them, so they are spilled."""
    expected = wide(3, delay=Delay(1))
    hosts = [
        HostProcess(tmp_path / "a", snapshot=tmp_path / "a", fault=("slow", 0.03)),
        HostProcess(tmp_path / "b"),
    ]
    try:
        assert (
            wide(
                3,
                delay=Delay(1),
                store=Servers([host.where for host in hosts]),
                host_budget="200MiB",
            )
            == expected
        )
    finally:
        for host in hosts:
            host.kill()


@pytest.mark.parametrize(
    ("staleness", "least", "most"),
    [
        (0, 0, 1),
        pytest.param(1, 0, 2, marks=pytest.mark.exhaustive),
        pytest.param(4, 3, 5, marks=pytest.mark.exhaustive),
        ("none", 12, 17),
    ],
)
def test_staleness_limits_how_far_a_worker_gets_ahead_of_a_stopped_worker(
    staleness, least, most, tmp_path
):
    host = HostProcess(tmp_path / "host")
    case, steps, changes = Case(eager=True, staleness=staleness), 28, {1: "stand still"}
    workers = Workers(case, [host.where], tmp_path, steps, 2, norms=False, changes=changes)
    try:
        stopped = psutil.Process(workers.processes[1].pid)
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        stopped_at = done(workers.logs[1])
        wait_until(lambda: done(workers.logs[0]) >= stopped_at + least)
        time.sleep(1.0)
        ahead = done(workers.logs[0]) - stopped_at
        assert least <= ahead <= most + 1
        os.kill(workers.processes[1].pid, signal.SIGCONT)
        assert workers.join() == [0, 0], workers.errors()
        assert min(map(done, workers.logs)) == steps
    finally:
        host.kill()
        for process in workers.processes:
            process.kill()


def done(log):
    """Return the number of steps in a log."""
    return sum(line[0].isdigit() for line in log.read_text().splitlines()) if log.exists() else 0


def wait_until(condition, deadline_s=60):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < deadline_s
        time.sleep(0.05)


def test_with_higher_staleness_each_update_is_applied_once(tmp_path):
    for steps in (3, None):
        seen, values = placed([4, 8], store=tmp_path / str(steps), delay=Delay(steps))
        assert len(seen) == 8 and all(torch.isfinite(w).all() for w in values.values())
        assert (values["first.weight:step"], values["layers.1.0.weight:step"]) == (
            8,
            8 - sum(SKIPS),
        )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"relay": "256MiB", "local": 2}, marks=pytest.mark.exhaustive, id="relay"),
        pytest.param({"replicas": 2}, id="replicas"),
        pytest.param({"compress": TopK(0.1)}, id="compress"),
    ],
)
def test_staleness_works_with_relays_replicas_and_compression(options, tmp_path):
    hosts = [HostProcess(tmp_path / name) for name in "ab"]
    try:
        workers = Workers(
            Case(eager=True, staleness=3),
            [host.where for host in hosts],
            tmp_path,
            8,
            2,
            norms=False,
            **options,
        )
        assert workers.join() == [0, 0], workers.errors()
        assert [done(log) for log in workers.logs] == [8, 8]
    finally:
        for host in hosts:
            host.kill()
