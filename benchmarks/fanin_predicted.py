"""What the simulator says of a run of `fanin` below switches: seconds of a step, and bytes of every
link. By the ordinary `simulate`, with a cluster and a plan made of the lab's scene.

Known beforehand are the rates that links were set to, sizes, and what one worker alone takes to
compute, one server to update, and packets to cross loopback, on this machine; with W workers on C
processors each computes C / W as fast, and a step is not faster than all of it on all processors.
Nothing is fitted to a measurement of the lab.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch

from benchmarks.fanin_lab import FAST, FRAME, RATE, SPINE, Scene
from benchmarks.fanin_processors import FREE, PacketSeconds, lab_seconds, packet_seconds
from benchmarks.fanin_transfer import Case
from benchmarks.fanin_worker import CHUNK, DTYPES, WorkerSpec, losses_of
from benchmarks.report import Row, cores
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import BlockShape, ModelShape
from roadtrain.config.plan_file import ElementBytes, Plan, PlanMemory, SwitchPackets, placement
from roadtrain.planner.probe import processors
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.fabric import UPDATE_BYTES
from roadtrain.simulator.run import Result, simulate
from roadtrain.stages.parallelism import Parallelism
from roadtrain.switch.options import Wire

GOAL = 0.10
LATENCY = "100us"  # of a veth pair and a bridge, with the time that a thread takes to wake
SERVER_STATE = 12.0


@dataclass(frozen=True)
class ModelSizes:
    """A model of equal layers, and what one worker alone takes for one of them."""

    layers: int
    layer: int  # elements
    rest: int = 0  # elements that are in no layer
    itemsize: int = 4  # bytes of a parameter, and of a gradient before it is an integer
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def elements(self) -> int:
        return self.layers * self.layer + self.rest


@dataclass(frozen=True)
class Prediction:
    """Of one step in the steady state."""

    seconds: float  # the greater of what links and hosts, and what this machine's processors take
    processors: float  # seconds of them, over how many there are
    # Whole frames, by link as benchmarks/fanin_lab.py calls them, and which way: ("node", "sent")
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
    of: PacketSeconds = FREE,
) -> Prediction:
    """racks: 1: one switch; else a tree, with a switch a rack. rate: bytes a second of each link,
    of whole frames. updates: bytes a second that the server updates, 28 a parameter. of: what
    packets take of this machine's processors.
    Raises ConfigError."""
    cluster = lab_cluster(workers, racks, rate, updates)
    plan = lab_plan(workers, sizes, wire, staleness)
    slower = max(1.0, workers / cores())
    constants = Constants(
        network=1.0,
        backward=sizes.backward_s / sizes.forward_s if sizes.forward_s else 2.0,
        table={("layer", 1): max(sizes.forward_s * slower, 1e-9), ("rest", 1): 1e-9},
        source="one worker alone on this machine",
    )
    result = simulate(plan, cluster, model_of(sizes), constants, checked=False)
    nbytes = link_bytes(result, racks)
    up, down = (nbytes["w0", way] / FRAME for way in ("sent", "received"))
    computed = workers * sizes.layers * (sizes.forward_s + sizes.backward_s)
    updated = sizes.elements * UPDATE_BYTES / updates
    busy = (lab_seconds(workers, racks, up, down, of) + computed + updated) / cores()
    return Prediction(max(result.seconds, busy), busy, nbytes, result)


def lab_cluster(workers: int, racks: int, rate: float, updates: float) -> Cluster:
    """Workers in racks, and one optimizer node; each switch is a host with a fast card. The lab's
    bridges copy what is sent to a group."""
    at = [SPINE] if racks == 1 else [f"rack{r}" for r in range(racks)]

    def host(name: str, count: int, switch: str) -> dict[str, Any]:
        nic = {"rate": rate_text(rate), "latency": LATENCY, "switch": switch}
        memory = {"memory": "64GB", "memory_rate": "10GB/s", "updates": rate_text(updates)}
        return {"name": name, "count": count, "nics": [nic], **memory}

    device = {"kind": "lab", "flops": "1TFLOP/s", "memory": "64GB", "copy": "10GB/s"}
    hosts = [
        {**host(f"workers of {switch}", workers // racks, switch), "device": device}
        for switch in at
    ]
    fast = {"sums": True, "multicasts": True, "rate": rate_text(FAST)}
    switches = [{"name": name, **fast} for name in dict.fromkeys([SPINE, *at])]
    links = [{"between": [name, SPINE], "rate": rate_text(rate)} for name in at if name != SPINE]
    tree = {"hosts": [*hosts, host("node", 1, SPINE)], "switches": switches, "links": links}
    return make_cluster({"name": "lab", **tree})


def lab_plan(workers: int, sizes: ModelSizes, wire: Wire, staleness: int) -> Plan:
    """All blocks are kept from forward to backward; each update begins as its gradient is there."""
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
    """FLOPs are not asked for: seconds of a layer are known."""
    layer = BlockShape("layer", sizes.layer, 1.0, 0.0, 0.0)
    blocks = layer.times(sizes.layers)
    if sizes.rest:
        blocks = (*blocks, BlockShape("rest", sizes.rest, 1.0, 0.0, 0.0))
    return ModelShape("lab", tuple(blocks), 1)


def link_bytes(result: Result, racks: int) -> dict[tuple[str, str], float]:
    """Links as the lab calls them; all workers' are alike."""
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


