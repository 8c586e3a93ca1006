"""Training on devices (tests/support/devices.py): the emulated one, the device `toy` in
`make test-device`, and CUDA in `make test-gpu`. Kernels of all but CUDA have the bits of the CPU."""

import functools
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

import roadtrain
from roadtrain.config.job import load_job
from roadtrain.device.accelerator import random_state
from roadtrain.errors import BudgetError, ConfigError, ModelError
from roadtrain.training import verify
from tests.support.devices import DEVICES, SEPARATE, active
from tests.support.models import Case, build, contents, new_scaler, one_step, place, run
from tests.support.processes import FORK

STEPS = 4
BUDGET = {"device_budget": "1GiB"}
QUIET = {"report": lambda _: None, "deadline_s": 30}
CASES = [
    Case(dropout=0.0),
    Case(dropout=0.0, accumulate=3, clip=0.5),
    Case(dropout=0.0, scaler=True, clip=0.5, groups=True, tied=True),
    Case(dropout=0.0, frozen=True, accumulate=2, eager=True),
    Case(dropout=0.0, dtype=torch.bfloat16, scaler=True),
    Case(dropout=0.0, eager=True, staleness=1),
]
ABSENT = pytest.mark.skip(reason="run by `make test-device` or `make test-gpu`")
on_devices = pytest.mark.parametrize("device", DEVICES)
on_separate_devices = pytest.mark.parametrize(
    "device", SEPARATE or [pytest.param("none", marks=ABSENT)]
)


def placed_run(case, store=None, until=STEPS):
    model, placed, scaler = place(case, store, **BUDGET)
    with placed:
        losses = run(case, model, placed, scaler, placed.steps_done, until)
        return losses, contents(model, placed)


@functools.cache
def on_cpu(case):
    with active("cpu"):
        model, placed, scaler = place(case, None)
        with placed:
            return run(case, model, placed, scaler, 0, STEPS), contents(model, placed)


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for key in a[1]:
        assert np.array_equal(a[1][key], b[1][key], equal_nan=True), key


@on_devices
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(k for k, v in vars(case).items() if v)
)
def test_a_case_has_the_same_bits_in_memory_and_resumed_on_files(device, case, tmp_path):
    """Rules 1, 3."""
    if device == "cuda" and case.scaler and case.dtype is torch.bfloat16:
        pytest.skip("torch's GradScaler does not take bf16 gradients on CUDA")
    cpu = on_cpu(case)
    with active(device) as kind:
        case = replace(case, device=kind)
        losses, values = placed_run(case)
        placed_run(case, tmp_path / "s", until=2)
        assert_same((losses[2:], values), placed_run(case, tmp_path / "s"))
    if kind != "cuda":
        assert_same(cpu, (losses, values))


@on_devices
@pytest.mark.parametrize(
    "case", [Case(sgd=True), Case(sgd=True, scaler=True, accumulate=3, frozen=True)]
)
def test_a_placed_model_trains_as_plain_torch_on_the_device(device, case):  # Rule 1
    """With dropout, whose random numbers are drawn again when a block is recomputed."""
    with active(device) as kind:
        case = replace(case, device=kind)
        model = build(case)[0].to(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, foreach=False)
        losses = run(case, model, optimizer, new_scaler(case), 0, STEPS)
        model, placed, scaler = place(case, None, **BUDGET)
        with placed:
            assert run(case, model, placed, scaler, 0, STEPS) == losses


