"""The lab of `crosscluster`: two clusters of two hosts, and runs of one process a host on them.

Clusters `a` and `b` have a fast network each; every host also has a NIC on the Ethernet that all
share. In the hybrid environment the fast networks are of two kinds and cannot reach each other.
Does NOT train (crosscluster_worker.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.crosscluster_model import RunSpec
from roadtrain.errors import DeadlineError, RoadtrainError
from roadtrain.lab import LabHost, LabNic, Network, Traffic

MBIT = 1e6 / 8
INFINIBAND, ROCE, ETHERNET = 800 * MBIT, 600 * MBIT, 50 * MBIT
CPUS = 0.4  # of each of four hosts, of a machine of two cores
START_CPUS = 2.0  # while a process imports torch, which is not what is measured
FAST, SLOW = 0, 1  # a host's NICs
RUN_S, START_S = 900.0, 180.0


@dataclass(frozen=True)
class Environment:
    """Which fast network each cluster is on, or none: then all goes over Ethernet."""

    name: str
    fast: tuple[str, str] | None

    def nics(self, cluster: int) -> list[LabNic]:
        # the NIC is there in any environment; where it is not used, nothing is said of it
        switch = self.fast[cluster] if self.fast else f"unused{cluster}"
        rate = ROCE if switch == "roce" else INFINIBAND
        return [LabNic(rate, switch), LabNic(ETHERNET, "ethernet")]

    def share_fast(self, rank: int, other: int) -> bool:
        """Whether these ranks' hosts reach each other by their fast NICs."""
        return self.fast is not None and self.fast[rank // 2] == self.fast[other // 2]

    def statements(self) -> list[dict[str, Any]]:
        """What is said of the cards, as `networks` of a job: nothing of this is found out by the
        system, to which all of the lab is Ethernet."""
        said: list[dict[str, Any]] = [
            {"interface": "eth1", "kind": "ethernet", "rate": _words(ETHERNET)}
        ]
        if self.fast is None:
            return [*said, {"interface": "eth0", "use": False}]
        for cluster, name in zip("ab", self.fast, strict=True):
            kind, rate = ("roce", ROCE) if name == "roce" else ("infiniband", INFINIBAND)
            said.append(
                {"hosts": [f"{cluster}*"], "interface": "eth0", "kind": kind, "rate": _words(rate)}
            )
        return said


ENVIRONMENTS = {
    one.name: one
    for one in (
        Environment("all InfiniBand", ("ib", "ib")),
        Environment("all RoCE", ("roce", "roce")),
        Environment("all Ethernet", None),
        Environment("hybrid", ("ib", "roce")),
    )
}
HYBRID = ENVIRONMENTS["hybrid"]


def two_clusters(environment: Environment, cpus: Sequence[float] = (CPUS, CPUS)) -> Network:
    """Hosts a0, a1, b0, b1. cpus: of each host of the two clusters."""
    hosts = {f"{name}{k}": environment.nics(i) for i, name in enumerate("ab") for k in range(2)}
    limits = {f"{name}{k}": cpus[i] for i, name in enumerate("ab") for k in range(2)}
    return Network(hosts, cpus=limits)


@dataclass(frozen=True)
class Measured:
    """One run. `traffic`: host -> of each of its NICs, TCP payload of one step."""

    seconds: float
    losses: list[float]
    traffic: dict[str, list[Traffic]]
    results: list[dict[str, Any]]
    """Of each rank, as it wrote them."""

    def sent_bytes(self, nic: int) -> float:
        return sum(nics[nic].sent for nics in self.traffic.values())


class Rank:
    """A process of a run. It says what it has reached, a line each, and goes on when it is told."""

    MODULE = "benchmarks.crosscluster_worker"

    def __init__(self, host: LabHost, spec: Path, rank: int, world: int, home: Path) -> None:
        self.name = f"rank {rank} on {host.name}"
        self.errors = home / f"errors{rank}"
        words = [sys.executable, "-m", self.MODULE, str(spec)]
        with self.errors.open("w") as errors:
            self.process = host.run(
                [*words, str(rank), str(world)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_for(self, what: str, until: float) -> dict[str, Any]:
        """The line that begins with `what`; others are notes for people."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.partition(" ")
            if word.strip() == what:
                return json.loads(rest or "{}")
            if time.monotonic() > until:
                raise DeadlineError(f"{self.name} has not come to {what!r} in time")
        raise RoadtrainError(
            f"{self.name} ended with {self.process.wait()} before {what!r}: "
            f"{self.errors.read_text()[-3000:]}"
        )

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


def measure(network: Network, spec: RunSpec, home: Path) -> Measured:
    """Runs one process a host of the network, in the order of hosts. Raises RoadtrainError with the
    last words of a rank that failed."""
    home.mkdir(parents=True, exist_ok=True)
    spec.write(home / "spec.json")
    hosts = list(network.hosts.values())
    limits = [host.limit.cpus for host in hosts if host.limit]
    _limit(hosts, [START_CPUS] * len(hosts))
    ranks = [Rank(h, home / "spec.json", r, len(hosts), home) for r, h in enumerate(hosts)]
    try:
        _all(ranks, "imported", START_S)
        _limit(hosts, limits)
        for rank in ranks:
            rank.go_on()
        _all(ranks, "ready", START_S + RUN_S)
        before = _traffic(hosts)
        for rank in ranks:
            rank.go_on()
        _all(ranks, "done", RUN_S)
        after = _traffic(hosts)
        for rank in ranks:
            rank.go_on()
        results = _all(ranks, "result", START_S)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.communicate()
    traffic = {
        name: [
            _per_step(now - then, spec.warmup + spec.steps) for now, then in zip(after[name], nics)
        ]
        for name, nics in before.items()
    }
    # a step ends when its last rank has ended it
    seconds = [max(of_step) for of_step in zip(*(result["seconds"] for result in results))]
    return Measured(median(seconds), results[-1]["losses"], traffic, results)


def _all(ranks: Sequence[Rank], what: str, within_s: float) -> list[dict[str, Any]]:
    until = time.monotonic() + within_s
    return [rank.wait_for(what, until) for rank in ranks]


def _limit(hosts: Sequence[LabHost], cpus: Sequence[float]) -> None:
    for host, share in zip(hosts, cpus, strict=True):
        host.set_cpus(share)


def _traffic(hosts: Sequence[LabHost]) -> dict[str, list[Traffic]]:
    return {host.name: [nic.traffic() for nic in host.nics] for host in hosts}


def _per_step(traffic: Traffic, steps: int) -> Traffic:
    return Traffic(round(traffic.sent / steps), round(traffic.received / steps))


def _words(bytes_per_s: float) -> str:
    return f"{bytes_per_s / MBIT:g}Mbit/s"
