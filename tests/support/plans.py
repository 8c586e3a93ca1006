"""Clusters and models of round numbers, for tests of the simulator and the planner."""

from __future__ import annotations

from typing import Any

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import BlockShape, ModelShape
from roadtrain.config.plan_file import Plan, placement
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.run import Result, simulate
from roadtrain.stages.parallelism import Parallelism

RATE = 10e9
WHOLE = Constants(efficiency=0.5, network=1.0)


def cluster(
    hosts: int = 4, spares: int = 0, *, devices: int = 1, sums: bool = False, **more: Any
) -> Cluster:
    device = {
        "flops": "100TFLOP/s",
        "memory": "80GB",
        "memory_rate": "100000GB/s",
        "copy": "1000GB/s",
        "idle_watts": 100,
        "peak_watts": 300,
    }
    ssd = {
        "count": 2,
        "read": "3GB/s",
        "write": "3GB/s",
        "mixed": 2,
        "capacity": "8TB",
        "updates": "100GB/s",
        "internal": "100GB/s",
    }
    base = {
        "memory": "1TB",
        "memory_rate": "2000GB/s",
        "updates": "1000GB/s",
        "sums": "1000GB/s",
        "uplink": "100GB/s",
        "nics": [{"kind": "roce", "rate": "10GB/s", "latency": "1us", "relay": True}],
        "idle_watts": 50,
        "peak_watts": 250,
    }
    kinds = [
        {
            **base,
            "name": "gpu",
            "count": hosts,
            "devices": devices,
            "device": device,
            "ssds": [ssd],
            "price_per_hour": 3.6,
            "fabric": "100GB/s",
            **more,
        }
    ]
    kinds += (
        [{**base, "name": "spare", "count": spares, "ssds": [ssd], "price_per_hour": 0.36}]
        if spares
        else []
    )
    return make_cluster(
        {"hosts": kinds, "switches": [{"name": "roce", "sums": sums, "multicasts": sums}]}
    )


def lump(params: float, flops: float = 0.0, blocks: int = 8) -> ModelShape:
    own = BlockShape("layer", int(params / blocks), flops / blocks, 0.0, 0.0)
    return ModelShape("lump", own.times(blocks), 1)


def run(name: str, where: Cluster, model: ModelShape, **plan: Any) -> Result:
    simulated_plan = Plan(
        placement(name), Parallelism(dp=sum(h.count * h.devices for h in where.workers))
    ).changed(**plan)
    return simulate(simulated_plan, where, model, WHOLE, checked=False)


def traffic(result: Result, what: str) -> float:
    return result.bytes[f"stage 0 {what}"]


def racks(*workers: int, link: float = 1e9, node: str = "root", **switch: Any) -> Cluster:
    """A cluster with the given number of workers per rack and an optimizer node at the root. With
    one rack its switch is the root. switch: Keys of all switches."""
    names = ["root"] if len(workers) == 1 else [f"rack{i}" for i in range(len(workers))]

    def host(name: str, count: int, at: str) -> dict[str, Any]:
        nic = {"rate": "1GB/s", "latency": "10us", "switch": at}
        fast = {"memory": "1TB", "memory_rate": "1000GB/s", "updates": "1000GB/s"}
        return {"name": name, "count": count, "nics": [nic], "sums": "1000GB/s", **fast}

    device = {"flops": "100TFLOP/s", "memory": "80GB", "memory_rate": "2TB/s", "copy": "100GB/s"}
    hosts = [
        {**host(f"workers {i}", count, names[i]), "device": device}
        for i, count in enumerate(workers)
    ]
    every = [{"name": name, "sums": True, **switch} for name in dict.fromkeys(["root", *names])]
    links = [
        {"between": [name, "root"], "rate": f"{link:.0f}B/s"} for name in names if name != "root"
    ]
    return make_cluster(
        {"hosts": [*hosts, host("node", 1, node)], "switches": every, "links": links}
    )
