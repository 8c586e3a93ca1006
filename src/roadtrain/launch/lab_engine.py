"""LabEngine: a LaunchEngine that emulates the plan's cluster on this machine. Needs root.

Each host is a network namespace and has an even share of the processors. Network cards, SSDs and
the links between switches have the rates of the plan's cluster. Each host has private directories
at the mount points of its SSDs and at /dev/shm, and shares the rest of the file system with this
machine. Private files are kept after the run, so that the run can be resumed. Does NOT emulate
devices or latency.

The lab has these verbs (`LaunchEngine.run_verb`):

    rate HOST NIC RATE        set the rate of a card, as in `rate gpu0 0 100Mbit/s`
    link SWITCH SWITCH RATE   set the rate of a link between switches
    hold HOST, comes HOST     emulate switching a host off and on
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from roadtrain.config.cluster import Ssd
from roadtrain.config.job import load_job
from roadtrain.config.plan_file import PlanFile
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.lab import (
    LabHost,
    LoopDevice,
    Network,
    Throttle,
    cpus_available,
    lab_available,
    network_available,
    sweep,
)
from roadtrain.launch.agent_link import AgentHost
from roadtrain.launch.agents import HostAgents
from roadtrain.launch.here import worker_threads
from roadtrain.launch.home import LaunchRecord, RunHome, StartPhase
from roadtrain.launch.lab_shape import check_rates, lab_shape
from roadtrain.launch.protocol.run_events import Output
from roadtrain.storage import mark as run_mark
from roadtrain.storage.direct import free_nbytes
from roadtrain.storage.rates import storage_rates
from roadtrain.units import GIB, parse_rate

SSD_MOST = 16 * GIB  # largest size of an emulated SSD in bytes
FREE = 0.8  # share of this machine's free space that all emulated SSDs together may use
SHM = Path("/dev/shm")
# A shell command that runs in a mount namespace. Its arguments are pairs of directories to
# bind-mount, `--`, and the command to run.
BIND = 'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 1; shift 2; done; shift; exec "$@"'


class LabEngine(HostAgents):
    """An emulated cluster and the agents on its hosts. `mark`: the label of the run's processes
    (see HostAgents). `directory`: a directory for the content of the hosts' SSDs, which is kept
    after the run. Raises ConfigError if a lab cannot emulate the cluster, and LaunchError if an
    agent does not start."""

    verbs = f"{HostAgents.verbs}, rate HOST NIC RATE, link A B RATE"

    def __init__(self, plan_file: PlanFile, mark: str, directory: Path) -> None:
        if plan_file.cluster is None or plan_file.machines is None:
            raise ConfigError(
                "the plan lacks a cluster or machines, but a lab needs both",
                hint="roadtrain plan CLUSTER.toml --job JOB.toml writes a plan with both",
            )
        if why := network_available():
            raise ConfigError(f"cannot create a lab: {why}", hint="run as root, or use --on here")
        self._shape = shape = lab_shape(plan_file.cluster, plan_file.machines)
        self._directory = directory
        self._threads = worker_threads(plan_file.machines)
        self._binds: dict[str, list[str]] = {name: [] for name in shape.hosts}
        self._throttles: dict[str, Throttle] = {}
        self._notes: list[str] = [f"not emulated: {part}" for part in shape.left_out()]
        self._made = ExitStack()
        sweep()
        with ExitStack() as stack:
            stack.callback(self._tidy_shm, mark)
            self._make_directories(mark, stack)
            self._network = stack.enter_context(
                Network(
                    {name: shape.nics(name) for name in shape.hosts}, shape.links(), self._cpus()
                )
            )
            super().__init__([self._agent_host(name) for name in shape.workers], mark)
            self._made = stack.pop_all()
        self._events += [Output("agent", "", note) for note in self._notes]

    def close(self) -> None:
        super().close()
        self._made.close()

    def run_verb(self, words: Sequence[str]) -> str:
        match words:
            case ["rate", host, nic, rate] if nic.isdecimal():
                cards = self._lab_host(host).nics
                if int(nic) >= len(cards):
                    raise LaunchError(f"host {host} has cards 0 to {len(cards) - 1}, no card {nic}")
                cards[int(nic)].set_rate(parse_rate(rate))
                return f"the rate of card {nic} of {host} is now {rate}"
            case ["link", a, b, rate]:
                links = self._network.links
                if (link := links.get((a, b)) or links.get((b, a))) is None:
                    raise LaunchError(f"the lab has no link between the switches {a!r} and {b!r}")
                link.set_rate(parse_rate(rate))
                return f"the rate of the link between {a} and {b} is now {rate}"
        return super().run_verb(words)

    def _new_host(self, name: str) -> AgentHost | None:
        return self._agent_host(name) if name in self._shape.hosts else None

    def _lab_host(self, name: str) -> LabHost:
        if name not in self._network.hosts:
            names = ", ".join(self._network.hosts)
            raise LaunchError(f"the lab has no host {name!r}", hint=f"the lab's hosts are {names}")
        return self._network.hosts[name]

    def _cpus(self) -> dict[str, float]:
        if why := cpus_available():
            self._notes.append(f"the hosts' shares of the processors are not enforced: {why}")
            return {}
        share = len(os.sched_getaffinity(0)) / len(self._shape.workers)
        return dict.fromkeys(self._shape.hosts, share)

    def _agent_host(self, name: str) -> AgentHost:
        return AgentHost(
            name,
            self._network.hosts[name].nics[self._shape.cards[name]].address,
            partial(self._spawn, name),
            self._shape.workers.get(name, self._shape.hosts[name].devices),
            threads=self._threads,
        )

    def _spawn(self, name: str, words: Sequence[str], **popen: Any) -> Any:
        """Start a command on a lab host, with its private directories and the rates of its SSDs."""
        argv = ["sh", "-c", BIND, "sh", *self._binds[name], "--", *words]
        process = self._network.hosts[name].run(argv, **popen)
        if (throttle := self._throttles.get(name)) is not None:
            throttle.enter_process(process.pid)
        return process

    def _make_directories(self, mark: str, stack: ExitStack) -> None:
        """Create the private directories of each host: for /dev/shm, and for each mount point of
        its SSDs."""
        for name in self._shape.hosts:
            own = kept_memory(mark) / name
            own.mkdir(parents=True, exist_ok=True)
            self._binds[name] += [str(own), str(SHM)]
        ssds = {name: self._shape.ssds(name) for name in self._shape.hosts}
        every = [ssd for of_host in ssds.values() for _, ssd in of_host]
        if not every:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if why := lab_available():
            self._notes.append(f"SSDs are plain directories without their emulated rates: {why}")
        else:
            real = storage_rates(self._directory)
            check_rates(every, real.read, real.write)
        for name, of_host in ssds.items():
            for n, (directory, ssd) in enumerate(of_host):
                source = self._directory / f"{name}.ssd{n}"
                if not why:
                    device = stack.enter_context(
                        LoopDevice(f"{source}.img", self._room(ssd, len(every)), keep=True)
                    )
                    limits = Throttle([device], ssd.read, ssd.write)
                    # A process can be in only one cgroup, so a host's SSDs share one Throttle.
                    if (first := self._throttles.setdefault(name, limits)) is not limits:
                        first.limits += limits.limits
                    source = device.mount
                source.mkdir(exist_ok=True)
                _make_mount_point(Path(directory), stack)
                self._binds[name] += [str(source), directory]
        for throttle in self._throttles.values():
            stack.enter_context(throttle)

    def _room(self, ssd: Ssd, many: int) -> int:
        """Return the size in bytes for an emulated SSD, if `many` emulated SSDs share this
        machine's disk."""
        free = int(free_nbytes(self._directory) * FREE) // many
        return min(int(ssd.capacity) or SSD_MOST, SSD_MOST, free)

    @staticmethod
    def _tidy_shm(mark: str) -> None:
        """Remove the shared-memory files that killed processes have left, but keep directories,
        which may be stores."""
        kept = kept_memory(mark)
        for path in kept.glob("*/*"):
            if not path.is_dir():
                path.unlink()
        for directory in (*kept.glob("*"), kept):
            _remove_empty(directory)


