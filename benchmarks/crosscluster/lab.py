"""The lab of `crosscluster`: two clusters of two hosts, and runs with one process on each host.

Each cluster has a fast network, and an Ethernet joins all hosts. Does NOT train;
worker.py does.
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

from benchmarks.crosscluster.model import RunSpec
from roadtrain.errors import DeadlineError, RoadtrainError
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


def two_clusters(environment: Environment, cpus: Sequence[float] = (CPUS, CPUS)) -> Network:
    """Build the network of two clusters. `cpus`: (processors of each host in the first cluster, in
    the second cluster).
    """
    hosts = {f"{name}{k}": environment.nics(i) for i, name in enumerate("ab") for k in range(2)}
    limits = {f"{name}{k}": cpus[i] for i, name in enumerate("ab") for k in range(2)}
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


class Rank:
    """A process of a run. At each phase, the process prints a line and waits until `go_on` is
    called.
    """

    MODULE = "benchmarks.crosscluster.worker"

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
        """Wait until the process prints a line that begins with `what`, and return the JSON object
        after it.

        Args:
            until: deadline as time.monotonic()

        Raises:
            DeadlineError: the deadline has passed
            RoadtrainError: the process ended before the line
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.partition(" ")
            if word.strip() == what:
                return json.loads(rest or "{}")
            if time.monotonic() > until:
                raise DeadlineError(f"{self.name} did not print {what!r} before the deadline")
        raise RoadtrainError(
            f"{self.name} ended with exit code {self.process.wait()} and did not print {what!r}: "
            f"{self.errors.read_text()[-3000:]}"
        )

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


def measure(network: Network, spec: RunSpec, home: Path) -> Measured:
    """Run one process on each host of the network, and return the measurements.

    Raises:
        RoadtrainError: a rank failed; the message ends with the last output of the rank
    """
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
    # a step ends when its last rank has finished
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
