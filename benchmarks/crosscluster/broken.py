"""Broken set-ups, each of which the preflight must refuse with an error of its own.

The lab has two clusters of two hosts: InfiniBand in one cluster, RoCE in the other, and Ethernet
between them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.children import Child, requests, running, send_value, wait_for_all
from benchmarks.common.report import Row
from benchmarks.crosscluster.lab import HOSTS, HYBRID, START_S, two_clusters
from roadtrain.errors import RoadtrainError
from roadtrain.lab import LabHost, Network
from roadtrain.stages.rank_meeting import MEET_S
from roadtrain.training.preflight_command import command

LIMIT_S = 30.0
NETWORKS = """
[[parallelism.networks]]
hosts = "a*"
interface = "eth0"
kind = "infiniband"
rate = "800Mbit/s"
[[parallelism.networks]]
hosts = "b*"
interface = "eth0"
kind = "roce"
rate = "600Mbit/s"
[[parallelism.networks]]
interface = "eth1"
rate = "50Mbit/s"
"""
PARALLELISM = '[model.config]\nmodel_type = "llama"\n[parallelism]\ndp = 2\npp = 2\n'
SWAPPED = """
[[parallelism.networks]]
hosts = "a1"
interface = "eth1"
kind = "infiniband"
fabric = "hall a"
[[parallelism.networks]]
hosts = "a1"
interface = "eth0"
kind = "ethernet"
[[parallelism.networks]]
hosts = "a0"
interface = "eth0"
kind = "infiniband"
fabric = "hall a"
"""
ONE_FABRIC = NETWORKS.replace('interface = "eth0"', 'interface = "eth0"\nfabric = "fast"')
JOB = PARALLELISM + NETWORKS


@dataclass(frozen=True)
class RankStart:
    """Arguments of one rank's preflight. `clock_s`: seconds by which the clock of this rank is
    ahead. `patience`: seconds that this rank waits for the other ranks.
    """

    rank: int
    job: str
    address: str
    port: int
    world_size: int = len(HOSTS)
    clock_s: float = 0.0
    patience: float = MEET_S


@dataclass(frozen=True)
class RankEnd:
    """Outcome of one rank's preflight. `sentence`: the error message, "" if there was no error."""

    seconds: float
    sentence: str
    printed: str


@dataclass
class Clusters:
    """The network of the two clusters, with a preflight process on each host."""

    network: Network
    workers: dict[str, Child]
    patience: float  # seconds that ranks wait for others
    port: int = 29500

    def host(self, name: str) -> LabHost:
        return self.network.hosts[name]

    def run(
        self, job: str = JOB, *, hosts: Sequence[str] = HOSTS, **changes: dict[str, Any]
    ) -> dict[str, RankEnd]:
        """Run one preflight on the named hosts, and map the name of each host to its outcome.

        Args:
            job: content of the job file
            changes: maps the name of a host to the fields of `RankStart` that differ on this host;
                the entry `every` is for all hosts
        """
        self.port += 1
        address = self.host("a0").nics[1].address
        for name in hosts:
            start = {
                "rank": HOSTS.index(name),
                "job": job,
                "address": address,
                "port": self.port,
                "patience": self.patience,
                **changes.get("every", {}),
                **changes.get(name, {}),
            }
            self.workers[name].go_on(start)
        ends = wait_for_all([self.workers[name] for name in hosts], "end", START_S)
        return {name: RankEnd(**end) for name, end in zip(hosts, ends, strict=True)}


@contextlib.contextmanager
def clusters(patience: float = MEET_S) -> Iterator[Clusters]:
    """Run the network and its processes during the `with` block. `patience`: seconds that a rank
    waits for the others in each preflight.
    """
    with tempfile.TemporaryDirectory() as home, two_clusters(HYBRID) as network:
        hosts = [network.hosts[name] for name in HOSTS]
        with running(preflights, [{}] * len(HOSTS), Path(home), hosts=hosts) as workers:
            wait_for_all(workers, "imported", START_S)
            yield Clusters(network, dict(zip(HOSTS, workers, strict=True)), patience)


def wrong_interface(lab: Clusters) -> dict[str, RankEnd]:
    """Run the preflight with a job that swaps the names of host a1's two NICs."""
    return lab.run(PARALLELISM + SWAPPED + NETWORKS)


def one_way_firewall(lab: Clusters) -> dict[str, RankEnd]:
    """Run the preflight while host b1 drops all packets from host a1."""
    lab.host("b1").drop_from(lab.host("a1"))
    try:
        return lab.run()
    finally:
        lab.host("b1").pass_from(lab.host("a1"))


