"""The lab of `fanin`: hosts for workers, for one server (host `node`) and for switches. The links
of the workers' hosts and of host `node` have the same rate in each direction.

The NIC of a switch's host is never the bottleneck. With `racks = 2`, each rack has a bridge for its
hosts, whose link to the other bridges has the rate of a worker's link. Bytes are counted as whole
frames. Does NOT train; worker.py does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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

from benchmarks.crosscluster.lab import Rank, _all
from benchmarks.fanin.worker import WARM_UP, WorkerSpec
from roadtrain.errors import DeadlineError, RoadtrainError
from roadtrain.lab import LabHost, LabLink, LabNic, Network, Traffic
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

    @property
    def per_rack(self) -> int:
        return self.workers // self.racks

    def rack_of(self, worker: int) -> str:
        return SPINE if self.racks == 1 else f"rack{worker // self.per_rack}"

    @property
    def rack_names(self) -> list[str]:
        return [] if self.racks == 1 else [f"rack{r}" for r in range(self.racks)]

    def network(self) -> Network:
        hosts = {f"w{w}": [LabNic(self.rate, self.rack_of(w))] for w in range(self.workers)}
        hosts |= {NODE: [LabNic(self.rate, SPINE)], ROOT: [LabNic(FAST, SPINE)]}
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

    seconds: float
    """Median seconds of a measured step, until its last worker has finished."""

    losses: list[list[float]]
    """Losses of each step, for each worker."""

    frames: dict[str, Traffic]
    """Bytes by link ("w0", "node", "rack0-spine"): sent by the first end, and received by it."""

    busy: float
    """Share of the machine's processors that was busy, including other programs."""

    cpu: dict[str, float]
    """Processor seconds by role, over all its processes."""

    logs: dict[str, str] = field(default_factory=dict)
    """Output of the processes, by role."""


class FanInRank(Rank):
    MODULE = "benchmarks.fanin.worker"


