"""Gradients sent in 16 bits (`grad_dtype`) give the bits of a plain loop with rounded gradients on
every route (Rules 1 and 2) and take half the bytes."""

import hashlib
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import roadtrain
from roadtrain import Downcast, Servers
from roadtrain.config.job import make_job
from roadtrain.errors import ConfigError
from roadtrain.kernels.sum import sum_squares
from roadtrain.servers import frames as m
from roadtrain.servers.remote_server import RemoteServer
from roadtrain.streaming.split import split, table
from roadtrain.training import verify
from roadtrain.training.placed_job import place_job
from tests.support.models import Case, build, new_scaler, one_step
from tests.support.processes import Workers, losses

STEPS = 4
BF16, FP16 = torch.bfloat16, torch.float16
PLAIN = Case(sgd=True)
ALL = Case(sgd=True, clip=0.5, accumulate=2, groups=True)
SMALL = {1: 25 << 20, 2: 34 << 20}  # leaves a worker gradient buffers for four chunks


def downcast(dtype):
    return None if dtype is None else Downcast({BF16: "bf16", FP16: "fp16"}[dtype])


class Skipped:
    """An optimizer that does nothing: gradients add up."""

    param_groups: list = []

    def step(self, *_): ...

    def zero_grad(self): ...


def squares(chunk_table, grads):
    """Return name -> sum of squares, added over the segments of each flat chunk as servers do."""
    sums = Counter()
    for chunk in chunk_table.trainable:
        flat = np.zeros(chunk.numel, np.float32)
        for span in chunk.spans:
            part = grads[chunk_table.params[span.param].name].flatten().numpy()
            flat[span.start : span.stop] = part[span.origin : span.origin + span.stop - span.start]
        for param, a, b in chunk.segments:
            sums[chunk_table.params[param].name] += sum_squares(flat[a:b], "fp32")
    return sums


def plain(case, workers, dtype):
    """Train in torch alone, except for the order in which a norm is summed.

    Every gradient is rounded as soon as a backward pass has computed it; the rest is fp32. The root
    block of a single worker stays in torch until step() sends it, so it is rounded once.
    """
    model, optimizer = build(case)
    params, scaler = dict(model.named_parameters()), new_scaler(case)
    late = {n for n in params if workers == 1 and not n.startswith("layers.")}
    for name, p in params.items():
        if name not in late:
            p.register_hook(lambda grad: grad.to(dtype).float())
    chunk_table = table(split(model, None), dict.fromkeys(params.values(), 0), None, 1 << 16)
    loss_lists = [[] for _ in range(workers)]
    for step in range(STEPS):
        total = {}
        for rank in range(workers):
            seed = 1000 + step * workers + rank
            loss = one_step(replace(case, clip=None), model, Skipped(), scaler, step, seed=seed)
            loss_lists[rank].append(loss)
            for name, p in params.items():
                total[name] = p.grad if rank == 0 else total[name] + p.grad
                p.grad = None
        mean = {name: grad / workers for name, grad in total.items()}
        if case.clip is not None:
            sums = squares(chunk_table, mean)
            norms = [
                torch.linalg.vector_norm(mean[n]) if n in late else torch.tensor(math.sqrt(sums[n]))
                for n in params
            ]
            factor = torch.clamp(
                case.clip / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0
            )
            assert factor < 1
            mean = {name: grad * factor for name, grad in mean.items()}
        for name, p in params.items():
            p.grad = mean[name].to(dtype).float() if name in late else mean[name]
        optimizer.step()
        optimizer.zero_grad()
    whole = hashlib.sha256(
        b"".join(params[n].detach().numpy().tobytes() for n in sorted(params))
    ).hexdigest()
    logs = [
        {str(i + 1): {f"{loss.hex()} {(0.0).hex()}"} for i, loss in enumerate(worker_losses)}
        for worker_losses in loss_lists
    ]
    logs[0]["end"] = {whole}
    return logs


def trained(case, servers, home, workers, **options):
    home.mkdir(exist_ok=True)
    running = Workers(
        case, [h.where for h in servers], home, STEPS, workers, norms=False, **options
    )
    assert running.join() == [0] * workers, running.errors()
    return [losses(log) for log in running.logs], running.notes()


