"""Horovod's and BytePS's calls over the summation service: whole scripts under torchrun, sums whose
results persist, and training with the bits of DDP and of plain steps (Rules 1, 2, 5 and 8)."""

import contextlib
import hashlib
import re
import subprocess
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import roadtrain.hvd as hvd
from roadtrain.errors import ConfigError, DeadlineError, LoopError
from roadtrain.integrations.ddp import Summation
from tests.support.processes import free_port
from tests.support.warm_python import warm_python
from tests.support.world import run_hvd as run

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def alone():
    """A world of a single worker in this process."""
    hvd.init(budget="64MiB")
    yield
    hvd.shutdown()
    assert not hvd.is_initialized() and not dist.is_initialized()


# whole scripts


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("horovod", r"step (\d+), (\d+) samples, loss ([\d.]+)"),
        pytest.param(
            "byteps", r"step (\d+), loss ([\d.]+), accuracy ([\d.]+)", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_script_runs_with_only_its_import_changed(name, pattern):
    path = EXAMPLES / "horovod" / f"{name}_script.py"
    assert [
        line for line in path.read_text().splitlines() if "roadtrain" in line and "import" in line
    ][1:] == [f"import roadtrain.hvd as {'hvd' if name == 'horovod' else 'bps'}"]
    done = subprocess.run(
        [
            warm_python(),
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            f"--master-port={free_port()}",
            path,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = [[float(x) for x in match] for match in re.findall(pattern, done.stdout)]
    assert [line[0] for line in lines] == ([20, 40, 60] if name == "horovod" else [10, 20, 30])
    if name == "horovod":
        assert [line[1] for line in lines] == [640, 1280, 1920] and lines[2][2] < lines[0][2]
    else:
        assert lines[2][1] < lines[0][1]


# sums


def sums(rank):
    n, results = hvd.size(), {}
    assert (hvd.rank(), hvd.local_rank(), hvd.local_size()) == (rank, rank, n)
    tensor = torch.full((3, 2), float(rank))
    first = hvd.allreduce(tensor, name="x")
    assert (tensor == rank).all(), "the input is unchanged"
    second = hvd.allreduce(tensor + 1, name="x")
    assert hvd.allreduce(torch.full((9,), 4.0), name="x").tolist() == [4.0] * 9, (
        "a name with another size"
    )
    # later sums do not overwrite these
    results["first"], results["second"] = first.tolist(), second.tolist()
    results["sum"] = hvd.allreduce(tensor, op=hvd.Sum).tolist()
    results["no average"] = hvd.allreduce(tensor, average=False).tolist()
    hvd.allreduce_(tensor, name="y")
    results["in place"] = tensor.tolist()
    strided = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    results["strided"] = hvd.push_pull_inplace(strided, average=False).tolist()
    handles = {
        i: hvd.allreduce_async(torch.full((1000,), float(i + rank)), name=f"t{i}")
        for i in (range(8) if rank % 2 else reversed(range(8)))
    }  # in any order
    results["named"] = [hvd.synchronize(handles[i])[0].item() for i in (5, 0, 7, 1, 2, 6, 3, 4)]
    unnamed = [hvd.push_pull_async(torch.full((5,), float(i * (rank + 1)))) for i in range(4)]
    more = hvd.allreduce(torch.full((5,), 100.0))
    results["unnamed"] = [hvd.synchronize(handle)[0].item() for handle in unnamed] + [
        more[0].item()
    ]
    handle = hvd.push_pull_async_inplace(tensor := torch.ones(4, dtype=torch.bfloat16), priority=3)
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle) is tensor and tensor.dtype is torch.bfloat16
    results["int"] = (
        hvd.allreduce(torch.tensor([rank, 7])).tolist(),
        hvd.allreduce(torch.tensor(rank), op=hvd.Sum).item(),
    )
    results["fp64"] = hvd.allreduce(
        torch.tensor(1e-17 + rank, dtype=torch.float64), name="metric"
    ).item()
    hvd.barrier()
    return results


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_and_averages(n):
    total = n * (n - 1) / 2
    mean = [pytest.approx(total / n)] * 2
    for results in run(n, sums):
        assert not isinstance(results, str), results
        assert results["first"] == [mean] * 3 == results["in place"]
        assert results["second"] == [[pytest.approx(total / n + 1)] * 2] * 3
        assert results["sum"] == results["no average"] == [[total] * 2] * 3
        assert (
            results["strided"] == (torch.arange(6.0).view(2, 3).t() * sum(range(1, n + 1))).tolist()
        )
        assert results["named"] == pytest.approx([i + total / n for i in (5, 0, 7, 1, 2, 6, 3, 4)])
        assert results["unnamed"] == pytest.approx([i * (n + 1) / 2 for i in range(4)] + [100])
        assert results["int"] == ([int(total) // n, 7], int(total))
        assert results["fp64"] == pytest.approx(total / n + 1e-17, rel=1e-15)


def test_unnamed_calls_make_no_new_buffers(alone):
    results = hvd._World.exchange.summation._results
    for _ in range(3):
        handles = [hvd.allreduce_async(torch.ones(4)) for _ in range(2)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.allreduce(torch.ones(4))
    assert len(results) == 3


def test_the_format_and_priority_are_passed_to_the_sum(alone, monkeypatch):
    seen, own = [], Summation.sum

    def sum(self, number, identity, tensor, *, detail, priority, format):
        seen.append((format, priority))
        return own(self, number, identity, tensor, detail=detail, priority=priority)

    monkeypatch.setattr(Summation, "sum", sum)
    model, optimizer = small(compression=hvd.Compression.bf16)
    backward(model)
    optimizer.step()
    assert sorted(seen, key=lambda call: call[1]) == [("bf16", i) for i in range(4)]
    assert [i // 2 for _, i in seen] == [
        1,
        1,
        0,
        0,
    ], "sums of the last layer start first, and those of the first layer have priority"
    seen.clear()
    C = hvd.Compression
    for compression in (C.none, "", C.fp16, C.topk(0.05), C.onebit, C.dither(4), "onebit"):
        hvd.allreduce(torch.ones(2), compression=compression)
    hvd.push_pull(torch.ones(2, dtype=torch.float16), compression="fp16", priority=5)
    expected = ["", "", "fp16", "topk:0.05", "onebit", "dither:4", "onebit", ""]
    assert seen == [(format, -5 if i == 7 else 0) for i, format in enumerate(expected)]
    with pytest.raises(ConfigError, match="compression=3"):
        hvd.allreduce(torch.ones(2), compression=3)


# training


class Tied(nn.Module):
    """A model with weights that belong to two modules, are used twice, or are used by the forward
    of another module (out_proj)."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.again, self.alone = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.head.weight = self.embed.weight

    def forward(self, x):
        first = self.head.weight.mean()
        x = self.embed(x) + first
        x = x + self.attention(x, x, x, need_weights=False)[0]
        if self.training:
            x = self.again(x)
        else:
            x = nn.functional.linear(x, self.again.weight, self.again.bias)
        return self.head(self.again(torch.tanh(x)) * self.alone)


def plain_model():
    return nn.Sequential(
        nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 5)
    )


def batch(tied, step, rank):
    torch.manual_seed(1000 * step + rank)
    if tied:
        return torch.randint(11, (4, 6)), torch.randn(4, 6, 11)
    return torch.randn(8, 40), torch.randn(8, 5)


def train(
    rank, how="hvd", make=torch.optim.AdamW, tied=False, passes=1, steps=6, clip=False, **options
):
    """Train. Returns the losses as hexadecimal numbers and the digest of all parameters."""
    torch.manual_seed(3 if how == "ddp" else 3 + rank)
    model = Tied() if tied else plain_model()
    optimizer = make(model.parameters(), lr=1e-2)
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
    else:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if how == "later":
            options["model"] = model
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=passes, **options
        )
        assert isinstance(optimizer, make) and type(optimizer).__name__ == make.__name__
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    lines, deferred = [], 0
    for step in range(steps):
        for i in range(passes):
            x, y = batch(tied, passes * step + i, rank)
            quiet = model.no_sync() if how == "ddp" and i < passes - 1 else contextlib.nullcontext()
            with quiet:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
            lines.append(loss.item().hex())
        if clip and how != "ddp":
            optimizer.synchronize()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize() if clip and how != "ddp" else contextlib.nullcontext():
            optimizer.step()
        deferred += how == "later" and len(optimizer._deferred._due)
        scheduler.step()  # deferred steps keep their learning rate
        optimizer.zero_grad()
        if step in (0, 3):  # evaluation uses the newest parameters
            model.eval()
            with torch.inference_mode():
                lines.append(model(batch(tied, 99, 0)[0]).sum().item().hex())
            model.train()
    if how == "later":
        assert deferred, "no step was deferred"
        assert bool(optimizer._deferred._due) == ("num_steps" not in options)
    whole = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
    return lines, hashlib.sha256(whole).hexdigest()


def all_ways(ways, rank):
    return [train(rank, **way) for way in ways]


def close(ours, theirs):
    return [float.fromhex(x) for x in ours] == pytest.approx(
        [float.fromhex(x) for x in theirs], rel=1e-4
    )


def test_two_workers_train_with_the_bits_of_ddp():
    pairs = [
        ({}, {}),
        ({"how": "later"}, {}),
        ({"passes": 2}, {"passes": 2}),
        ({"clip": True}, {"clip": True}),
        ({"make": torch.optim.SGD, "gradient_predivide_factor": 1.0}, {"make": torch.optim.SGD}),
        ({"how": "later", "passes": 2, "num_steps": 6}, {"passes": 2}),
    ]
    ways = [way for ours, theirs in pairs for way in (ours, {**theirs, "how": "ddp"})]
    results = run(2, partial(all_ways, ways))
    for rank in (0, 1):
        assert not isinstance(results[rank], str), results[rank]
        for i, pair in enumerate(pairs):
            assert results[rank][2 * i] == results[rank][2 * i + 1], (rank, pair)
    assert len({lines[0][0][0] for lines in results}) == 2, "every worker has different data"


def test_four_workers_train_as_ddp_to_rounding():
    results = run(
        4,
        partial(all_ways, [{"steps": 5}, {"steps": 5, "how": "later"}, {"steps": 5, "how": "ddp"}]),
    )
    assert not any(isinstance(result, str) for result in results), results
    assert len({ours[1] for ours, _, _ in results}) == 1, "all workers have the same parameters"
    for ours, later, theirs in results:
        assert close(ours[0], theirs[0]) and later == ours


def test_deferred_steps_have_the_same_bits_with_shared_weights():
    ways = [
        {"tied": True, "make": make, "how": how}
        for make in (torch.optim.AdamW, torch.optim.NAdam)
        for how in ("hvd", "later")
    ]
    for results in run(2, partial(all_ways, ways)):
        assert not isinstance(results, str), results
        assert results[0] == results[1] and results[2] == results[3]


def unused(rank):
    """Step with a parameter group that is added late and has no gradient on worker 0."""
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=1.0)
    )
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    x = torch.ones(1, 2)
    (model[0](x) + (model[2](x) if rank else 0)).sum().backward()
    optimizer.step()
    return [p[0, 0].item() for p in model.parameters()]


def test_a_gradient_that_some_workers_lack_counts_as_zero():
    assert run(2, unused) == [[-1.0, 0.0, -0.5]] * 2


# broadcasts


def without_waiting(rank):
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    seen = []
    for _ in range(4 + 3 * rank):  # the number differs between workers
        # the gradient does not depend on the parameters
        (model.weight * (rank + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model.weight[0, 0].item())
    assert hvd.allreduce(torch.ones(1), name="metric").item() == 1.0, (
        "other sums work as before, and all steps are complete"
    )
    with torch.no_grad():
        model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    for wrong in ({"compression": "bf16"}, {"backward_passes_per_step": 2}, {"op": hvd.Sum}):
        with pytest.raises(ConfigError, match="asynchronous"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), **wrong)
    return model.weight.tolist(), seen


def test_asynchronous_training_has_every_workers_changes():
    """w = w0 + all changes, in any order (the published equations 10 and 11)."""
    (first, seen), (second, _) = run(2, without_waiting, rule="accumulate")
    assert first == second == [[1.0 - 0.5 * (4 * 1.0 + 7 * 2.0)] * 3] * 2
    assert all(a > b for a, b in pairwise(seen)), "a worker always sees its own change"


def encoded(rank):
    torch.manual_seed(rank)
    tensor = torch.randn(5000)
    return [
        hvd.allreduce(tensor.clone(), name=f"{compression}", compression=compression, op=hvd.Sum)
        .sum()
        .item()
        for compression in (
            hvd.Compression.none,
            hvd.Compression.bf16,
            hvd.Compression.fp16,
            hvd.Compression.topk(0.9),
        )
    ]


def test_compressed_sums_are_close():
    first, second = run(2, encoded)
    assert first == second and len({*first}) == 4, "each format rounds differently"
    assert first[1:3] == pytest.approx([first[0]] * 2, abs=2.0) and first[3] == pytest.approx(
        first[0], abs=20
    )


def broadcasts(rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + rank, betas=(0.5 + rank / 10, 0.9))
    if rank == 1:  # only the root has a state
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = [
        optimizer.state[p][key].tolist()
        for p in model.parameters()
        for key in sorted(optimizer.state[p])
    ]
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    value = {
        "a": [1, 2.5, None, (True, b"x")],
        3: torch.tensor([rank, 4], dtype=torch.int16),
        "e": torch.empty(0, 2),
    }
    received = hvd.broadcast_object(value if rank == 1 else None, root_rank=1)
    assert received.pop(3).tolist() == [1, 4] and received.pop("e").shape == (0, 2)
    strided = torch.full((3, 2), float(rank)).t()
    assert (hvd.broadcast(strided, 1) == 1).all() and (strided == rank).all()
    assert (hvd.broadcast_(strided, 1) == 1).all() and (strided == 1).all()
    messages = []
    for attempt in (
        lambda: hvd.broadcast_object(object(), root_rank=1),
        lambda: hvd.broadcast_parameters(nn.Linear(3, 2 + rank).state_dict(), root_rank=0),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        messages.append(str(error.value))
    return [p.tolist() for p in model.state_dict().values()], state, group, received, messages


def test_broadcasts_give_every_worker_the_values_of_the_root():
    results = run(2, broadcasts)
    assert not isinstance(results[0], str), results[0]
    assert results[0][:4] == results[1][:4]
    parameters, state, group, received, _ = results[0]
    assert (
        len(state) == 4 * 3
        and group["lr"] == 1.1
        and group["betas"] == (0.6, 0.9)
        and group["foreach"] is None
    )
    assert received == {"a": [1, 2.5, None, (True, b"x")]} and parameters
    for rank in (0, 1):
        assert "worker 1 has a value that cannot be broadcast" in results[rank][4][0]
    assert "another worker" in results[0][4][1] and re.search(r"\[3\].*\[2\]", results[1][4][1])


# errors


def test_calls_before_init_are_refused():
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.broadcast_parameters({}, 0),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)),
    ):
        with pytest.raises(ConfigError, match=r"not initialized[\s\S]*call init\(\) first"):
            call()
    hvd.shutdown()  # a shutdown without init is allowed


def small(make=torch.optim.SGD, **options):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return model, hvd.DistributedOptimizer(make(model.parameters(), lr=0.1), **options)


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


def test_misuse_in_a_loop_is_an_error(alone):
    model, optimizer = small()
    backward(model)
    with pytest.raises(LoopError, match=r"zero_grad\(\) was called during the sums of 4"):
        optimizer.zero_grad()
    with pytest.raises(LoopError, match="skip_synchronize"), optimizer.skip_synchronize():
        optimizer.step()
    with pytest.raises(LoopError, match=r"computed 2 times[\s\S]*after 1"):
        backward(model)
    hvd.shutdown()
    hvd.init(budget="64MiB")
    model, optimizer = small()
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(LoopError, match="changed while it was being summed"):
        optimizer.step()
    handle = hvd.allreduce_async(torch.ones(3), name="a")
    with pytest.raises(LoopError, match="'a' is already being summed"):
        hvd.allreduce(torch.ones(3), name="a")
    hvd.synchronize(handle)
    with pytest.raises(LoopError, match="already synchronized"):
        hvd.synchronize(handle)


def test_a_weight_used_without_its_module_is_an_error(alone):
    """The module was called in the first step but not later, so its update would be too late."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = hvd.CrossBarrier(
        model, torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    backward(model)
    optimizer.step()
    with pytest.raises(LoopError, match="was computed from an old value"):
        nn.functional.linear(torch.ones(1, 2), model[1].weight).sum().backward()


class Counts(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.setdefault("count", 1000) + 1
        return super().step(closure)


def test_unsupported_models_and_options_are_refused(alone):
    model = nn.Embedding(4, 2, sparse=True)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(ConfigError, match="sparse"):
        model(torch.tensor([1])).sum().backward()
    model, optimizer = small()
    other = nn.Linear(2, 1)
    for match, call in {
        "already distributed": lambda: hvd.DistributedOptimizer(optimizer),
        "lacks 1 of the optimizer's 2": lambda: hvd.DistributedOptimizer(
            torch.optim.SGD(other.parameters(), lr=1), [("weight", other.weight)]
        ),
        "repeats a name": lambda: small(named_parameters=[("weight", other.weight)] * 2),
        "staleness": lambda: small(staleness=1),
        "op='median'": lambda: small(op="median"),
        "gradient_predivide_factor": lambda: small(op=hvd.Sum, gradient_predivide_factor=2.0),
        "backward_passes_per_step is 0": lambda: small(backward_passes_per_step=0),
        "needs a closure": lambda: small(torch.optim.LBFGS, model=other),
    }.items():
        with pytest.raises(ConfigError, match=match):
            call()
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(Counts(model.parameters(), lr=1.0), model=model)
    backward(model)
    optimizer.step()
    with pytest.raises(LoopError, match="Counts changes values in its parameter groups"):
        model(torch.ones(1, 2))


def test_a_closure_is_summed_before_the_step(alone):
    model, optimizer = small(torch.optim.LBFGS)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    before = optimizer.step(closure).item()
    assert closure().item() < before


def late(later, failed, rank):
    """Fail a sum because worker 1 does not train; it leaves once the file `failed` exists."""
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model if later else None
    )
    if rank == 1:
        deadline = time.monotonic() + 60
        while not failed.exists():
            assert time.monotonic() < deadline, "the first worker's sum does not fail"
            time.sleep(0.02)
        return None
    backward(model)
    try:
        with pytest.raises(DeadlineError) as error:
            optimizer.step()
            assert later
            model(torch.ones(1, 2))
    finally:
        failed.touch()
    optimizer._deferred = None  # shutdown() would raise the error again
    return error.value.__notes__


@pytest.mark.parametrize("later", [False, True])
def test_a_failed_sum_raises_its_own_error(later, tmp_path):  # Rule 5
    (note,), nothing = run(2, partial(late, later, tmp_path / "failed"), deadline_s=1)
    assert (
        re.fullmatch("while waiting for 'gradient of group 0 parameter [01]'", note)
        and nothing is None
    )


def test_shutdown_applies_deferred_steps(alone):
    model = nn.Linear(2, 1)
    before = model.weight.tolist()
    optimizer = hvd.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=1.0))
    backward(model)
    optimizer.step()
    assert model.weight.tolist() == before
    hvd.shutdown()
    assert model.weight.tolist() == (torch.tensor(before) - 1).tolist()
    with pytest.raises(ConfigError, match="after shutdown"):
        backward(model)


def times_out():
    raise RuntimeError("[gloo/unbound_buffer.cc:82] Timed out waiting 2000ms for recv operation")


def test_a_late_sum_of_torch_raises_a_typed_error(alone, monkeypatch):  # Rule 5
    work = SimpleNamespace(wait=times_out, is_completed=bool)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: work)
    with pytest.raises(
        DeadlineError, match=r"the sum of a float64 \[3\] failed after .* Timed"
    ) as e:
        hvd.allreduce(torch.ones(3, dtype=torch.float64), name="wide")
    assert e.value.__notes__ == ["while waiting for 'wide'"]