class Counting(torch.nn.Module):
    """Has a buffer that each forward changes in place, and one that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x):
        self.calls.add_(1)
        out = self.linear(x * self.calls.clone()) + self.last
        self.last = out.detach().mean(0)
        return out


@on_devices
def test_buffers_of_the_device_are_restored(device):  # Rule 1
    def train(place, kind):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[Counting() for _ in range(3)]).to(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, foreach=False)
        optimizer = place(model, optimizer)
        losses, x = [], torch.randn(4, 8).to(kind)
        for _ in range(3):
            passes = [model(x).square().mean() for _ in range(2)]
            sum(passes).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item() for loss in passes]
        if isinstance(optimizer, roadtrain.PlacedOptimizer):
            optimizer.close()
        return losses

    with active(device) as kind:
        plain = train(lambda model, optimizer: optimizer, kind)
        assert train(lambda *both: roadtrain.place(*both, **BUDGET, **QUIET), kind) == plain


@on_devices
def test_random_numbers_of_the_device_are_resumed(device, tmp_path):  # Rule 3
    def draw(kind, store, first, last):
        torch.manual_seed(first)
        model, placed, _ = place(Case(device=kind), store, **BUDGET)
        with placed:
            for _ in range(first, last):
                x = torch.randint(0, 50, (4, 16), device=kind)
                loss = model(x).float().square().mean()
                loss.backward()
                placed.step()
                placed.zero_grad()
            return loss.item(), random_state(torch.device(kind, 0))

    with active(device) as kind:
        whole, state = draw(kind, None, 0, 4)
        draw(kind, tmp_path / "s", 0, 2)
        again, resumed = draw(kind, tmp_path / "s", 2, 4)
    assert again == whole and torch.equal(state, resumed)


@on_devices
def test_a_state_dict_is_saved_and_loaded(device, tmp_path):
    path = tmp_path / "checkpoint.pt"
    with active(device) as kind:
        case = Case(dropout=0.0, device=kind)
        whole = placed_run(case)
        model, placed, scaler = place(case, None, **BUDGET)
        with placed:
            run(case, model, placed, scaler, 0, 2)
            torch.save((model.state_dict(), placed.state_dict(gather=True)), path)
        model, placed, scaler = place(case, None, seed=7, **BUDGET)
        with placed:
            of_model, of_optimizer = torch.load(path, map_location="cpu")
            model.load_state_dict({name: value.to(kind) for name, value in of_model.items()})
            placed.load_state_dict(of_optimizer)
            losses = run(case, model, placed, scaler, 2, STEPS)
            assert_same((whole[0][2:], whole[1]), (losses, contents(model, placed)))


def stop_in_third_step(device, store, stop):
    """Train on files, and call `stop` in the middle of the third step's first backward."""
    torch.set_num_threads(1)  # as in all tests
    with active(device) as kind:
        case = Case(dropout=0.0, device=kind, accumulate=2)
        model, placed, scaler = place(case, store, **BUDGET)
        with placed:
            run(case, model, placed, scaler, 0, 2)
            placed.flush()
            model.layers[1].register_full_backward_hook(stop)
            run(case, model, placed, scaler, 2, 3)


def kill_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def divide_by_zero(*_):
    return 1 / 0


@on_devices
@pytest.mark.parametrize("stop", [kill_this_process, divide_by_zero])
def test_a_step_that_failed_halfway_is_repeated(device, stop, tmp_path):  # Rule 3
    store = tmp_path / "s"
    if stop is kill_this_process:
        process = FORK.Process(target=stop_in_third_step, args=(device, store, stop))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    else:
        with pytest.raises(ZeroDivisionError):
            stop_in_third_step(device, store, stop)
    with active(device) as kind:
        case = Case(dropout=0.0, device=kind, accumulate=2)
        losses, values = placed_run(case)
        assert_same((losses[2:], values), placed_run(case, store))


JOB = """
run = {{ dir = "{home}/run", device = "{device}" }}
data = {{ paths = ["{home}/text"], seq_len = 16, batch_size = 2 }}
optimizer = {{ clip_norm = 1.0 }}
budget = {{ host = "60MiB", device = "1GiB" }}
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 64
"""


@on_devices
def test_verify(device, tmp_path):  # Rule 1
    pytest.importorskip("transformers")
    (tmp_path / "text").write_text("".join(f"line {i}, {i * i}\n" for i in range(600)))
    lines = []
    with active(device) as kind:
        (tmp_path / "job.toml").write_text(JOB.format(home=tmp_path, device=kind))
        assert verify.verify(load_job(tmp_path / "job.toml"), 2, lines.append), lines
    assert sum("are bit-identical" in line for line in lines) == 2