@pytest.mark.parametrize(
    ("case", "workers", "servers", "dtype", "options"),
    [
        (replace(PLAIN, eager=True), 1, 2, FP16, {}),
        pytest.param(ALL, 1, 1, BF16, {"relay": "96MiB"}, marks=pytest.mark.exhaustive),
        (replace(ALL, clip=None, eager=True), 2, 1, BF16, {}),
        pytest.param(ALL, 2, 2, FP16, {}, marks=pytest.mark.exhaustive),
        (ALL, 2, 2, BF16, {"relay": "96MiB", "local": 2}),
        (ALL, 2, 2, BF16, {"replicas": 2}),
    ],
    ids=str,
)
def test_training_has_the_bits_of_plain_torch_with_rounded_gradients(
    case, workers, servers, dtype, options, hosts, tmp_path
):
    loss_logs, notes = trained(
        case, hosts(servers), tmp_path, workers, compress=downcast(dtype), **options
    )
    assert loss_logs == plain(case, workers, dtype)
    assert f"lossy: gradients travel as {'bf16' if dtype == BF16 else 'fp16'}" in notes  # Rule 2


@pytest.mark.parametrize("workers", [1, 2])
def test_spilled_gradients_are_rounded_alike(workers, hosts, tmp_path):
    (host,) = hosts(1, budget=SMALL[workers], fault=("spills",))
    running = Workers(
        ALL, [host.where], tmp_path, STEPS, workers, norms=False, compress=Downcast("bf16")
    )
    assert running.join() == [0] * workers, running.errors()
    assert "spilled a gradient" in host.log.read_text(), "a smaller budget"
    assert [losses(log) for log in running.logs] == plain(ALL, workers, BF16)


def test_late_gradients_are_rounded_alike(hosts, tmp_path):
    """With staleness 1 and gradients that arrive before their step is due, the losses do not depend
    on the number of servers, and differ from those in fp32."""
    case, results = Case(eager=True, staleness=1, groups=True), []
    for i, (n, budget, dtype) in enumerate(
        [(1, SMALL[2], BF16), (2, 96 << 20, BF16), (1, 96 << 20, None)]
    ):
        results.append(
            trained(case, hosts(n, budget=budget), tmp_path / str(i), 2, compress=downcast(dtype))[
                0
            ]
        )
    assert results[0] == results[1] != results[2]


def test_gradients_of_16_bit_parameters_are_sent_unchanged(hosts, tmp_path):
    case = Case(dtype=BF16, eager=True)
    first, second = (
        trained(case, hosts(1), tmp_path / str(dtype), 2, compress=downcast(dtype))[0]
        for dtype in (None, FP16)
    )
    assert first == second


def test_a_downcast_halves_the_bytes_sent(hosts, monkeypatch):
    pushed = Counter()
    post = RemoteServer._post

    def counted(self, kind, header, parts, sent=None, **options):
        parts = [*parts]
        if kind == m.PUSH:
            pushed[len(pushed_by)] += sum(map(len, parts))
        post(self, kind, header, parts, sent, **options)

    monkeypatch.setattr(RemoteServer, "_post", counted)
    pushed_by = []
    for dtype in (None, BF16):
        model, optimizer = build(PLAIN)
        with roadtrain.place(
            model,
            optimizer,
            store=Servers([hosts(1)[0].where]),
            compress=downcast(dtype),
            host_budget="96MiB",
            report=lambda _: None,
        ) as placed:
            for i in range(2):
                one_step(PLAIN, model, placed, new_scaler(PLAIN), i)
            pushed_by.append(pushed[len(pushed_by)])
    whole, narrow = pushed_by
    assert narrow * 2 == whole >= 2 * sum(4 * p.numel() for p in model.parameters())


def test_a_downcast_without_servers_is_refused():
    model, optimizer = build(PLAIN)
    message = r"Downcast\('bf16'\) has no effect without servers"
    with pytest.raises(ConfigError, match=message) as caught:
        roadtrain.place(model, optimizer, report=lambda _: None, compress=Downcast("bf16"))
    assert "hint: " in str(caught.value)


def test_a_job_reports_its_downcast_and_verify_compares_everything(hosts, tmp_path):
    """The key reaches place(). The servers of verify run in its own process, so it sends no
    gradient and reports no loss of precision."""
    text = tmp_path / "text.txt"
    text.write_text("Is it the same? " * 2000)
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    job = make_job(
        {
            "model": {"config": config},
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "data": {"paths": [str(text)], "seq_len": 16, "batch_size": 2},
            "servers": {"addresses": [hosts(1)[0].where], "buffering": "none"},
            "budget": {"host": "128MiB"},
            "compress": {"downcast": "bf16"},
        }
    )
    lines = []
    place_job(job, lines.append).optimizer.close()
    assert "lossy: gradients travel as bf16" in lines
    lines.clear()
    assert verify.verify(job, 2, lines.append)
    assert sum("are bit-identical" in line for line in lines) == 2
    assert not any("lossy" in line for line in lines)
