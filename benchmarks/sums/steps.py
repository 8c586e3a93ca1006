"""Item `steps` of `summation`: whole training steps over emulated links. DDP's own all-reduce
(gloo) is compared with two uses of the summation service: a communication hook of DDP, and an
optimizer that lets the next forward start while gradients are still in flight, with and without
priorities. Needs root.

All losses must agree to rounding. The time of a step is measured on the slowest worker, as the
median of four steps.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.children import run_children
from benchmarks.common.gloo import start_gloo
from benchmarks.common.report import Row
from benchmarks.common.rows import row
from benchmarks.sums.lab import ONE_THREAD, hosts_of, lab, spare_hosts
from roadtrain.errors import RoadtrainError
from roadtrain.integrations import horovod as hvd
from roadtrain.integrations.ddp import Summation, sum_hook
from roadtrain.lab import CARRIED, Network
from roadtrain.sums.protocol.shares import busiest, optimum
from roadtrain.sums.tensor_sums import TensorSum

TIMEOUT_S, STEPS = 300, 4
WAYS = ("ddp", "hook", "hvd", "later", "later, no priorities")
MODELS = {  # width, layers, batch, repetitions; bytes/s of the links
    "heavy in parameters": (2048, 4, 64, 1, 50e6),
    "heavy in compute": (512, 4, 512, 8, 50e6),
    "heavy in both": (1024, 8, 1024, 1, 12.5e6),  # where the next forward can hide communication
}


class Net(nn.Module):
    def __init__(self, width: int, layers: int, times: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(self.times):
                x = torch.tanh(layer(x))
        return x


class _EqualPriority(Summation):
    """A Summation that ignores the priorities of its sums."""

    def sum(self, *words: Any, priority: int = 0, **options: Any) -> TensorSum:
        return super().sum(*words, **options)


def rows(n: int, k: int, quick: bool) -> list[Row]:
    out = []
    for name, (width, layers, batch, times, rate) in [*MODELS.items()][: 2 if quick else 3]:
        nbytes = 4 * layers * (width * width + width)
        with lab([rate] * n, [rate] * k) as network:
            found = {way: steps_of(network, n, k, way, name, 2 if quick else STEPS) for way in WAYS}
        losses = {way: result["loss"] for way, result in found.items()}
        if any(abs(loss / losses["ddp"] - 1) > 1e-4 for loss in losses.values()):
            raise RoadtrainError(
                f"the losses of the compared ways to train differ by more than rounding: {losses}"
            )
        took = {way: result["seconds"] for way, result in found.items()}
        case = (
            f"{n} workers, {k} spare hosts, {8 * rate / 1e6:g} Mbit/s, {name} ({nbytes / 1e6:.0f}"
            f" MB, {layers} layers {times} times, batch {batch})"
        )
        workers, spares = [rate] * n, [rate] * k
        floor = busiest(workers, spares, optimum(workers, spares)) * nbytes / CARRIED
        alone = found["ddp"]["alone"]
        print(
            f"{case}: "
            + ", ".join(f"{way} {seconds:.2f} s" for way, seconds in took.items())
            + f"; an exchange at least {floor:.2f} s, a step without it {alone:.2f} s",
            flush=True,
        )
        gloo = "DDP's all-reduce over gloo"
        peers = [
            ("hook", "ddp", gloo),
            ("hvd", "ddp", gloo),
            ("later", "ddp", gloo),
            ("later", "later, no priorities", "the same without priorities"),
        ]
        for way, peer, name_of_peer in peers:
            out.append(row(case, f"a step, {way}", "s", took[way], (took[peer], name_of_peer)))
        out.append(Row(case, "a step without any exchange", "s", alone))
    return out


def steps_of(
    network: Network, n: int, k: int, way: str, model: str, steps: int
) -> dict[str, float]:
    hosts = hosts_of(network, "w", n)
    with (
        tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name,
        spare_hosts(network, 0 if way == "ddp" else k, "1GiB", Path(name)) as spares,
    ):
        how = {
            "workers": n,
            "master": hosts[0].address,
            "spares": [spare.address for spare in spares],
            "token": f"{name}/token",
            "how": way,
            "model": model,
            "steps": steps,
        }
        each = [{"rank": rank, **how} for rank in range(n)]
        found = run_children(worker, each, hosts=hosts, envs=[ONE_THREAD] * n, within_s=TIMEOUT_S)
    return {
        "seconds": median(max(result["seconds"][i] for result in found) for i in range(steps)),
        "alone": median(max(result["alone"][i] for result in found) for i in range(steps)),
        "loss": sum(result["loss"] for result in found) / n,
    }


# a worker process


def worker(
    rank: int,
    workers: int,
    master: str,
    spares: Sequence[str],
    token: str,
    how: str,
    model: str,
    steps: int,
) -> dict[str, Any]:
    os.environ |= {
        "MASTER_ADDR": master,
        "MASTER_PORT": "29544",
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    torch.set_num_threads(1)
    width, layers, batch, times, _ = MODELS[model]
    start_gloo(rank, workers, master)
    torch.manual_seed(0)
    net: nn.Module = Net(width, layers, times)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    state = None
    if how in ("ddp", "hook"):
        parallel = DistributedDataParallel(net)
        if how == "hook":
            state = Summation(spares=spares, token=token)
            parallel.register_comm_hook(state, sum_hook)
        net = parallel
    else:
        if how.endswith("no priorities"):
            hvd.Summation = _EqualPriority  # type: ignore[misc]
        hvd.init(spares=spares, token=token)
        later = net if how.startswith("later") else None
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), model=later)
    torch.manual_seed(1 + rank)
    x, y = torch.randn((batch, width)), torch.randn((batch, width))
    try:
        return _train(net, optimizer, x, y, steps, alone=how == "ddp")
    finally:
        if state is not None:
            state.close()
        hvd.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(
    model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, steps: int, *, alone: bool
) -> dict[str, Any]:
    """Train, and return the seconds of each step and the last loss. If `alone`, also measure the
    same work without exchange, on all workers at once.
    """
    seconds, loss = [], torch.zeros(())
    for _ in range(steps + 2):
        begin = perf_counter()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(perf_counter() - begin)
    plain, without = getattr(model, "module", model), [0.0] * steps
    for i in range(steps if alone else 0):
        dist.barrier()
        begin = perf_counter()
        nn.functional.mse_loss(plain(x), y).backward()
        without[i] = perf_counter() - begin
    return {"seconds": seconds[2:], "alone": without, "loss": loss.item()}
