"""Kinds of resources of a cluster, such as network or SSDs: clusters in which one kind is faster or
slower, and how busy each kind is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roadtrain.config.cluster import Cluster, Host
from roadtrain.simulator.run import Result

ENDS = {
    "network": (" out", " in", " forth", " back", " link"),
    "PCIe": ("to device", "from device"),
    "SSDs": ("read", "write", "mixed"),
    "device links": ("fabric",),
    "host updates": ("updates", "processors"),
    "switches": (" packets",),
    "host sums": ("sums",),
    "host memory": (" memory",),
    "SSD uplink": ("uplink in", "uplink out"),
}  # for each kind, the suffixes of the names of simulated resources
# for each kind, the parts of a cluster or a host that belong to it, and the rates of each part
RATES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "computing": {"device": ["flops"]},
    "network": {"nics": ["rate"], "links": ["rate"], "switches": ["rate"]},
    "PCIe": {"device": ["copy_rate"]},
    "device links": {"host": ["fabric"]},
    "host updates": {"host": ["updates"]},
    "host sums": {"host": ["sums"]},
    "host memory": {"host": ["memory_rate"]},
    "switches": {"switches": ["packet_rate"]},
    "SSDs": {"ssds": ["read", "write", "internal", "updates"]},
    "SSD uplink": {"host": ["uplink"]},
}


def scaled(cluster: Cluster, factor: float) -> dict[str, Cluster]:
    """Return a copy of `cluster` for each kind of resource that it has, by the kind's name. In the
    copy, all resources of this kind are `factor` times as fast."""
    absent = set() if any(switch.packet_rate for switch in cluster.switches) else {"switches"}
    if not any(host.ssds for host in cluster.hosts):
        absent |= {"SSDs", "SSD uplink"}
    return {
        name: _scaled(cluster, parts, factor) for name, parts in RATES.items() if name not in absent
    }


def _scaled(cluster: Cluster, parts: Mapping[str, Sequence[str]], factor: float) -> Cluster:
    def faster(part: Any, names: Sequence[str]) -> Any:
        return part.model_copy(update={name: getattr(part, name) * factor for name in names})

    def every(whole: Host | Cluster, kinds: Sequence[str]) -> dict[str, Any]:
        return {
            kind: tuple(faster(part, parts[kind]) for part in getattr(whole, kind))
            for kind in kinds
            if kind in parts
        }

    hosts = []
    for host in cluster.hosts:
        changes = every(host, ("nics", "ssds"))
        if host.device is not None:
            changes["device"] = faster(host.device, parts.get("device", ()))
        hosts.append(faster(host.model_copy(update=changes), parts.get("host", ())))
    changes = every(cluster, ("links", "switches"))
    return cluster.model_copy(update={"hosts": tuple(hosts), **changes})


def busy_share(result: Result, name: str) -> float:
    """Return an upper bound of the fraction of a step in which resources of the kind `name` are
    busy."""
    # the simulation may count communication between devices of a host as work of the device
    ranks = result.plan.parallelism
    if name not in ENDS or (name == "device links" and ranks.devices > ranks.dp):
        return 1.0
    shares = (share for what, share in result.busy.items() if what.endswith(ENDS[name]))
    return min(1.0, sum(shares))
