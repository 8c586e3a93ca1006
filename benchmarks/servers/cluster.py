"""Measure training steps of several worker hosts over emulated links: roadtrain with two placements
of its servers, compared with FSDP2 over gloo.

In placement `host`, a server runs on each worker's host. In placement `network`, there are as many
servers as workers, each on a host of its own.

The floor of a step is the bytes that must cross the busier direction of a link, divided by the rate
B of that direction. With S bytes of bf16 parameters and four workers, the floor is 1.5 S/B in
`host` and S/B in `network`. Needs root. Does NOT emulate latency.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.report import Report, Row
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab import LabHost, LabNic, Network, network_available
from roadtrain.transport.address import write_token

WORKERS, LINK = 4, 400e6 / 8
WARM_UP = 2
RELAY = "300MiB"
TIMEOUT_S = 300.0


class Cluster:
    """Emulated worker hosts and as many server hosts, each with a NIC of `rate` bytes/s in each
    direction.

    `workers` is the number of worker hosts in use, and may be lowered later. `placing_rate`: rate
    of the NICs until all workers have placed their models.
    """

    def __init__(
        self,
        home: Path,
        workers: int = WORKERS,
        rate: float = LINK,
        placing_rate: float | None = None,
    ) -> None:
        self.home, self.workers, self.rate, self.placing_rate = home, workers, rate, placing_rate
        names = [f"{kind}{i}" for kind in "ws" for i in range(workers)]
        self.network = Network({name: [LabNic(rate)] for name in names})
        self.token = home / "token"
        write_token(self.token)

    def serve(self, hosts: list[LabHost]) -> tuple[list[subprocess.Popen[Any]], list[str]]:
        """Start a server on each host. Returns (server processes, addresses of the servers)."""
        made, where = [], []
        for host in hosts:
            store = Path(tempfile.mkdtemp(prefix="roadtrain-bench-", dir="/dev/shm"))
            shutil.rmtree(store)
            made.append(
                host.run(
                    [
                        sys.executable,
                        "-m",
                        "roadtrain.cli",
                        "serve",
                        f"{host.address}:7000",
                        "--store",
                        str(store),
                        "--budget",
                        "700MiB",
                        "--token-file",
                        str(self.token),
                    ],
                    stdout=(self.home / f"{host.name}.log").open("w"),
                    stderr=subprocess.STDOUT,
                )
            )
            made[-1].store = store  # type: ignore[attr-defined]
            where.append(f"{host.address}:7000")
        return made, where

    def train(self, *words: str, **env: str) -> list[dict[str, Any]]:
        """Run all workers until they end, and return their results.

        Args:
            words: command-line arguments of benchmarks.servers.cluster_worker
            env: environment variables of the workers, in addition to those of this process

        Raises:
            RoadtrainError: a worker failed; the message ends with the last output of the worker
        """
        running = []
        if self.placing_rate is not None:
            self.set_rate(self.placing_rate)
            words = (*words, "--gate", tempfile.mkdtemp(prefix="gate-", dir=self.home))
        for rank in range(self.workers):
            host = self.network.hosts[f"w{rank}"]
            out, log = self.home / f"w{rank}.json", self.home / f"w{rank}.train.log"
            out.unlink(missing_ok=True)
            command = [
                sys.executable,
                "-m",
                "benchmarks.servers.cluster_worker",
                *words,
                "--json",
                str(out),
            ]
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(self.workers), **env}
            process = host.run(
                command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT
            )
            running.append((process, out, log))
        if self.placing_rate is not None:
            self._open(Path(words[-1]), [process for process, _, _ in running])
        for process, _, log in running:
            if process.wait(TIMEOUT_S):
                raise RoadtrainError(
                    f"a worker ended with exit code {process.returncode}: {log.read_text()[-2000:]}"
                )
        return [json.loads(out.read_text()) for _, out, _ in running]

    def set_rate(self, rate: float) -> None:
        for host in self.network.hosts.values():
            host.nics[0].set_rate(rate)

    def _open(self, gate: Path, processes: list[subprocess.Popen[Any]]) -> None:
        """Wait until every worker has placed its model, set the links to their full rate, and let
        training begin. `gate`: directory in which workers report and wait.
        """
        until = time.monotonic() + TIMEOUT_S
        while len(list(gate.iterdir())) < self.workers and time.monotonic() < until:
            if any(process.poll() for process in processes):
                return  # the caller waits for the processes and raises the error
            time.sleep(0.02)
        self.set_rate(self.rate)
        (gate / "open").touch()

    def ours(self, kind: str, steps: int, *words: str) -> list[dict[str, Any]]:
        hosts = [self.network.hosts[f"{kind}{i}"] for i in range(self.workers)]
        servers, where = self.serve(hosts)
        try:
            return self.train(
                "--servers",
                ",".join(where),
                "--token",
                str(self.token),
                "--steps",
                str(steps),
                "--budget",
                "700MiB",
                *words,
                MASTER_PORT="1",
            )
        finally:
            for server in servers:
                server.terminate()
                server.wait()
                shutil.rmtree(server.store, ignore_errors=True)  # type: ignore[attr-defined]

    def fsdp(self, steps: int, *words: str) -> list[dict[str, Any]]:
        return self.train(
            "--fsdp",
            "--steps",
            str(steps),
            *words,
            MASTER_PORT="29511",
            GLOO_SOCKET_IFNAME="eth0",
            MASTER_ADDR=self.network.hosts["w0"].address,
        )


def step_seconds(results: list[dict[str, Any]]) -> float:
    return median(median(r["seconds"][WARM_UP:]) for r in results)


def run(quick: bool = False) -> Report:
    if (why := network_available()) is not None:
        raise ConfigError(f"the cluster cannot be emulated on this machine: {why}")
    steps, words = (5, ("--layers", "3")) if quick else (10, ())
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        cluster = Cluster(Path(name))
        with cluster.network:
            late = ("--staleness", "1", *words)
            found = {
                "host": cluster.ours("w", steps, *words),
                "network": cluster.ours("s", steps, *words),
                "late": cluster.ours("s", steps, *late),
                "fsdp": cluster.fsdp(steps, *words),
                "relay": cluster.ours("s", steps, *words, "--relay", RELAY),
                "late, relay": cluster.ours("s", steps, *late, "--relay", RELAY),
            }
    parameters = found["host"][0]["parameters"]
    unit = 2 * parameters / LINK
    seconds = {kind: step_seconds(results) for kind, results in found.items()}
    rows = []
    cases = (
        ("host", "host", 0, 1.5, 1.15 * 1.5, 1.8),
        ("network", "network", 0, 1.0, None, None),
        ("relay", "network with a relay", 0, 1.0, None, None),
        ("late", "network", 1, 1.0, 1.15, 2.5),
        ("late, relay", "network with a relay", 1, 1.0, None, None),
    )
    for kind, placement, stale, floor, goal, ratio_goal in cases:
        case = (
            f"{placement}, {WORKERS} workers, {parameters / 1e6:.1f} M parameters, 400 Mbit/s,"
            f" staleness {stale}"
        )
        ratio = seconds["fsdp"] / seconds[kind]
        rows.append(
            Row(
                case,
                "step",
                "s",
                seconds[kind],
                peer=seconds["fsdp"],
                peer_name="FSDP2, bf16",
                ratio=ratio,
                goal=None if ratio_goal is None else f"ratio >= {ratio_goal}",
                met=None if ratio_goal is None else ratio >= ratio_goal,
            )
        )
        rows.append(
            Row(
                case,
                "step",
                "S/B",
                seconds[kind] / unit,
                peer=seconds["fsdp"] / unit,
                peer_name="FSDP2, bf16",
                ratio=ratio,
                of_floor=floor * unit / seconds[kind],
                goal=None if goal is None else f"ours <= {goal:.3f}",
                met=None if goal is None else seconds[kind] / unit <= goal,
            )
        )
        carried = {
            of: median(
                max(median(r[way][WARM_UP:]) for way in ("received", "sent")) for r in found[of]
            )
            for of in (kind, "fsdp")
        }
        rows.append(
            Row(
                case,
                "carried by the busier direction of a worker's link, a step",
                "S",
                carried[kind] / (2 * parameters),
                peer=carried["fsdp"] / (2 * parameters),
                peer_name="FSDP2, bf16",
            )
        )
        mine = {
            of: median(r["cpu"] / len(r["seconds"]) for r in found[of]) for of in (kind, "fsdp")
        }
        rows.append(
            Row(
                case,
                "processor time of a worker's process, a step",
                "s",
                mine[kind],
                peer=mine["fsdp"],
                peer_name="FSDP2, bf16",
            )
        )
        rows.append(
            Row(
                case,
                "peak resident of a worker",
                "MB",
                max(r["peak"] for r in found[kind]) / 1e6,
                peer=max(r["peak"] for r in found["fsdp"]) / 1e6,
                peer_name="FSDP2, bf16",
            )
        )
    for kinds in (("host", "network", "relay"), ("late", "late, relay")):
        same = all(
            [r["losses"] for r in found[kind]] == [r["losses"] for r in found[kinds[0]]]
            for kind in kinds
        )
        rows.append(
            Row(
                ", ".join(kinds),
                "losses are the same bits",
                "",
                float(same),
                goal="ours == 1",
                met=same,
            )
        )
    return Report("cluster", rows)