def lab_engine(plan_file: PlanFile, record: LaunchRecord) -> LabEngine:
    """Create the lab of a launch. A new run first removes the files of an older run of the same
    name. Raises ConfigError and LaunchError like LabEngine."""
    home = RunHome.of(record.name)
    directory = home.path / "lab"
    # True if an earlier supervisor of this start has checked the hosts.
    begun = StartPhase.CHECKED in home.state().stamps
    if record.start == 0 and not begun and not _has_trained(home, record):
        remove_directories(record.mark, directory)
    return LabEngine(plan_file, record.mark, directory)


def _has_trained(home: RunHome, record: LaunchRecord) -> bool:
    """Return True if the run's directory has a file that training writes (mark.json or
    metrics.jsonl)."""
    job = load_job(home.job_path)
    directory = Path(record.directory, job.run.dir)
    return any((directory / name).exists() for name in (run_mark.NAME, "metrics.jsonl"))


def remove_directories(mark: str, directory: Path) -> None:
    """Remove all files that a run has left for its lab. The arguments are those of LabEngine."""
    for kept in (kept_memory(mark), directory):
        shutil.rmtree(kept, ignore_errors=True)


def kept_memory(mark: str) -> Path:
    """Return the directory that contains the /dev/shm of each host of a run. `mark`: the label of
    the run's processes."""
    return SHM / f"roadtrain-run-{hashlib.sha256(mark.encode()).hexdigest()[:16]}"


def _make_mount_point(directory: Path, stack: ExitStack) -> None:
    """Create the directory for a mount point. Closing `stack` removes the directories that this
    call has created."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        stack.callback(_remove_empty, path)


def _remove_empty(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
