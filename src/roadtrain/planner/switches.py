"""Describe the switches that sum gradients in a plan: as a tree, as lines of a report, as keys of a
job, and as commands that start the switches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from roadtrain.config.cluster import Cluster, Host
from roadtrain.config.plan_file import Plan
from roadtrain.config.switch_tree import SwitchTree, switch_tree
from roadtrain.switch.options import WINDOW

PORT = "PORT"  # placeholder for a port in commands and jobs
RELAY = "4GiB"  # memory of a relay, the process that communicates for the workers of a host


def hosts_of(plan: Plan, cluster: Cluster) -> list[Host]:
    """Return the hosts that compute, with one item per machine."""
    hosts = [host for host in cluster.workers for _ in range(host.count)]
    ends = itertools.accumulate(host.devices for host in hosts)
    begins = (end - host.devices for end, host in zip(ends, hosts, strict=True))
    return [host for host, at in zip(hosts, begins) if at < plan.parallelism.devices]


def tree_of(plan: Plan, cluster: Cluster) -> SwitchTree | None:
    """Return the tree of the switches that sum in a plan, or None if no switch sums. Raises
    ConfigError."""
    places = [place for place in plan.placements if place.sum == "switch"]
    if not places:
        return None
    served = any(place.served for place in places)
    return switch_tree(cluster, hosts_of(plan, cluster), cluster.spares[0] if served else None)


def lines(plan: Plan, cluster: Cluster) -> list[str]:
    """Return lines for the user that name the switches that sum, and the number format of gradients
    in packets (Rule 2: lossy formats are printed)."""
    tree = tree_of(plan, cluster)
    if tree is None:
        return []
    packets = plan.packets
    below = [f"{name} (below {parent})" for name, parent in tree.parents.items()]
    return [
        f"summed  by {', '.join([tree.root, *below])}: gradients are sent as {packets.wire} in"
        f" fixed point, at most {packets.window} packets of a stream in flight; parameters are"
        f" copied by {'the network' if tree.multicasts else 'the switches'}"
    ]


def _address(name: str) -> str:
    return f"{name}:{PORT}"


def job_keys(
    plan: Plan, cluster: Cluster, address: Callable[[str], str] = _address
) -> dict[str, Any]:
    """Return the [servers] keys of a job whose gradients are summed by switches. `address`: returns
    the address of a switch with a given name; by default NAME:PORT, where the user replaces
    PORT."""
    tree = tree_of(plan, cluster)
    if tree is None:
        return {}
    keys: dict[str, Any] = {"switches": _switches(tree, address), "wire": plan.packets.wire}
    if plan.packets.window != WINDOW:
        keys["window"] = plan.packets.window
    if any(host.devices > 1 for host in hosts_of(plan, cluster)):
        keys["relay"] = RELAY
    return keys


def _switches(tree: SwitchTree, address: Callable[[str], str]) -> list[Any]:
    """Return the entries of the job key `switches`. `workers` of an entry lists indices of hosts,
    counted from 0, because the relay of a host sends for all workers of the host."""
    if not tree.parents:
        return [address(tree.root)]
    return [
        {
            "address": address(name),
            **({"parent": address(tree.parents[name])} if name in tree.parents else {}),
            "workers": [rank for rank, at in enumerate(tree.at) if at == name],
        }
        for name in tree.switches
    ]


def commands(plan: Plan, cluster: Cluster) -> Sequence[str]:
    """Return the commands that start the server and the switches."""
    tree = tree_of(plan, cluster)
    if tree is None or not any(place.fans_in for place in plan.placements):
        return ()
    node = cluster.spares[0].name
    serve = "roadtrain serve {}:" + PORT
    found = [f"{serve.format(name)} --switch --token-file token" for name in tree.switches]
    return [*found, f"{serve.format(node)} --store DIR --token-file token"]
