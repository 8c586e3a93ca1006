"""Item `steps` of `summation`: whole training steps over emulated links. DDP's own all-reduce
(gloo) is compared with two uses of the summation service: a communication hook of DDP, and an
optimizer that lets the next forward start while gradients are still in flight, with and without
priorities. Needs root.

All losses must agree to rounding. The time of a step is measured on the slowest worker, as the
median of four steps.

    python -m benchmarks.sums.steps --rank 0 --workers 4 --master A --spares A:P,..
    --token F --how ddp ..
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.report import Row
from roadtrain.errors import RoadtrainError
from roadtrain.integrations import horovod as hvd
from roadtrain.integrations.ddp import Summation, sum_hook
from roadtrain.lab import CARRIED, LabNic, Network
from roadtrain.sums.protocol.shares import busiest, optimum
from roadtrain.sums.tensor_sums import TensorSum
from roadtrain.transport.address import write_token

PORT, TIMEOUT_S, STEPS = 7400, 300, 4
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
        hosts = {f"w{i}": [LabNic(rate)] for i in range(n)} | {
            f"s{i}": [LabNic(rate)] for i in range(k)
        }
        with Network(hosts) as network:
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
        out += [
            Row(
                case,
                f"a step, {way}",
                "s",
                took[way],
                took[peer],
                words,
                took[peer] / took[way],
                None,
                None,
                None,
            )
            for way, peer, words in peers
        ]
        out.append(
            Row(case, "a step without any exchange", "s", alone, None, None, None, None, None, None)
        )
    return out


def steps_of(
    network: Network, n: int, k: int, way: str, model: str, steps: int
) -> dict[str, float]:
    addresses = [network.hosts[f"w{i}"].address for i in range(n)]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roadtrain-bench-")))
        write_token(home / "token")
        spares = []
        for i in range(k if way != "ddp" else 0):
            host = network.hosts[f"s{i}"]
            spares.append(f"{host.address}:{PORT}")
            _run(
                stack,
                host,
                [
                    "roadtrain.cli",
                    "serve",
                    spares[-1],
                    "--sum",
                    "--budget",
                    "1GiB",
                    "--token-file",
                    str(home / "token"),
                ],
                stdout=subprocess.DEVNULL,
            )
        workers = [
            _run(
                stack,
                network.hosts[f"w{rank}"],
                [
                    "benchmarks.sums.steps",
                    "--rank",
                    str(rank),
                    "--workers",
                    str(n),
                    "--master",
                    addresses[0],
                    "--spares",
                    ",".join(spares),
                    "--token",
                    str(home / "token"),
                    "--how",
                    way,
                    "--model",
                    model,
                    "--steps",
                    str(steps),
                    "--json",
                    str(home / f"{rank}.json"),
                ],
            )
            for rank in range(n)
        ]
        for process in workers:
            if process.wait(TIMEOUT_S):
                raise RoadtrainError(
                    f"a worker of {way!r} ended with exit code {process.returncode}"
                )
        found = [json.loads((home / f"{rank}.json").read_text()) for rank in range(n)]
    return {
        "seconds": median(max(worker["seconds"][i] for worker in found) for i in range(steps)),
        "alone": median(max(worker["alone"][i] for worker in found) for i in range(steps)),
        "loss": sum(worker["loss"] for worker in found) / n,
    }


def _run(
    stack: ExitStack, host: Any, words: Sequence[str], **options: Any
) -> subprocess.Popen[Any]:
    process: subprocess.Popen[Any] = host.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        **options,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


# a worker process


def worker(args: argparse.Namespace) -> dict[str, Any]:
    os.environ |= {
        "MASTER_ADDR": args.master,
        "MASTER_PORT": "29544",
        "RANK": str(args.rank),
        "WORLD_SIZE": str(args.workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    torch.set_num_threads(1)
    width, layers, batch, times, _ = MODELS[args.model]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = Net(width, layers, times)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {
        "spares": [spare for spare in args.spares.split(",") if spare],
        "token_file": args.token,
    }
    state = None
    if args.how in ("ddp", "hook"):
        parallel = DistributedDataParallel(model)
        if args.how == "hook":
            state = Summation(**options)
            parallel.register_comm_hook(state, sum_hook)
        model = parallel
    else:
        if args.how.endswith("no priorities"):
            hvd.Summation = _EqualPriority  # type: ignore[misc]
        hvd.init(**options)
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            model=model if args.how.startswith("later") else None,
        )
    try:
        return _train(model, optimizer, args, (batch, width))
    finally:
        if state is not None:
            state.close()
        hvd.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(
    model: nn.Module, optimizer: Any, args: argparse.Namespace, shape: tuple[int, int]
) -> dict[str, Any]:
    torch.manual_seed(1 + args.rank)
    x, y = torch.randn(shape), torch.randn(shape)
    seconds, loss = [], torch.zeros(())
    for _ in range(args.steps + 2):
        begin = perf_counter()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(perf_counter() - begin)
    alone, plain = [], getattr(model, "module", model)
    if args.how == "ddp":  # the same work without exchange, on all workers at once
        for _ in range(args.steps):
            dist.barrier()
            begin = perf_counter()
            nn.functional.mse_loss(plain(x), y).backward()
            alone.append(perf_counter() - begin)
    return {"seconds": seconds[2:], "alone": alone or [0.0] * args.steps, "loss": loss.item()}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, kind in (
        ("rank", int),
        ("workers", int),
        ("master", str),
        ("spares", str),
        ("token", str),
        ("how", str),
        ("model", str),
        ("steps", int),
        ("json", str),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    args = parser.parse_args(argv)
    Path(args.json).write_text(json.dumps(worker(args)))


if __name__ == "__main__":
    main(sys.argv[1:])
