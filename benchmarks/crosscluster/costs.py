"""Measure the costs of the lab's hosts before the runs of `crosscluster`: the seconds of a layer,
of everything outside layers and of an update, and the processor seconds per byte sent.

    python -m benchmarks.crosscluster.costs RANK SPEC.json...      (one of the two processes)

Uses two otherwise idle hosts of one cluster. Does NOT measure pipelines, stages or the slow
network.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from benchmarks.crosscluster.lab import CPUS, START_CPUS
from benchmarks.crosscluster.model import Batch, ModelSize, RunSpec, next_token_loss
from roadtrain.errors import RoadtrainError
from roadtrain.lab import Network
from roadtrain.stages.data_group import DataGroup
from roadtrain.stages.sharded_optimizer import ShardedOptimizer

TIMES = 5
SENT = 4 << 20  # elements sent each way
FP32 = 4
LEAST_S = 1e-6  # lower bound of a layer's seconds, against clock jitter
HOSTS = ("a0", "a1")


@dataclass(frozen=True)
class HostCosts:
    """Measured costs of a host that has 0.4 processors. `layer`: maps the number of rows in a
    micro-batch to the seconds of one layer's forward. `ends`: maps the number of rows to the
    seconds of the forward of everything outside layers.
    """

    layer: dict[int, float]
    ends: dict[int, float]
    backward: float  # seconds of a backward over those of its forward
    update: float  # seconds per parameter
    touch: float  # seconds per byte sent, and per byte received


def measure_costs(
    network: Network, size: ModelSize, batches: Sequence[Batch], home: Path
) -> HostCosts:
    """Measure the costs on the hosts a0 and a1, connected by their first NICs. `home`: directory
    for temporary files.
    """
    home.mkdir(parents=True, exist_ok=True)
    hosts = [network.hosts[name] for name in HOSTS]
    for batch in batches:
        spec = RunSpec("costs", size, batch, master=f"{HOSTS[0]}-eth0", interface="eth0")
        spec.write(home / f"rows{batch.micro_rows}.json")
    specs = [str(home / f"rows{batch.micro_rows}.json") for batch in batches]
    processes: list[subprocess.Popen[str]] = []
    for rank, host in enumerate(hosts):
        host.set_cpus(START_CPUS)
        words = [sys.executable, "-m", "benchmarks.crosscluster.costs", str(rank), *specs]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(host.run(words, **pipes, text=True))
    try:
        for process in processes:
            _line(process, "imported")
        for process, host in zip(processes, hosts):
            host.set_cpus(CPUS)
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = json.loads(_line(processes[0], "costs"))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    layer, ends = ({int(rows): s for rows, s in found[what].items()} for what in ("layer", "ends"))
    return HostCosts(**{**found, "layer": layer, "ends": ends})


def _line(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        word, _, rest = line.partition(" ")
        if word.strip() == what:
            return rest
    raise RoadtrainError(
        f"a process that measures the lab ended early with exit code {process.wait()}"
    )


# in a measuring process


def took(work: Callable[[], Any]) -> float:
    then = time.perf_counter()
    work()
    return time.perf_counter() - then


def passes(size: ModelSize, batch: Batch) -> tuple[float, float]:
    """Measure (forward seconds, backward seconds) of one micro-batch through the whole model."""
    model, tokens = size.build(), batch.micros(0, size.vocabulary)[0]
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(model.parameters()), None)
    optimizer.begin_step(TIMES + 1)
    forward, backward = list[float](), list[float]()
    for _ in range(TIMES + 1):
        then = time.perf_counter()
        loss = next_token_loss(model(tokens).logits, tokens)
        between = time.perf_counter()
        loss.backward()
        forward.append(between - then)
        backward.append(time.perf_counter() - between)
    optimizer.step()
    optimizer.close()
    return median(forward[1:]), median(backward[1:])


def update_s(size: ModelSize, batch: Batch) -> float:
    """Measure the seconds per parameter that an update takes on a stage with one rank."""
    model, tokens = size.build(), batch.micros(0, size.vocabulary)[0]
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(model.parameters()), None)
    seconds = []
    for _ in range(TIMES + 1):
        optimizer.begin_step(1)
        next_token_loss(model(tokens).logits, tokens).backward()

        def step() -> None:
            optimizer.step()
            optimizer.wait_parameters()

        seconds.append(took(step))
    optimizer.close()
    return median(seconds[1:]) / sum(p.numel() for p in model.parameters())


def touch_s() -> float:
    """Measure the processor seconds of this process per byte sent or received, including the
    addition of received gradients.
    """
    group = DataGroup(distributed.group.WORLD, torch.device("cpu"))
    own, other = torch.zeros(2 * SENT), torch.zeros(2 * SENT)
    seconds = []
    for _ in range(TIMES + 1):
        then = time.process_time()
        if (pending := group.reduce_scatter(own, other)) is not None:
            pending.wait()
        group.sum_arrived(own, other)
        seconds.append(time.process_time() - then)
    return median(seconds[1:]) / (2 * SENT * FP32)


def measured(rank: int, specs: Sequence[RunSpec]) -> HostCosts | None:
    """Measure the costs in one of two processes, for each of `specs`. Returns the costs on rank 0,
    and None on rank 1.
    """
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{specs[0].master}:{specs[0].port}",
        rank=rank,
        world_size=len(HOSTS),
        timeout=timedelta(seconds=300),
    )
    touch = touch_s() / CPUS  # a host with CPUS processors takes so much longer
    if rank:
        return None
    layer, ends, ratios, size = dict[int, float](), dict[int, float](), [], specs[0].model
    fewer = dataclasses.replace(size, layers=size.layers // 2)
    for spec in specs:
        rows = spec.batch.micro_rows
        whole, half = passes(size, spec.batch), passes(fewer, spec.batch)
        more = (whole[0] - half[0]) / (size.layers - fewer.layers)
        layer[rows] = min(max(more, LEAST_S), whole[0] / size.layers)
        ends[rows] = max(0.0, whole[0] - size.layers * layer[rows])
        ratios.append(whole[1] / whole[0])
    return HostCosts(layer, ends, median(ratios), update_s(fewer, specs[0].batch), touch)


def main() -> None:
    rank, *paths = sys.argv[1:]
    torch.set_num_threads(1)
    print("imported", flush=True)
    sys.stdin.readline()
    found = measured(int(rank), [RunSpec.read(Path(path)) for path in paths])
    if found is not None:
        print("costs", json.dumps(dataclasses.asdict(found)), flush=True)
    sys.stdin.readline()  # until the parent kills this process


if __name__ == "__main__":
    main()