def mixed_kinds(lab: Clusters) -> dict[str, RankEnd]:
    """Run the preflight with a job that declares both clusters' fast networks as one fabric."""
    return lab.run(PARALLELISM + ONE_FABRIC)


def wrong_world_size(lab: Clusters) -> dict[str, RankEnd]:
    """Run the preflight, with a world size of six on host b1 and of four on the other hosts."""
    return lab.run(b1={"world_size": 6})


def clock_skew(lab: Clusters) -> dict[str, RankEnd]:
    """Run the preflight while the clock of host b0 is a minute ahead."""
    return lab.run(b0={"clock_s": 60.0})


def mtu(lab: Clusters) -> dict[str, RankEnd]:
    """Run the preflight while cluster a sends jumbo frames and the switch port of host a1 drops
    them.
    """
    for name in ("a0", "a1"):
        lab.host(name).nics[0].set_mtu(9000, 1500 if name == "a1" else 9000)
    try:
        return lab.run()
    finally:
        for name in ("a0", "a1"):
            lab.host(name).nics[0].set_mtu(1500)


def missing_host(lab: Clusters) -> dict[str, RankEnd]:
    """Run the preflight on all hosts except b1."""
    return lab.run(hosts=HOSTS[:-1])


def loopback_name(lab: Clusters) -> dict[str, RankEnd]:
    """Run the preflight while /etc/hosts of every host maps the name a0 to a loopback address."""
    for name in HOSTS:
        lab.host(name).set_names({"a0": "127.0.1.1"})
    try:
        return lab.run(every={"address": "a0"})
    finally:
        for name in HOSTS:
            lab.host(name).set_names({"a0": lab.host("a0").nics[1].address})


SCENARIOS: dict[str, Callable[[Clusters], dict[str, RankEnd]]] = {
    "wrong interface": wrong_interface,
    "one-way firewall": one_way_firewall,
    "mixed kinds": mixed_kinds,
    "wrong world size": wrong_world_size,
    "clock skew": clock_skew,
    "MTU": mtu,
    "missing host": missing_host,
    "name that resolves to loopback": loopback_name,
}


def rows() -> list[Row]:
    """Run the preflight without a fault and on every broken set-up. Each fault must be refused in
    time, by every rank, and by a sentence that no other fault gets.
    """
    with clusters() as lab:
        whole = lab.run()
        broken = {name: scenario(lab) for name, scenario in SCENARIOS.items()}
    case = "preflight: seconds until all ranks have ended, and the sentence of the first"
    fine = not any(end.sentence for end in whole.values())
    out = [Row(case, "nothing is broken", "s", _seconds(whole), goal="accepted", met=fine)]
    sentences = [ends["a0"].sentence for ends in broken.values()]
    goal = f"refused within {LIMIT_S:.0f} s by a sentence of its own"
    for name, ends in broken.items():
        sentence, seconds = ends["a0"].sentence, _seconds(ends)
        refused = all(end.sentence for end in ends.values()) and seconds < LIMIT_S
        met = refused and sentences.count(sentence) == 1
        out.append(
            Row(case, f"{name}: {' '.join(sentence.split())}", "s", seconds, goal=goal, met=met)
        )
    return out


def _seconds(ends: dict[str, RankEnd]) -> float:
    return round(max(end.seconds for end in ends.values()), 2)


def preflights() -> None:
    """Run one preflight for each request of the parent, the fields of a `RankStart`, and send its
    outcome.
    """
    real = time.time
    send_value("imported")
    for request in requests():
        start = RankStart(**request)
        os.environ |= {
            "RANK": str(start.rank),
            "WORLD_SIZE": str(start.world_size),
            "MASTER_ADDR": start.address,
            "MASTER_PORT": str(start.port),
        }
        time.time = lambda ahead=start.clock_s: real() + ahead  # type: ignore[misc]
        send_value("end", vars(_preflight(start.job, start.patience)))


def _preflight(job: str, patience: float) -> RankEnd:
    begin, sentence, printed = time.monotonic(), "", ""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home, "job.toml")
        path.write_text(job)
        text = Path(home, "printed")
        with text.open("w") as file, contextlib.redirect_stdout(file):
            try:
                command(str(path), patience=patience)
            except RoadtrainError as error:
                sentence = str(error)
        printed = text.read_text()
    return RankEnd(time.monotonic() - begin, sentence, printed)
