"""Simulate a run of `fanin` with switches, to predict the seconds of a step and the bytes on every
link.

The inputs are the rates of the links, sizes, and three measurements on this machine: the seconds of
a model that one process computes, the updates of one server, and the processor time of a packet in
a lab with one worker (processors.py). In the simulated cluster, as in the lab, all hosts
share this machine's processors. No constant is fitted to a step of several workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch

from benchmarks.common.lab import FAST, RATE, SPINE, Scene
from benchmarks.common.lab_worker import CHUNK, DTYPES, WorkerSpec, loss_of
from benchmarks.common.report import Row, cores, within
from benchmarks.fanin.processors import PacketSeconds, packet_seconds, updates_here
from benchmarks.fanin.transfer import Bench, Case, one_switch
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import BlockShape, ModelShape
from roadtrain.config.plan_file import ElementBytes, Plan, PlanMemory, SwitchPackets, placement
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.run import Result, simulate
from roadtrain.stages.parallelism import Parallelism
from roadtrain.switch.options import Wire

GOAL = 0.10
LATENCY = "100us"  # of a veth pair and a bridge, with the time for waking a thread
SERVER_STATE = 12.0


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model with equal layers, and the seconds of one layer if one worker computes
    alone.
    """

    layers: int
    layer: int  # elements
    rest: int = 0  # elements outside layers
    itemsize: int = 4  # bytes of a parameter, and of a gradient before it becomes an integer
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def elements(self) -> int:
        return self.layers * self.layer + self.rest


@dataclass(frozen=True)
class Prediction:
    """Prediction of one step of a run in its steady state, after the first steps."""

    seconds: float
    # Whole frames, by (link name of benchmarks/fanin/lab.py, direction): ("node", "sent")
    bytes: dict[tuple[str, str], float]
    result: Result


def predict(
    workers: int,
    racks: int = 1,
    rate: float = RATE,
    *,
    sizes: ModelSizes,
    wire: Wire = "int32",
    staleness: int = 1,
    updates: float = 6e9,
    costs: PacketSeconds | None = None,
) -> Prediction:
    """Predict a step.

    Args:
        racks: number of racks; with more than one, each rack has a switch below the root switch
        rate: bytes/s of each link, counted in whole frames
        updates: rate of the server's updates in bytes/s; an update reads and writes 28 bytes a
            parameter
        costs: processor seconds of a packet on this machine; None: each host has processors of
            its own, which are no limit

    Raises:
        ConfigError: no cluster or plan can be built from the arguments
    """
    cluster = lab_cluster(workers, racks, rate, updates, costs)
    plan = lab_plan(workers, sizes, wire, staleness)
    constants = Constants(
        network=1.0,
        backward=sizes.backward_s / sizes.forward_s if sizes.forward_s else 2.0,
        table={("layer", 1): max(sizes.forward_s, 1e-9), ("rest", 1): 1e-9},
        source="one worker alone on this machine",
    )
    result = simulate(plan, cluster, model_of(sizes), constants, checked=False)
    return Prediction(result.seconds, link_bytes(result, racks), result)