class Lab:
    """The network of a scene, used as a context manager."""

    def __init__(self, scene: Scene, home: Path) -> None:
        self.scene, self.home = scene, home
        self.network = scene.network()
        self.token = home / "token"
        self.servers: dict[str, psutil.Process] = {}
        self._made = ExitStack()

    def __enter__(self) -> Lab:
        self.home.mkdir(parents=True, exist_ok=True)
        write_token(self.token)
        self._made.enter_context(self.network)
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    # processes beside the workers

    @contextmanager
    def serving(self, *, switches: bool) -> Iterator[str]:
        """Run a server with an empty store during the `with` block, and yield its address. If
        `switches`, also run the switches.
        """
        store = Path(tempfile.mkdtemp(prefix="roadtrain-bench-", dir="/dev/shm"))
        address = f"{self.network.hosts[NODE].address}:{SERVER_PORT}"
        running = []
        try:
            if switches:
                for host in self.switch_hosts:
                    running.append(self._serve(host, SWITCH_PORT, "--switch", "--memory", MEMORY))
            more = ("--store", str(store / "part"), "--budget", "1500MiB")
            running.append(self._serve(self.network.hosts[NODE], SERVER_PORT, *more))
            yield address
        finally:
            for process in running:
                process.terminate()
            for process in running:
                _ended(process)
            shutil.rmtree(store, ignore_errors=True)
            self.servers = {}

    @property
    def switch_hosts(self) -> list[LabHost]:
        return [host for name, host in self.network.hosts.items() if name.startswith(ROOT)]

    def _serve(self, host: LabHost, port: int, *words: str) -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", "roadtrain.cli", "serve", f"{host.address}:{port}"]
        with self.log(host.name).open("w") as out:
            process = host.run(
                [*command, *words, "--token-file", str(self.token)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self.servers[host.name] = psutil.Process(process.pid)
        return process

    def log(self, host: str) -> Path:
        return self.home / f"{host}.log"

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

    def train(self, spec: WorkerSpec, wire: str | None = None) -> Measured:
        """Train with one worker on each worker host, and return the measurements. `wire`: integer
        format in which switches sum gradients; if None, switches do not sum.
        """
        if spec.method != "ours":
            return self._train(replace(spec, master=self.network.hosts["w0"].address))
        with self.serving(switches=wire is not None) as address:
            fan_in = self.scene.fan_in(self.network, wire) if wire else None
            full = replace(spec, servers=(address,), token=str(self.token), fan_in=fan_in)
            return self._train(full)

    def _train(self, spec: WorkerSpec) -> Measured:
        self.set_rate(PLACING)
        ranks = self.start(spec)
        try:
            return self._measured(spec, ranks)
        except (RoadtrainError, OSError) as error:
            raise RoadtrainError(f"{error}\n{self._last_words()}") from error
        finally:
            end(ranks)

    def start(self, spec: WorkerSpec) -> list[FanInRank]:
        """Start the processes of all workers, and wait until each has placed its model."""
        spec.write(path := self.home / "spec.json")
        world = self.scene.workers
        hosts = [self.network.hosts[f"w{w}"] for w in range(world)]
        ranks = [FanInRank(host, path, r, world, self.home) for r, host in enumerate(hosts)]
        try:
            self._all(ranks, "imported", START_S)
            go(ranks)
            self._all(ranks, "ready", START_S)
        except BaseException:
            end(ranks)
            raise
        self.set_rate(self.scene.rate)
        if self.scene.loss is not None:
            for name in (NODE, *(f"w{w}" for w in range(world))):
                self.links[name].set_loss(self.scene.loss)
        return ranks

    def warm_up(self, ranks: Sequence[FanInRank]) -> None:
        """Let all workers run their first steps, and wait until all have paused."""
        go(ranks)
        self._all(ranks, "warm", RUN_S)

    def _all(self, ranks: Sequence[FanInRank], what: str, within_s: float) -> list[dict[str, Any]]:
        try:
            return _all(ranks, what, within_s)
        except RoadtrainError as error:
            raise RoadtrainError(f"{error}\n{self._last_words()}") from error

    def _measured(self, spec: WorkerSpec, ranks: Sequence[FanInRank]) -> Measured:
        roles = {"worker": [psutil.Process(rank.process.pid) for rank in ranks]}
        roles |= {name: [process] for name, process in self.servers.items()}
        self.warm_up(ranks)
        frames, cpu, machine = self._still(), _cpu(roles), psutil.cpu_times()
        go(ranks)
        self._all(ranks, "done", RUN_S)
        busy, steps = _busy(machine, psutil.cpu_times()), spec.steps - WARM_UP
        cpu = {role: then / steps for role, then in _minus(_cpu(roles), cpu).items()}
        after = self._still()
        go(ranks)
        results = self._all(ranks, "result", START_S)
        logs = {name: self.log(name).read_text() for name in self.servers}
        logs["worker"] = ranks[0].errors.read_text()
        return Measured(
            step_seconds(results),
            [result["losses"] for result in results],
            {name: _per_step(after[name] - then, steps) for name, then in frames.items()},
            busy,
            cpu,
            logs=logs,
        )

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
        logs = sorted(self.home.glob("*.log")) + sorted(self.home.glob("errors*"))
        return "\n".join(f"-- {log.name}: {log.read_text()[-1500:]}" for log in logs)


def go(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.go_on()


def end(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


def step_seconds(results: Sequence[Mapping[str, Any]]) -> float:
    """Return the median seconds of a step, without the warm-up steps and the step after them. A
    step ends when its last worker has finished.
    """
    ends = [max(of_step) for of_step in zip(*(result["ends"] for result in results))]
    return median(after - before for before, after in pairwise(ends[WARM_UP:]))


def _per_step(traffic: Traffic, steps: int) -> Traffic:
    return Traffic(round(traffic.sent / steps), round(traffic.received / steps))


def _cpu(roles: Mapping[str, Sequence[psutil.Process]]) -> dict[str, float]:
    times = {role: [process.cpu_times() for process in some] for role, some in roles.items()}
    return {role: sum(t.user + t.system for t in some) for role, some in times.items()}


def _minus(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
    return {role: seconds - then[role] for role, seconds in now.items()}


def _busy(then: Any, now: Any) -> float:
    idle = now.idle + now.iowait - then.idle - then.iowait
    whole = sum(now) - sum(then)
    return 1 - idle / whole


def _ended(process: subprocess.Popen[Any]) -> None:
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(what: str, done: Any, within_s: float) -> float:
    """Wait until `done()` is true, and return the seconds waited. Raises DeadlineError, which names
    the event `what`, after `within_s` seconds.
    """
    begin = time.monotonic()
    while not done():
        if time.monotonic() - begin > within_s:
            raise DeadlineError(f"waited {within_s:.0f} s for {what}")
        time.sleep(0.01)
    return time.monotonic() - begin
