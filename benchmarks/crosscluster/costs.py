"""Measure the costs of the lab's hosts before the runs of `crosscluster`: the seconds of a layer,
of everything outside layers and of an update, and the processor seconds per byte sent.

Uses two otherwise idle hosts of one cluster. Does NOT measure pipelines, stages or the slow
network.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from benchmarks.common.children import go_on, pause, running, wait_for_all
from benchmarks.common.gloo import start_gloo
from benchmarks.crosscluster.lab import CPUS, RUN_S, START_CPUS, START_S
from benchmarks.crosscluster.model import Batch, ModelSize, RunSpec, next_token_loss
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
    hosts = [network.hosts[name] for name in HOSTS]
    specs = [
        RunSpec("costs", size, batch, master=f"{HOSTS[0]}-eth0", interface="eth0")
        for batch in batches
    ]
    for host in hosts:
        host.set_cpus(START_CPUS)
    each = [{"rank": rank, "specs": specs} for rank in range(len(hosts))]
    with running(measured, each, home, hosts=hosts) as processes:
        wait_for_all(processes, "imported", START_S)
        for host in hosts:
            host.set_cpus(CPUS)
        go_on(processes)
        found = processes[0].wait_for("result", RUN_S)
    layer, ends = ({int(rows): s for rows, s in found[what].items()} for what in ("layer", "ends"))
    return HostCosts(**{**found, "layer": layer, "ends": ends})


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


def measured(rank: int, specs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Measure the costs in one of two processes, for each of `specs`. Returns the fields of
    HostCosts on rank 0, and None on rank 1.
    """
    torch.set_num_threads(1)
    pause("imported")
    return _measured(rank, [RunSpec.of(spec) for spec in specs])


def _measured(rank: int, specs: Sequence[RunSpec]) -> dict[str, Any] | None:
    start_gloo(rank, len(HOSTS), specs[0].master, specs[0].port, specs[0].interface)
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
    costs = HostCosts(layer, ends, median(ratios), update_s(fewer, specs[0].batch), touch)
    return dataclasses.asdict(costs)
