"""Broken set-ups, each of which the preflight must refuse with an error of its own.

The lab has two clusters of two hosts: InfiniBand in one cluster, RoCE in the other, and Ethernet
between them.

    python -m benchmarks.crosscluster.broken     prints each set-up with its seconds and its error
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roadtrain.errors import RoadtrainError
from roadtrain.lab import LabHost, LabNic, Network
from roadtrain.stages.rank_meeting import MEET_S
from roadtrain.training.preflight_command import command

MBIT = 1e6 / 8
HOSTS = ("a0", "a1", "b0", "b1")
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
    home: Path
    workers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    port: int = 29500
    patience: float = MEET_S  # seconds that ranks wait for others

    def host(self, name: str) -> LabHost:
        return self.network.hosts[name]

    def start(self) -> None:
        words = [sys.executable, "-m", "benchmarks.crosscluster.broken", "worker"]
        for name in HOSTS:
            with (self.home / f"errors of {name}").open("w") as errors:
                self.workers[name] = self.host(name).run(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
                )
        for name in HOSTS:
            self.answer(name)

    def answer(self, name: str) -> Any:
        stream = self.workers[name].stdout
        assert stream is not None
        line = stream.readline()
        if not line:
            raise RoadtrainError(
                f"the preflight process on host {name} ended: "
                f"{(self.home / f'errors of {name}').read_text()[-3000:]}"
            )
        return json.loads(line)

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
            stream = self.workers[name].stdin
            assert stream is not None
            stream.write(json.dumps(start) + "\n")
            stream.flush()
        return {name: RankEnd(**self.answer(name)) for name in hosts}

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                assert stream is not None
                stream.close()


@contextlib.contextmanager
def clusters(patience: float = MEET_S) -> Iterator[Clusters]:
    """Run the network and its processes during the `with` block. `patience`: seconds that a rank
    waits for the others in each preflight.
    """
    nics = {
        name: [
            LabNic((800 if name[0] == "a" else 600) * MBIT, f"fast {name[0]}"),
            LabNic(50 * MBIT, "ethernet"),
        ]
        for name in HOSTS
    }
    with tempfile.TemporaryDirectory() as home, Network(nics) as network:
        made = Clusters(network, Path(home), patience=patience)
        try:
            made.start()
            yield made
        finally:
            made.stop()


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


def rows() -> list[dict[str, Any]]:
    """Run the preflight without a fault and on every broken set-up, and return a row for each.

    Each row has the seconds until the last rank ended, the error of rank 0, and the number of ranks
    that raised the same error.
    """
    with clusters() as lab:
        out = [_row("whole", lab.run())]
        out += [_row(name, scenario(lab)) for name, scenario in SCENARIOS.items()]
    return out


def _row(name: str, outcomes: dict[str, RankEnd]) -> dict[str, Any]:
    sentence = outcomes["a0"].sentence
    return {
        "scenario": name,
        "seconds": round(max(rank.seconds for rank in outcomes.values()), 2),
        "sentence": sentence,
        "ranks": len(outcomes),
        "agree": sum(rank.sentence == sentence for rank in outcomes.values()),
        "refused": all(rank.sentence for rank in outcomes.values()),
    }


def worker() -> None:
    """Run one preflight for each line of stdin (a `RankStart` as JSON), and print its outcome as
    JSON.
    """
    out = os.fdopen(os.dup(1), "w")
    real = time.time
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        start = RankStart(**json.loads(line))
        os.environ |= {
            "RANK": str(start.rank),
            "WORLD_SIZE": str(start.world_size),
            "MASTER_ADDR": start.address,
            "MASTER_PORT": str(start.port),
        }
        time.time = lambda ahead=start.clock_s: real() + ahead  # type: ignore[misc]
        outcome = _preflight(start.job, start.patience)
        print(json.dumps(vars(outcome)), file=out, flush=True)


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


def main() -> None:
    if sys.argv[1:] == ["worker"]:
        worker()
        return
    for row in rows():
        print(f"{row['scenario']}: {row['seconds']} s, {row['agree']} of {row['ranks']} ranks:")
        print(f"    {row['sentence'] or 'no error'}")


if __name__ == "__main__":
    main()
