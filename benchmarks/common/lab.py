"""A lab that trains with servers: hosts for workers, for servers and for switches. The links of all
hosts but the switches' have the same rate in each direction.

The NIC of a switch's host is never the bottleneck. With `racks = 2`, each rack has a bridge for its
hosts, whose link to the other bridges has the rate of a worker's link. Bytes are counted as whole
frames. Does NOT train; lab_worker.py does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.common.children import Child, Server, go_on, running, serving, wait_for_all
from benchmarks.common.lab_worker import WARM_UP, WorkerSpec, work
from roadtrain.errors import DeadlineError, RoadtrainError
from roadtrain.lab import LabLink, LabNic, Network, Traffic
from roadtrain.transport.address import write_token

MBIT = 1e6 / 8
RATE = 400 * MBIT
FAST = 10_000 * MBIT  # rate of a switch's host
PLACING = 4_000 * MBIT  # of all links while models are placed, which is not measured
SERVER_PORT, SWITCH_PORT = 7000, 7100
MEMORY = "512MiB"  # memory of a switch: its socket buffers all that the workers may have in flight
NODE, ROOT, SPINE = "node", "switch", "spine"
STILL_S, STILL_BYTES = 1.0, 50_000  # links that carry less in this time carry only heartbeats
RUN_S, START_S = 600.0, 300.0
FRAME, PAYLOAD = 14 + 28 + 1456, 1408  # bytes of a packet on the link, and of its payload
CARRIED = PAYLOAD / FRAME  # share of the rate that carries payload of datagrams


@dataclass(frozen=True)
class Scene:
    workers: int
    rate: float = RATE
    racks: int = 1
    loss: float | None = None
    """Probability that a packet is lost, in each direction at the NICs of workers and node. None:
    no emulated loss, and packets are segmented and coalesced as network cards do.
    """

    servers: int = 0
    """Number of hosts s0, s1, ... for servers; 0: one host `node`, and hosts for switches."""

    @property
    def per_rack(self) -> int:
        return self.workers // self.racks

    def rack_of(self, worker: int) -> str:
        return SPINE if self.racks == 1 else f"rack{worker // self.per_rack}"

    @property
    def rack_names(self) -> list[str]:
        return [] if self.racks == 1 else [f"rack{r}" for r in range(self.racks)]

    @property
    def server_names(self) -> list[str]:
        return [f"s{i}" for i in range(self.servers)] or [NODE]

    def network(self) -> Network:
        hosts = {f"w{w}": [LabNic(self.rate, self.rack_of(w))] for w in range(self.workers)}
        hosts |= {name: [LabNic(self.rate, SPINE)] for name in self.server_names}
        if not self.servers:
            hosts[ROOT] = [LabNic(FAST, SPINE)]
        hosts |= {f"{ROOT}-{rack}": [LabNic(FAST, rack)] for rack in self.rack_names}
        return Network(hosts, {(rack, SPINE): self.rate for rack in self.rack_names})

    def fan_in(self, network: Network, wire: str) -> dict[str, Any]:
        """Return the table `fan_in` of a job file, which describes the tree of switches. `wire`:
        integer format of the gradients.
        """

        def at(host: str) -> str:
            return f"{network.hosts[host].address}:{SWITCH_PORT}"

        if not self.rack_names:
            return {"switches": [{"address": at(ROOT), "workers": []}], "wire": wire}
        racks = [
            {
                "address": at(f"{ROOT}-{rack}"),
                "parent": at(ROOT),
                "workers": [w for w in range(self.workers) if self.rack_of(w) == rack],
            }
            for rack in self.rack_names
        ]
        return {"switches": [{"address": at(ROOT), "workers": []}, *racks], "wire": wire}


@dataclass(frozen=True)
class Measured:
    """Result of one run. Bytes and processor seconds are those of one step."""

    steps: list[float]
    """Seconds of each measured step, until its last worker has finished."""

    results: list[dict[str, Any]]
    """The result of each worker (lab_worker.train)."""

    frames: dict[str, Traffic]
    """Bytes by link ("w0", "node", "rack0-spine"): sent by the first end, and received by it."""

    busy: float
    """Share of the machine's processors that was busy, including other programs."""

    cpu: dict[str, float]
    """Processor seconds by role, over all its processes."""

    logs: dict[str, str] = field(default_factory=dict)
    """Output of the processes, by role."""

    @property
    def seconds(self) -> float:
        return median(self.steps)

    @property
    def losses(self) -> list[list[float]]:
        """Losses of each step, for each worker."""
        return [result["losses"] for result in self.results]