# bad input: one sentence each


@on_devices
@pytest.mark.parametrize("budget", ["1MiB", 5 << 20])
def test_a_budget_below_the_least_changes_nothing(device, budget, tmp_path):  # Rule 6
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    with active(device) as kind:
        options = {"device": kind, "report": lambda _: None}
        with pytest.raises(BudgetError) as error:
            roadtrain.place(model, optimizer, store=tmp_path / "s", device_budget=budget, **options)
        assert "needs at least 22 MiB of device memory" in str(error.value)
        assert "give at least 22 MiB" in error.value.hint
        assert not any(tmp_path.iterdir()) and model[0].weight.isfinite().all()
        with roadtrain.place(model, optimizer, device_budget="22MiB", **options):
            pass


class OnCpu(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).cpu()


def wrong_module(model):
    model.layers[1] = OnCpu(model.layers[1])


def hook_of_a_block(model):
    model.layers[0].register_forward_hook(lambda module, args, out: out.cpu())


def hook_of_the_last_block(model):
    model.layers[2].register_forward_hook(lambda module, args, out: out.cpu())


@on_separate_devices
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_module, "block 'layers.1' returned a tensor on cpu, but computes on {}:0"),
        (hook_of_a_block, "block 'layers.1' was called with a tensor on cpu, but computes on {}:0"),
        (hook_of_the_last_block, "Linear 'head' was called with a tensor on cpu, but computes on"),
    ],
)
def test_a_tensor_on_the_wrong_device_is_named(device, change, message):  # Rule 6
    model, _ = build(Case())
    change(model)
    optimizer = torch.optim.SGD(model.parameters())
    with (
        active(device) as kind,
        roadtrain.place(model, optimizer, device=kind, **BUDGET, **QUIET) as placed,
    ):
        with pytest.raises(ModelError, match=message.format(kind)) as raised:
            one_step(Case(device=kind), model, placed, new_scaler(Case()), 0)
        assert f"on {kind}:0" in raised.value.hint


@on_separate_devices
@pytest.mark.parametrize(
    ("requested", "error", "message"),
    [
        ("{}:99", ConfigError, r"{0}:99 is requested, but torch sees \d+ {0} device\(s\)"),
        ("xpu", ConfigError, r"xpu is not supported, only {} and cpu are supported here"),
        ("nonsense", ConfigError, r"`device` cannot be 'nonsense'"),
        (None, ModelError, r"parameters are on several devices, \['cpu', '{}:0'\]"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(device, requested, error, message, tmp_path):
    """Rule 6."""
    model, optimizer = build(Case())
    with active(device) as kind:
        model.head.to(kind)
        requested = requested and requested.format(kind)
        with pytest.raises(error, match=message.format(kind)):
            roadtrain.place(model, optimizer, store=tmp_path / "s", device=requested, **QUIET)
    assert not any(tmp_path.iterdir()) and model.embed.weight.isfinite().all()


@on_separate_devices
def test_the_whole_model_is_on_the_device(device):
    with active(device) as kind:
        for of_model, requested in (("cpu", kind), (kind, None)):
            model = build(Case())[0].to(of_model)
            optimizer = torch.optim.SGD(model.parameters())
            with roadtrain.place(model, optimizer, device=requested, **BUDGET, **QUIET):
                found = {t.device for t in (*model.parameters(), *model.buffers())}
                assert found == {torch.device(kind, 0)}


@on_separate_devices
def test_a_model_on_the_cpu_beside_the_device_is_reported(device):  # Rule 6
    lines = []
    with active(device) as kind:
        roadtrain.place(*build(Case()), report=lines.append).close()
    assert f"this host has {torch.accelerator.device_count()} {kind} device(s)" in lines[0]
    assert f"device='{kind}'" in lines[0]