# what one worker and one server alone take


@cache
def sizes_of(spec: WorkerSpec) -> ModelSizes:
    """Measured here, with one thread: the least of a few passes."""
    model = spec.build()
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    layer = sum(p.numel() for p in layers[0].parameters())
    itemsize = DTYPES[spec.dtype].itemsize
    forward, backward = _seconds(spec, model)
    rest = spec.elements - len(layers) * layer
    each = 1 / len(layers)
    return ModelSizes(len(layers), layer, rest, itemsize, forward * each, backward * each)


def _seconds(spec: WorkerSpec, model: torch.nn.Module, times: int = 4) -> tuple[float, float]:
    """Of a forward, and of a backward that makes each layer's forward again."""
    loss_of, threads = losses_of(spec, 0, 1), torch.get_num_threads()
    torch.set_num_threads(1)
    took = []
    for number in range(times):
        begin = time.perf_counter()
        loss = loss_of(model, number)
        middle = time.perf_counter()
        loss.backward()
        took.append((middle - begin, time.perf_counter() - middle))
        model.zero_grad(set_to_none=True)
    torch.set_num_threads(threads)
    forward, backward = (min(part) for part in zip(*took, strict=True))
    return forward, backward + forward


@cache
def updates_here() -> float:
    """Bytes a second, as the simulator counts them, that one thread updates."""
    return processors(1)["updates"]


def rows(cases: Iterable[Case]) -> Iterator[Row]:
    """Of those that went through switches."""
    for case in cases:
        if case.wire is not None:
            yield from compared(case)


def compared(case: Case) -> Iterator[Row]:
    """Seconds of a step, and the link of which the prediction is farthest off."""
    scene: Scene = case.scene
    assert case.wire is not None
    said = predict(
        scene.workers,
        scene.racks,
        scene.rate,
        sizes=sizes_of(case.spec),
        wire=cast(Wire, case.wire),
        staleness=case.spec.staleness,
        updates=updates_here(),
        of=packet_seconds(),
    )
    measured = case.measured
    yield _row(case.name, "a step", "s", said.seconds, measured.seconds)
    ways = {
        (link, way): getattr(measured.frames[link], way)
        for link, way in said.bytes
        if link in measured.frames
    }
    worst = max(ways, key=lambda key: abs(said.bytes[key] / ways[key] - 1))
    what = f"{worst[1]} by {worst[0]} a step, of all links farthest off"
    yield _row(case.name, what, "MB", said.bytes[worst] / 1e6, ways[worst] / 1e6)


def _row(case: str, metric: str, unit: str, predicted: float, measured: float) -> Row:
    off = predicted / measured
    print(f"{case}: {metric}: predicted {predicted:.4g} {unit}, measured {measured:.4g} {unit}")
    goal, met = f"within {GOAL:.0%}", abs(off - 1) <= GOAL
    return Row(
        f"predicted: {case}", metric, unit, predicted, measured, "measured", None, off, goal, met
    )
