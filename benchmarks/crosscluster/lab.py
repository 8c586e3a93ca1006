"""The lab of `crosscluster`: two clusters of two hosts, and runs with one process on each host.

Each cluster has a fast network, and an Ethernet joins all hosts. Does NOT train;
worker.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.children import go_on, running, wait_for_all
from benchmarks.crosscluster.model import RunSpec
from benchmarks.crosscluster.worker import work
from roadtrain.lab import LabHost, LabNic, Network, Traffic

MBIT = 1e6 / 8
INFINIBAND, ROCE, ETHERNET = 800 * MBIT, 600 * MBIT, 50 * MBIT
CPUS = 0.4  # of each of four hosts, on a machine of two cores
START_CPUS = 2.0  # during `import torch`, which is not measured
FAST, SLOW = 0, 1  # a host's NICs
RUN_S, START_S = 900.0, 180.0


@dataclass(frozen=True)
class Environment:
    """The networks of a run. `fast`: kind of the fast network in each cluster, or None for Ethernet
    alone.
    """

    name: str
    fast: tuple[str, str] | None

    def nics(self, cluster: int) -> list[LabNic]:
        # the NIC exists in every environment; an unused one is not mentioned in the job
        switch = self.fast[cluster] if self.fast else f"unused{cluster}"
        rate = ROCE if switch == "roce" else INFINIBAND
        return [LabNic(rate, switch), LabNic(ETHERNET, "ethernet")]

    def share_fast(self, rank: int, other: int) -> bool:
        """Check whether the hosts of the two ranks reach each other through their fast NICs."""
        return self.fast is not None and self.fast[rank // 2] == self.fast[other // 2]

    def statements(self) -> list[dict[str, Any]]:
        """Return the `networks` tables of the job, which state the kind of each NIC."""
        networks: list[dict[str, Any]] = [
            {"interface": "eth1", "kind": "ethernet", "rate": _words(ETHERNET)}
        ]
        if self.fast is None:
            return [*networks, {"interface": "eth0", "use": False}]
        for cluster, name in zip("ab", self.fast, strict=True):
            kind, rate = ("roce", ROCE) if name == "roce" else ("infiniband", INFINIBAND)
            networks.append(
                {"hosts": [f"{cluster}*"], "interface": "eth0", "kind": kind, "rate": _words(rate)}
            )
        return networks


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("all InfiniBand", ("ib", "ib")),
        Environment("all RoCE", ("roce", "roce")),
        Environment("all Ethernet", None),
        Environment("hybrid", ("ib", "roce")),
    )
}
HYBRID = ENVIRONMENTS["hybrid"]


HOSTS = ("a0", "a1", "b0", "b1")


def two_clusters(environment: Environment, cpus: Sequence[float] = ()) -> Network:
    """Build the network of two clusters. `cpus`: (processors of each host in the first cluster, in
    the second cluster); if empty, they are not limited.
    """
    hosts = {name: environment.nics("ab".index(name[0])) for name in HOSTS}
    limits = {name: cpus["ab".index(name[0])] for name in HOSTS} if cpus else {}
    return Network(hosts, cpus=limits)


@dataclass(frozen=True)
class Measured:
    """Result of one run. `traffic`: maps each host to the traffic of each of its NICs in one step,
    in bytes of TCP payload.
    """

    seconds: float
    losses: list[float]
    traffic: dict[str, list[Traffic]]
    results: list[dict[str, Any]]
    """The result of each rank, as the rank wrote it."""

    def sent_bytes(self, nic: int) -> float:
        return sum(nics[nic].sent for nics in self.traffic.values())


def measure(network: Network, spec: RunSpec, home: Path) -> Measured:
    """Run one process on each host of the network, and return the measurements.

    Raises:
        RoadtrainError: a rank failed; the message ends with the last output of the rank
    """
    hosts = list(network.hosts.values())
    limits = [host.limit.cpus for host in hosts if host.limit]
    _limit(hosts, [START_CPUS] * len(hosts))
    each = [{"spec": spec, "rank": rank, "world": len(hosts)} for rank in range(len(hosts))]
    with running(work, each, home, hosts=hosts) as ranks:
        wait_for_all(ranks, "imported", START_S)
        _limit(hosts, limits)
        go_on(ranks)
        wait_for_all(ranks, "ready", START_S + RUN_S)
        before = _traffic(hosts)
        go_on(ranks)
        wait_for_all(ranks, "done", RUN_S)
        after = _traffic(hosts)
        go_on(ranks)
        results = wait_for_all(ranks, "result", START_S)
    traffic = {
        name: [
            _per_step(now - then, spec.warmup + spec.steps) for now, then in zip(after[name], nics)
        ]
        for name, nics in before.items()
    }
    # a step ends when its last rank has finished
    seconds = [max(of_step) for of_step in zip(*(result["seconds"] for result in results))]
    return Measured(median(seconds), results[-1]["losses"], traffic, results)


def _limit(hosts: Sequence[LabHost], cpus: Sequence[float]) -> None:
    for host, share in zip(hosts, cpus, strict=True):
        host.set_cpus(share)


def _traffic(hosts: Sequence[LabHost]) -> dict[str, list[Traffic]]:
    return {host.name: [nic.traffic() for nic in host.nics] for host in hosts}


def _per_step(traffic: Traffic, steps: int) -> Traffic:
    return Traffic(round(traffic.sent / steps), round(traffic.received / steps))


def _words(bytes_per_s: float) -> str:
    return f"{bytes_per_s / MBIT:g}Mbit/s"
