"""Clusters and jobs of the benchmark `launch`, written as the files that a user would write. The
model is a small Llama in fp32.

Links have 12 to 100 Mbit/s, so they limit a step. The hosts of a lab share this machine's
processors, so the speed in the cluster file is measured with as many processes as hosts that
compute at the same time. Does NOT start the processes of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.launch.run import RUN
from benchmarks.launch.speed import Speed, speed

MODEL = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
SOME = Speed(1, 1e12, 0.1, 5e9, 1e9, 1e10)
LATENCY = "50us"


@dataclass(frozen=True)
class HostKind:
    """An entry of [[hosts]] in a cluster file. `rate`: rate of a host's NIC in Mbit/s."""

    name: str
    rate: float
    count: int = 1
    computes: bool = True
    switch: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """A cluster and a job that the benchmark runs.

    Attributes:
        links: (switch, switch, Mbit/s) of each link between two switches
        at_once: number of hosts of a lab that compute at the same time, while the others wait for a
            link; 0 for all hosts
        more: further keys of the job
    """

    name: str
    hosts: tuple[HostKind, ...]
    placements: str
    links: tuple[tuple[str, str, float], ...] = ()
    switches: tuple[dict[str, Any], ...] = ()
    accumulate: int = 16  # micro-batches of a step, over all workers
    batch_size: int = 1
    seq_len: int = 32
    emulated: bool = False  # links are emulated, with any engine
    at_once: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        return sum(host.count for host in self.hosts if host.computes)

    def constants(self, on: str) -> str:
        """Return the name of the simulator's constants for this scene: "lab" for emulated links, or
        "measured".

        Args:
            on: engine that runs the processes, as in `launch --on`
        """
        return "lab" if on == "lab" or self.emulated else "measured"

    def write(self, home: Path, steps: int, on: str = "lab", samples: int = 0) -> Speed:
        """Write cluster.toml and job.toml, and return the measured speed.

        Args:
            on: engine that runs the processes, as in `launch --on`; or "files" for machines that do
                not exist, whose speed is not measured
            samples: number of samples in a micro-batch of the plan; 0 if there is no plan yet
        """
        home.mkdir(parents=True, exist_ok=True)
        (home / "job.toml").write_text(tomli_w.dumps(self._job(home, steps)))
        # the hosts of a lab share this machine's processors
        every = self.at_once or sum(host.count for host in self.hosts)
        many = every if on == "lab" else self.workers
        now = SOME if on == "files" else speed(home / "job.toml", many, samples or self.batch_size)
        (home / "cluster.toml").write_text(tomli_w.dumps(self._cluster(home, now)))
        return now

    def _job(self, home: Path, steps: int) -> dict[str, Any]:
        job: dict[str, Any] = {
            "run": {"dir": str(home / RUN), "steps": steps, "device": "cpu"},
            "model": {"config": MODEL},
            "data": {"seq_len": self.seq_len, "batch_size": self.batch_size},
            "optimizer": {"accumulate": self.accumulate, "lr": 1e-3},
        }
        for section, keys in self.more.items():
            job[section] = {**job.get(section, {}), **keys} if isinstance(keys, dict) else keys
        return job

    def _cluster(self, home: Path, now: Speed) -> dict[str, Any]:
        tree: dict[str, Any] = {
            "name": self.name,
            "hosts": [self._host(kind, home, now) for kind in self.hosts],
        }
        if self.switches:
            tree["switches"] = list(self.switches)
        if self.links:
            tree["links"] = [
                {"between": [a, b], "rate": f"{rate:g}Mbit/s"} for a, b, rate in self.links
            ]
        return tree

    def _host(self, kind: HostKind, home: Path, now: Speed) -> dict[str, Any]:
        nic = {"kind": "ethernet", "rate": f"{kind.rate:g}Mbit/s", "latency": LATENCY}
        host: dict[str, Any] = {
            "name": kind.name,
            "count": kind.count,
            "memory": "4GB",
            "memory_rate": f"{now.memory_rate:.0f}B/s",
            "updates": f"{now.updates:.0f}B/s",
            "sums": f"{now.sums:.0f}B/s",
            "nics": [nic | ({"switch": kind.switch} if kind.switch else {})],
        }
        if kind.addresses:
            host["addresses"] = list(kind.addresses)
        if kind.computes:
            device = {
                "kind": "cpu",
                "flops": f"{now.flops / 1e9:.3f}GFLOP/s",
                "memory": "3GB",
                "memory_rate": f"{now.memory_rate:.0f}B/s",
                "copy": f"{now.memory_rate:.0f}B/s",
            }
            host |= {"devices": 1, "device": device}
        return host


SERVER = Scene(
    "two workers and a server",
    (
        HostKind("gpu", 100, 2, addresses=("10.9.0.1", "10.9.0.2")),
        HostKind("spare", 100, computes=False, addresses=("10.9.0.3",)),
    ),
    "server",
)
CLUSTERS = Scene(
    "two clusters in stages",
    (
        HostKind("left", 50, 2, switch="west", addresses=("10.9.1.1", "10.9.1.2")),
        HostKind("right", 50, 2, switch="east", addresses=("10.9.2.1", "10.9.2.2")),
    ),
    "zero1",
    links=(("west", "east", 12),),
    switches=({"name": "west"}, {"name": "east"}),
    accumulate=32,  # so that a step sends far more than the 80 kB burst of a lab's link
    seq_len=128,  # so that a micro-batch computes for longer than Python's overhead
    at_once=2,
)
SUMS = Scene(
    "two workers and two hosts that sum",
    (
        HostKind("gpu", 100, 2, addresses=("10.9.0.1", "10.9.0.2")),
        HostKind("spare", 100, 2, computes=False, addresses=("10.9.0.3", "10.9.0.4")),
    ),
    "summation",
)
# two Ray nodes with a worker each, without names or addresses
RAY_NODES = Scene("two Ray nodes", (HostKind("node", 1000, 2),), "zero1", accumulate=64, seq_len=64)
STAGES = Scene(
    "four hosts in a lab",
    (HostKind("gpu", 25, 4),),
    "zero1",
    accumulate=64,
    seq_len=64,
    at_once=2,
)
# each pass moves all parameters, so two passes of one worker take less time than a slow link
SERVED = replace(SERVER, accumulate=2)
