"""Training on the device `toy` (tests/support/toy_device.py): the same bits as on the CPU, and what
tensors on a wrong device do. Run by `make test-device`."""

import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import roadtrain
from roadtrain.config.job import load_job
from roadtrain.device.accelerator import accelerators, random_state
from roadtrain.errors import ConfigError, ModelError
from roadtrain.placement.tracked import generators, set_generators
from roadtrain.planner import probe
from roadtrain.training import verify
from tests.support import toy_device
from tests.support.models import Case, build, contents, new_scaler, one_step, place, run

pytestmark = pytest.mark.skipif(bool(toy_device.absent()), reason=toy_device.absent())
TOY = torch.device("privateuseone", 0)  # torch's name of such a device until it has its own
STEPS = 4
ON_TOY = {"device_budget": "1GiB"}
QUIET = {"report": lambda _: None, "deadline_s": 30}
CASES = [
    Case(dropout=0.0),
    Case(dropout=0.0, accumulate=3, clip=0.5),
    Case(dropout=0.0, scaler=True, clip=0.5, groups=True, tied=True),
    Case(dropout=0.0, frozen=True, accumulate=2, eager=True),
    Case(dropout=0.0, dtype=torch.bfloat16, scaler=True),
]


LACKS = {
    "streams": None,
    "one stream": "toy:0 has one stream, so copies and computing take turns",
    "no events": "toy:0 has no events, so the host waits for every copy",
}


@pytest.fixture(autouse=True, params=LACKS)
def lacks(request):
    """Set what the device has, and return what is reported."""
    torch.ops.toy.has(request.param == "streams", request.param != "no events")
    accelerators.clear()
    with sdpa_kernel(SDPBackend.MATH):  # the CPU has other kernels of its own
        yield LACKS[request.param]


def placed_run(case, store=None, until=STEPS, **options):
    options = options if case.device == "cpu" else ON_TOY | options
    model, placed, scaler = place(case, store, **options)
    with placed:
        losses = run(case, model, placed, scaler, placed.steps_done, until)
        return losses, contents(model, placed)


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for key in a[1]:
        assert np.array_equal(a[1][key], b[1][key], equal_nan=True), key


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(k for k, v in vars(case).items() if v)
)
def test_a_case_has_the_same_bits_as_on_the_cpu(case, tmp_path):  # Rule 1
    cpu, toy = placed_run(case), replace(case, device="toy")
    assert_same(cpu, placed_run(toy))
    placed_run(toy, tmp_path / "s", until=2)
    losses, values = placed_run(toy, tmp_path / "s")
    assert_same((cpu[0][2:], cpu[1]), (losses, values))


def test_a_placed_model_trains_as_plain_torch_on_the_device():  # Rule 1
    """With dropout, whose random numbers are drawn again when a block is recomputed."""
    case = Case(sgd=True, device="toy")
    model = build(case)[0].to("toy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, foreach=False)
    losses = run(case, model, optimizer, new_scaler(case), 0, STEPS)
    model, placed, scaler = place(case, None, **ON_TOY)
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


def test_buffers_of_the_device_are_restored():  # Rule 1
    def train(place):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[Counting() for _ in range(3)]).to("toy")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, foreach=False)
        optimizer = place(model, optimizer)
        losses, x = [], torch.randn(4, 8).to("toy")
        for _ in range(3):
            passes = [model(x).square().mean() for _ in range(2)]
            sum(passes).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item() for loss in passes]
        if isinstance(optimizer, roadtrain.PlacedOptimizer):
            optimizer.close()
        return losses

    plain = train(lambda model, optimizer: optimizer)
    assert train(lambda *both: roadtrain.place(*both, **ON_TOY, **QUIET)) == plain


def test_random_numbers_of_the_device_are_resumed(tmp_path):  # Rule 3
    def draw(store, first, last):
        torch.manual_seed(first)
        model, placed, _ = place(Case(device="toy"), store, **ON_TOY)
        with placed:
            for _ in range(first, last):
                x = torch.randint(0, 50, (4, 16), device="toy")
                loss = model(x).float().square().mean()
                loss.backward()
                placed.step()
                placed.zero_grad()
            return loss.item(), random_state(TOY)

    whole, state = draw(None, 0, 4)
    draw(tmp_path / "s", 0, 2)
    again, resumed = draw(tmp_path / "s", 2, 4)
    assert again == whole and torch.equal(state, resumed)


@pytest.mark.parametrize("states", [0, 1, 3], ids="{} saved states".format)
def test_saved_random_states_of_any_device_are_accepted(states):
    """The first version of the format stored the generators of all CUDA devices."""
    torch.manual_seed(5)
    saved = generators(TOY) | {"cuda": [random_state(TOY)] * states}
    torch.manual_seed(6)
    before = random_state(TOY)
    set_generators(saved, TOY)
    assert torch.equal(random_state(TOY), saved["cuda"][0] if states else before)
    set_generators(saved | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}, TOY)  # of a CUDA device