def lab_cluster(
    workers: int, racks: int, rate: float, updates: float, costs: PacketSeconds | None = None
) -> Cluster:
    """Describe the lab as a cluster with workers in racks, switches that multicast, and one
    server. With `costs`, all of them share this machine's processors.
    """
    at = [SPINE] if racks == 1 else [f"rack{r}" for r in range(racks)]

    def packet_rate(role: str) -> float:
        return 1 / getattr(costs, role) if costs else 0

    def host(name: str, count: int, switch: str, role: str) -> dict[str, Any]:
        nic = {"rate": rate_text(rate), "latency": LATENCY, "switch": switch}
        memory = {"memory": "64GB", "memory_rate": "10GB/s", "updates": rate_text(updates)}
        more = {"packet_rate": packet_rate(role), **memory}
        return {"name": name, "count": count, "nics": [nic], **more}

    device = {"kind": "lab", "flops": "1TFLOP/s", "memory": "64GB", "copy": "10GB/s"}
    hosts = [
        {**host(f"workers of {switch}", workers // racks, switch, "worker"), "device": device}
        for switch in at
    ]
    rates = {"rate": rate_text(FAST), "packet_rate": packet_rate("switch")}
    fast = {"sums": True, "multicasts": True, **rates}
    switches = [{"name": name, **fast} for name in dict.fromkeys([SPINE, *at])]
    links = [{"between": [name, SPINE], "rate": rate_text(rate)} for name in at if name != SPINE]
    node = host("node", 1, SPINE, "server")
    tree = {"hosts": [*hosts, node], "switches": switches, "links": links}
    return make_cluster({"name": "lab", "processors": cores() if costs else 0, **tree})


def lab_plan(workers: int, sizes: ModelSizes, wire: Wire, staleness: int) -> Plan:
    """Build a plan in which workers keep all blocks from forward to backward, and each update
    begins when its gradient arrives.
    """
    return Plan(
        placement("optimizer-node"),
        Parallelism(dp=workers),
        staleness=staleness,
        update_at="gradient",
        memory=PlanMemory(slots=max(2, sizes.layers), chunk=CHUNK),
        sizes=ElementBytes(
            parameter_bytes=sizes.itemsize, gradient_bytes=sizes.itemsize, state_bytes=SERVER_STATE
        ),
        packets=SwitchPackets(wire),
    )


def model_of(sizes: ModelSizes) -> ModelShape:
    """Describe the model for the simulator, with unused FLOPs, because the seconds of a layer are
    measured.
    """
    layer = BlockShape("layer", sizes.layer, 1.0, 0.0, 0.0)
    blocks = layer.times(sizes.layers)
    if sizes.rest:
        blocks = (*blocks, BlockShape("rest", sizes.rest, 1.0, 0.0, 0.0))
    return ModelShape("lab", tuple(blocks), 1)


def link_bytes(result: Result, racks: int) -> dict[tuple[str, str], float]:
    """Map (name of a link in the lab, "sent" or "received") to the predicted bytes. Of the workers'
    equal links, only that of worker 0 is included.
    """
    nbytes = result.bytes
    found = {
        ("w0", "sent"): nbytes["stage 0 out"],
        ("w0", "received"): nbytes["stage 0 in"],
        ("node", "sent"): nbytes["server out"],
        ("node", "received"): nbytes["server in"],
    }
    for rack in (f"rack{r}" for r in range(racks if racks > 1 else 0)):
        found[f"{rack}-{SPINE}", "sent"] = nbytes[f"{rack} to {SPINE} link"]
        found[f"{rack}-{SPINE}", "received"] = nbytes[f"{SPINE} to {rack} link"]
    return found


def rate_text(nbytes: float) -> str:
    return f"{nbytes:.0f}B/s"


# times of one worker and one server alone


@cache
def sizes_of(spec: WorkerSpec) -> ModelSizes:
    """Measure the sizes of the model, and the seconds of a layer with one thread on this
    machine.
    """
    model = spec.build()
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    layer = sum(p.numel() for p in layers[0].parameters())
    itemsize = DTYPES[spec.dtype].itemsize
    forward, backward = _seconds(spec, model)
    rest = spec.elements - len(layers) * layer
    each = 1 / len(layers)
    return ModelSizes(len(layers), layer, rest, itemsize, forward * each, backward * each)


def _seconds(spec: WorkerSpec, model: torch.nn.Module, times: int = 4) -> tuple[float, float]:
    """Measure processor seconds: (of a forward, of a backward that recomputes each layer)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    took = []
    for number in range(times):
        begin = time.process_time()
        loss = loss_of(spec, model, number)
        middle = time.process_time()
        loss.backward()
        took.append((middle - begin, time.process_time() - middle))
        model.zero_grad(set_to_none=True)
    torch.set_num_threads(threads)
    forward, backward = (min(part) for part in zip(*took, strict=True))
    return forward, backward + forward


def rows(bench: Bench) -> Iterator[Row]:
    """Compare predictions with the measurements of those cases that used switches and lost no
    packets.
    """
    costs = packet_seconds(bench.spec(computes=False))
    if not bench.cases:
        list(one_switch(bench))
    for case in bench.cases:
        if case.wire is not None and case.scene.loss is None:
            yield from compared(case, costs)


def compared(case: Case, costs: PacketSeconds) -> Iterator[Row]:
    """Compare the predicted seconds of a step and the predicted bytes with the measurement. Of the
    links, the row has the one with the largest error.
    """
    scene: Scene = case.scene
    assert case.wire is not None
    prediction = predict(
        scene.workers,
        scene.racks,
        scene.rate,
        sizes=sizes_of(case.spec),
        wire=cast(Wire, case.wire),
        staleness=case.spec.staleness,
        updates=updates_here(),
        costs=costs,
    )
    measured = case.measured
    yield _row(case.name, "a step", "s", prediction.seconds, measured.seconds)
    ways = {
        (link, way): getattr(measured.frames[link], way)
        for link, way in prediction.bytes
        if link in measured.frames
    }
    worst = max(ways, key=lambda key: abs(prediction.bytes[key] / ways[key] - 1))
    metric = f"{worst[1]} by {worst[0]} a step, of all links farthest off"
    yield _row(case.name, metric, "MB", prediction.bytes[worst] / 1e6, ways[worst] / 1e6)


def _row(case: str, metric: str, unit: str, predicted: float, measured: float) -> Row:
    off = predicted / measured
    print(f"{case}: {metric}: predicted {predicted:.4g} {unit}, measured {measured:.4g} {unit}")
    goal = within(off, GOAL)
    case = f"predicted: {case}"
    return Row(case, metric, unit, predicted, measured, "measured", of_floor=off, **goal)
