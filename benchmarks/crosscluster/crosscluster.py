"""Train in the lab over two clusters, and compare roadtrain with torch's DistributedDataParallel
and torch's pipeline. The fast networks of the two clusters cannot reach each other.

Each cluster has two hosts, which run one process each on 0.4 CPUs. One cluster has 800 Mbit/s
"InfiniBand", the other has 600 Mbit/s "RoCE", and 50 Mbit/s "Ethernet" joins all hosts. As in Yang
et al. (Holmes), a pipeline spans the clusters, and each stage is data parallel inside its cluster.
The rates of links count whole Ethernet frames, and reported bytes are TCP payload. Needs root. Does
NOT emulate latency.

    --only ITEM,..
    environments  the same layout with InfiniBand, RoCE or Ethernet alone, and with the two clusters
                  described above
    throttled     one cluster's CPUs at 60 %
    overlap       the optimizer overlapped with the step, compared with the optimizer after the step
    predicted     measured steps of the items above, compared with the simulator's predictions
    losses        losses of 39 parallelisms, compared with those of one process
    broken        the preflight's errors for eight broken set-ups
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.report import Report, Row, at_least, at_most, within
from benchmarks.common.rows import row
from benchmarks.crosscluster import broken as crosscluster_broken
from benchmarks.crosscluster import losses as crosscluster_losses
from benchmarks.crosscluster.lab import CPUS, ENVIRONMENTS, HYBRID
from benchmarks.crosscluster.model import Batch, ModelSize
from benchmarks.crosscluster.predicted import host_costs, predictions
from benchmarks.crosscluster.runs import Bench, Run, Setting
from benchmarks.crosscluster.traffic import sent_by_nics
from roadtrain.errors import ConfigError
from roadtrain.lab import cpus_available, network_available

SLOWED = 0.6  # of a throttled cluster's CPUs
DDP, TORCH = "torch DDP over Ethernet", "torch 1F1B over Ethernet"


ITEMS = ("environments", "throttled", "overlap", "predicted", "losses", "broken")


def run(quick: bool = False, only: Sequence[str] = ()) -> Report:
    if (why := network_available() or cpus_available()) is not None:
        raise ConfigError(f"the clusters cannot be emulated on this machine: {why}")
    size = ModelSize(layers=4, hidden=128, inner=256) if quick else ModelSize()
    batch = Batch(rows=8, sequence=32, microbatches=4) if quick else Batch()
    items = only or ITEMS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        bench = Bench(Setting(size, batch, 1 if quick else 3, Path(name)))
        # Measured before the runs: predictions are based on two otherwise idle hosts.
        costs = host_costs(size, batch, Path(name) / "costs") if "predicted" in items else None
        if "environments" in items:
            rows += four_environments(bench)
        if "throttled" in items:
            rows += throttled_cluster(bench)
        if "overlap" in items:
            rows += overlapped_optimizer(bench)
        if costs is not None:
            if not bench.runs:
                list(four_environments(bench))
            rows += predictions(bench.runs, costs)
    if "losses" in items:
        rows += crosscluster_losses.rows(quick)
    if "broken" in items:
        rows += crosscluster_broken.rows()
    return Report("crosscluster", rows)


def four_environments(bench: Bench) -> Iterator[Row]:
    """Run item `environments`: the same layout on InfiniBand, on RoCE, on Ethernet, and with a
    different fast network in each cluster.
    """
    plain = bench.peer("plain data parallel", "ddp")
    torchs = bench.peer("torch's pipeline", "torch_pipeline")
    runs = {name: bench.ours(name, environment) for name, environment in ENVIRONMENTS.items()}
    for name, got in runs.items():
        yield _faster(got, plain, DDP, 2.5 if name == HYBRID.name else None)
        yield _faster(got, torchs, TORCH)
    hybrid = runs[HYBRID.name]
    share = hybrid.samples_per_s / runs["all RoCE"].samples_per_s
    metric = "of all RoCE's samples a second"
    yield Row(hybrid.case, metric, "", share, **at_least(share, 0.85))
    yield Row(hybrid.case, "loss of the last step", "", hybrid.measured.losses[-1])
    apart = crosscluster_losses.worst_difference(hybrid.measured.losses, plain.measured.losses)
    metric = "largest relative difference of losses to DDP's"
    goal = at_most(apart, crosscluster_losses.WITHIN)
    yield Row(hybrid.case, metric, "", apart, **goal)
    for got in runs.values():
        yield from _bytes(got)


def _bytes(run: Run) -> Iterator[Row]:
    """Compare the payload bytes that each NIC sent with the bytes that the plan predicts."""
    stages = run.measured.results[0]["stages"]
    planned = sent_by_nics(run.spec, run.environment, stages)
    hosts = list(run.measured.traffic)
    for (rank, nic), figure in sorted(planned.items()):
        got = run.measured.traffic[hosts[rank]][nic].sent
        metric, ratio = f"sent a step by {hosts[rank]}'s eth{nic}", got / figure
        goal = within(ratio, 0.02)
        yield Row(run.case, metric, "MB", got / 1e6, figure / 1e6, "the plan", ratio, **goal)


def throttled_cluster(bench: Bench) -> Iterator[Row]:
    """Run item `throttled`: the hosts of the second cluster have only 60 % of their usual CPUs."""
    cpus = (CPUS, SLOWED * CPUS)
    runs = {
        how: bench.ours(f"second cluster at 60 %, {how} stages", cpus=cpus, stages=how)
        for how in ("even", "paper", "measured")
    }
    got, uniform = runs["measured"], runs["even"]
    yield _faster(got, uniform, "uniform stages", 1.15)
    yield _faster(got, runs["paper"], "the paper's formula")
    for how, run in runs.items():
        stages = run.measured.results[0]["stages"]
        yield Row(got.case, f"layers of the first stage, {how}", "", float(stages[0]))


def overlapped_optimizer(bench: Bench) -> Iterator[Row]:
    """Run item `overlap`: the optimizer either overlaps with the step or runs after it, and
    gradients go over Ethernet.
    """
    ethernet = ENVIRONMENTS["all Ethernet"]
    batch = replace(bench.setting.batch, microbatches=2)
    on, off = (
        bench.ours(f"all Ethernet, 2 micro-batches, {what}", ethernet, batch=batch, overlap=how)
        for what, how in (("overlapped optimizer", True), ("optimizer after the step", False))
    )
    yield _faster(on, off, "without overlap", 1.1)


def _faster(got: Run, peer: Run, name: str, least: float | None = None) -> Row:
    ours, beside = got.samples_per_s, (peer.samples_per_s, name)
    goal = None if least is None else f"ratio >= {least:g}"
    return row(got.case, "samples", "1/s", ours, beside, goal=goal, more_is_better=True)
