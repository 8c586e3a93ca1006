"""Measure training steps of several worker hosts over emulated links: roadtrain with two placements
of its servers, compared with FSDP2 over gloo.

In placement `host`, a server runs on each worker's host. In placement `network`, there are as many
servers as workers, each on a host of its own.

The floor of a step is the bytes that must cross the busier direction of a link, divided by the rate
B of that direction. With S bytes of bf16 parameters and four workers, the floor is 1.5 S/B in
`host` and S/B in `network`. Needs root. Does NOT emulate latency.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.common.lab import RATE, Lab, Measured, Scene
from benchmarks.common.lab_worker import WARM_UP, WorkerSpec
from benchmarks.common.report import Report, Row, at_least, at_most
from roadtrain.errors import ConfigError
from roadtrain.lab import network_available

WORKERS, BUDGET, RELAY = 4, "700MiB", "300MiB"
PEER = "FSDP2, bf16"


@dataclass(frozen=True)
class Case:
    """A run of roadtrain: the hosts that serve (`s`, or `w` for the workers' own), its floor in
    S/B, and its goals.
    """

    placement: str
    hosts: str = "s"
    staleness: int = 0
    relay: str | None = None
    floor: float = 1.0
    most: float | None = None  # S/B
    least: float | None = None  # ratio to FSDP2


CASES = {
    "host": Case("host", "w", floor=1.5, most=1.15 * 1.5, least=1.8),
    "network": Case("network"),
    "relay": Case("network with a relay", relay=RELAY),
    "late": Case("network", staleness=1, most=1.15, least=2.5),
    "late, relay": Case("network with a relay", staleness=1, relay=RELAY),
}


def run(quick: bool = False) -> Report:
    if (why := network_available()) is not None:
        raise ConfigError(f"the cluster cannot be emulated on this machine: {why}")
    layers, steps = (3, 3) if quick else (10, 8)
    spec = WorkerSpec("ours", WARM_UP + 1 + steps, "bf16", layers=layers, tokens=32, budget=BUDGET)
    scene = Scene(WORKERS, servers=WORKERS)
    found: dict[str, Measured] = {}
    with (
        tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name,
        Lab(scene, Path(name), BUDGET) as lab,
    ):
        peer = lab.train(replace(spec, method="fsdp"))
        for kind, case in CASES.items():
            ours = replace(spec, staleness=case.staleness, relay=case.relay)
            servers = [f"{case.hosts}{i}" for i in range(WORKERS)]
            found[kind] = lab.train(ours, servers=servers)
            print(f"{kind}: {found[kind].seconds:.2f} s a step", flush=True)
    rows: list[Row] = []
    for kind, case in CASES.items():
        rows += compare(case, spec, found[kind], peer)
    for kinds in (("host", "network", "relay"), ("late", "late, relay")):
        same = all(found[kind].losses == found[kinds[0]].losses for kind in kinds)
        goal = "ours == 1"
        rows.append(
            Row(", ".join(kinds), "losses are the same bits", "", float(same), goal=goal, met=same)
        )
    return Report("cluster", rows)


def compare(case: Case, spec: WorkerSpec, ours: Measured, peer: Measured) -> Iterator[Row]:
    name = (
        f"{case.placement}, {WORKERS} workers, {spec.elements / 1e6:.1f} M parameters, 400 Mbit/s,"
        f" staleness {case.staleness}"
    )
    ratio, unit = peer.seconds / ours.seconds, spec.nbytes / RATE
    goal = at_least(ratio, case.least, "ratio")
    yield Row(name, "step", "s", ours.seconds, peer.seconds, PEER, ratio, **goal)
    step, peer_step = ours.seconds / unit, peer.seconds / unit
    goal = at_most(step, case.most)
    yield Row(name, "step", "S/B", step, peer_step, PEER, ratio, case.floor / step, **goal)
    figures = (
        ("carried by the busier direction of a worker's link, a step", "S", carried, spec.nbytes),
        ("processor time of a worker's process, a step", "s", processor_s, 1),
        ("peak resident of a worker", "MB", peak, 1e6),
    )
    for metric, measure_unit, figure, scale in figures:
        mine, other = figure(ours) / scale, figure(peer) / scale
        yield Row(name, metric, measure_unit, mine, other, PEER)


def carried(run: Measured) -> float:
    links = [run.frames[f"w{rank}"] for rank in range(WORKERS)]
    return median(max(link.sent, link.received) for link in links)


def processor_s(run: Measured) -> float:
    return run.cpu["worker"] / WORKERS


def peak(run: Measured) -> float:
    peaks: Sequence[int] = [result["peak"] for result in run.results]
    return max(peaks)