class Lab:
    """The network of a scene, used as a context manager."""

    def __init__(self, scene: Scene, home: Path, server_budget: str = "1500MiB") -> None:
        self.scene, self.home, self.server_budget = scene, home, server_budget
        self.network = scene.network()
        self.token = home / "token"
        self.servers: dict[str, Server] = {}

    def __enter__(self) -> Lab:
        self.home.mkdir(parents=True, exist_ok=True)
        write_token(self.token)
        self.network.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.network.__exit__(*error)

    # processes beside the workers

    @contextmanager
    def serving(self, names: Sequence[str], *, switches: bool) -> Iterator[list[str]]:
        """Run a server with an empty store on each of the named hosts during the `with` block, and
        yield their addresses. If `switches`, also run the switches.
        """
        with ExitStack() as stack:
            shm = tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir="/dev/shm")
            stores = stack.enter_context(shm)
            stack.callback(self.servers.clear)

            def start(name: str, port: int, *words: str) -> str:
                host, token = self.network.hosts[name], ("--token-file", str(self.token))
                server = serving(self.home, *words, *token, name=name, port=port, host=host)
                self.servers[name] = stack.enter_context(server)
                return self.servers[name].address

            for name in self.network.hosts:
                if switches and name.startswith(ROOT):
                    start(name, SWITCH_PORT, "--switch", "--memory", MEMORY)
            budget = ("--budget", self.server_budget)
            yield [
                start(name, SERVER_PORT, "--store", f"{stores}/{name}", *budget) for name in names
            ]

    # links

    @property
    def links(self) -> dict[str, LabLink]:
        """Map the name of each link to the link, except for the links of the switches' hosts."""
        hosts = self.network.hosts
        own = {name: host.nics[0] for name, host in hosts.items() if not name.startswith(ROOT)}
        return own | {f"{a}-{b}": link for (a, b), link in self.network.links.items()}

    def set_rate(self, rate: float) -> None:
        for link in self.links.values():
            link.set_rate(rate)

    def frames(self) -> dict[str, Traffic]:
        return {name: link.frames() for name, link in self.links.items()}

    # runs

    def train(
        self, spec: WorkerSpec, wire: str | None = None, servers: Sequence[str] = ()
    ) -> Measured:
        """Train with one worker on each worker host, and return the measurements.

        Args:
            wire: integer format in which switches sum gradients; if None, switches do not sum
            servers: names of the hosts that serve; by default, those of the scene
        """
        if spec.method != "ours":
            return self._measured(replace(spec, master=self.network.hosts["w0"].address))
        names = servers or self.scene.server_names
        with self.serving(names, switches=wire is not None) as addresses:
            fan_in = self.scene.fan_in(self.network, wire) if wire else None
            return self._measured(self.served(spec, addresses, fan_in))

    def served(
        self, spec: WorkerSpec, addresses: Sequence[str], fan_in: dict[str, Any] | None
    ) -> WorkerSpec:
        servers, token = tuple(addresses), str(self.token)
        return replace(spec, servers=servers, token=token, fan_in=fan_in)

    @contextmanager
    def started(self, spec: WorkerSpec) -> Iterator[list[Child]]:
        """Run the processes of all workers during the `with` block, and yield them when each has
        run its first steps and paused.
        """
        self.set_rate(PLACING)
        world = self.scene.workers
        hosts = [self.network.hosts[f"w{w}"] for w in range(world)]
        each = [{"spec": spec, "rank": rank, "world": world} for rank in range(world)]
        try:
            with running(work, each, self.home, hosts=hosts) as ranks:
                wait_for_all(ranks, "imported", START_S)
                go_on(ranks)
                wait_for_all(ranks, "ready", START_S)
                self.set_rate(self.scene.rate)
                if self.scene.loss is not None:
                    for host in (*hosts, self.network.hosts[NODE]):
                        host.nics[0].set_loss(self.scene.loss)
                go_on(ranks)
                wait_for_all(ranks, "warm", RUN_S)
                yield ranks
        except (RoadtrainError, OSError) as error:
            raise RoadtrainError(f"{error}\n{self._last_words()}") from error

    def _measured(self, spec: WorkerSpec) -> Measured:
        with self.started(spec) as ranks:
            roles = {"worker": [psutil.Process(rank.process.pid) for rank in ranks]}
            roles |= {name: [psutil.Process(s.process.pid)] for name, s in self.servers.items()}
            frames, cpu, machine = self._still(), _cpu(roles), psutil.cpu_times()
            go_on(ranks)
            wait_for_all(ranks, "done", RUN_S)
            busy, steps = _busy(machine, psutil.cpu_times()), spec.steps - WARM_UP
            cpu = {role: (then - cpu[role]) / steps for role, then in _cpu(roles).items()}
            after = self._still()
            go_on(ranks)
            results = wait_for_all(ranks, "result", START_S)
        logs = {name: server.log.read_text() for name, server in self.servers.items()}
        logs["worker"] = (self.home / "work0.log").read_text()
        moved = {name: _per_step(after[name] - then, steps) for name, then in frames.items()}
        return Measured(step_seconds(results), results, moved, busy, cpu, logs)

    def _still(self) -> dict[str, Traffic]:
        """Wait until all traffic of the last step has ended, and return the byte counts of the
        links.
        """
        then, until = self.frames(), time.monotonic() + RUN_S
        while time.monotonic() < until:
            time.sleep(STILL_S)
            now = self.frames()
            moved = (now[name] - before for name, before in then.items())
            if all(max(by.sent, by.received) < STILL_BYTES for by in moved):
                return now
            then = now
        raise DeadlineError(f"links still carry data {RUN_S:.0f} s after a step")

    def _last_words(self) -> str:
        logs = sorted(self.home.glob("*.log"))
        return "\n".join(f"-- {log.name}: {log.read_text()[-1500:]}" for log in logs)


def step_seconds(results: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of each step, without the warm-up steps and the step after them. A step
    ends when its last worker has finished.
    """
    ends = [max(of_step) for of_step in zip(*(result["ends"] for result in results))]
    return [after - before for before, after in pairwise(ends[WARM_UP:])]


def _per_step(traffic: Traffic, steps: int) -> Traffic:
    return Traffic(round(traffic.sent / steps), round(traffic.received / steps))


def _cpu(roles: Mapping[str, Sequence[psutil.Process]]) -> dict[str, float]:
    times = {role: [process.cpu_times() for process in some] for role, some in roles.items()}
    return {role: sum(t.user + t.system for t in some) for role, some in times.items()}


def _busy(then: Any, now: Any) -> float:
    idle = now.idle + now.iowait - then.idle - then.iowait
    whole = sum(now) - sum(then)
    return 1 - idle / whole