def test_a_state_dict_is_saved_and_loaded(tmp_path):
    case, path = Case(dropout=0.0, device="toy"), tmp_path / "checkpoint.pt"
    whole = placed_run(case)
    model, placed, scaler = place(case, None, **ON_TOY)
    with placed:
        run(case, model, placed, scaler, 0, 2)
        torch.save((model.state_dict(), placed.state_dict(gather=True)), path)
    model, placed, scaler = place(case, None, seed=7, **ON_TOY)
    with placed:
        of_model, of_optimizer = torch.load(path, map_location="cpu")
        model.load_state_dict({name: value.to("toy") for name, value in of_model.items()})
        placed.load_state_dict(of_optimizer)
        losses = run(case, model, placed, scaler, 2, STEPS)
        assert_same((whole[0][2:], whole[1]), (losses, contents(model, placed)))


KILLED = """
import os, signal, sys
from tests.support import toy_device
toy_device.load()
from tests.support.models import Case, place, run
case = Case(dropout=0.0, device="toy", accumulate=2)
model, placed, scaler = place(case, sys.argv[1], device_budget="1GiB")
run(case, model, placed, scaler, 0, 2)
placed.flush()
model.layers[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
run(case, model, placed, scaler, 2, 3)
"""


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_step_that_failed_halfway_is_repeated(tmp_path, how):  # Rule 3
    case, store = Case(dropout=0.0, device="toy", accumulate=2), tmp_path / "s"
    if how == "killed":
        done = subprocess.run([sys.executable, "-c", KILLED, store], cwd=toy_device.ROOT)
        assert done.returncode == -signal.SIGKILL
    else:
        model, placed, scaler = place(case, store, **ON_TOY)
        with pytest.raises(ZeroDivisionError), placed:
            run(case, model, placed, scaler, 0, 2)
            model.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
            run(case, model, placed, scaler, 2, 3)
    cpu = placed_run(Case(dropout=0.0, accumulate=2))
    assert_same((cpu[0][2:], cpu[1]), placed_run(case, store))


# bad input: one sentence each


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_module, "block 'layers.1' returned a tensor on cpu, but computes on toy:0"),
        (
            hook_of_a_block,
            "block 'layers.1' was called with a tensor on cpu, but computes on toy:0",
        ),
        (hook_of_the_last_block, "Linear 'head' was called with a tensor on cpu, but computes on"),
    ],
)
def test_a_tensor_on_the_wrong_device_is_named(change, message):  # Rule 6
    model, _ = build(Case())
    change(model)
    optimizer = torch.optim.SGD(model.parameters())
    with roadtrain.place(model, optimizer, device="toy", **ON_TOY, **QUIET) as placed:
        with pytest.raises(ModelError, match=message) as raised:
            one_step(Case(device="toy"), model, placed, new_scaler(Case()), 0)
        assert "on toy:0" in raised.value.hint


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("toy:3", ConfigError, r"toy:3 is requested, but torch sees 1 toy device\(s\)"),
        ("cuda", ConfigError, r"cuda is not supported, only toy and cpu are supported here"),
        ("nonsense", ConfigError, r"`device` cannot be 'nonsense'"),
        (None, ModelError, r"parameters are on several devices, \['cpu', 'toy:0'\]"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(device, error, message, tmp_path):  # Rule 6
    model, _ = build(Case())
    model.head.to("toy")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(error, match=message):
        roadtrain.place(model, optimizer, store=tmp_path / "s", device=device, **QUIET)
    assert not any(tmp_path.iterdir()) and model.embed.weight.isfinite().all()


def test_what_the_device_lacks_is_reported(lacks, tmp_path):  # Rule 6
    model, optimizer = build(Case())
    with pytest.raises(ConfigError, match="does not know how much memory toy:0 has") as raised:
        roadtrain.place(model, optimizer, store=tmp_path / "s", device="toy", **QUIET)
    assert raised.value.hint == "set device_budget" and not any(tmp_path.iterdir())
    lines = []
    roadtrain.place(model, optimizer, device="toy", report=lines.append, **ON_TOY).close()
    assert [line for line in lines if line.startswith("toy:0 has")] == ([lacks] if lacks else [])


@pytest.mark.parametrize(("of_model", "device"), [("cpu", "toy"), ("toy", None)])
def test_the_whole_model_is_on_the_device(of_model, device):
    model = build(Case())[0].to(of_model)
    optimizer = torch.optim.SGD(model.parameters())
    with roadtrain.place(model, optimizer, device=device, **ON_TOY, **QUIET):
        assert {t.device for t in (*model.parameters(), *model.buffers())} == {TOY}


def test_a_model_on_the_cpu_beside_the_device_is_reported():  # Rule 6
    lines = []
    roadtrain.place(*build(Case()), report=lines.append).close()
    assert "this host has 1 toy device(s)" in lines[0] and "device='toy'" in lines[0]


# other rooms

JOB = """
run = {{ dir = "{home}/run", device = "toy" }}
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


def test_verify(tmp_path):  # Rule 1
    pytest.importorskip("transformers")
    (tmp_path / "text").write_text("".join(f"line {i}, {i * i}\n" for i in range(600)))
    (tmp_path / "job.toml").write_text(JOB.format(home=tmp_path))
    lines = []
    assert verify.verify(load_job(tmp_path / "job.toml"), 2, lines.append), lines
    assert sum("are bit-identical" in line for line in lines) == 2


def test_probe_measures_the_device():
    assert probe.accelerators() == [TOY] and probe.device_name(TOY) == "toy"
    assert min(probe.copies(TOY, 1 << 20)) > 0
    assert probe.products(TOY, torch.float32, (32,))[32] > 0
