"""Two Ray nodes for item `plan` of `launch`, each with a network namespace and a NIC of its own.
The emulated links between the nodes are the bottleneck. Does NOT launch a run.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.launch.scene import HostKind, Scene
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab import LabHost, LabNic, Network
from roadtrain.lab.hosts import inside
from roadtrain.launch.ray.nodes import LABEL
from roadtrain.units import MIB

PORT = 6379
CPUS = 1  # of the two processors that both nodes share
STARTS_S = 60.0
ENDS_S = 20.0
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={CPUS}")
LINKED = Scene(  # the links limit a step; Ray's own processes take a tenth of two busy processors
    "two Ray nodes",
    (HostKind("gpu", 100), HostKind("spare", 100, computes=False)),
    "server",
    accumulate=8,
    emulated=True,
)


@dataclass(frozen=True)
class LinkedNodes:
    """A running Ray cluster. `address`: address of its head. `inside`: words to put before a
    command, so that the command runs on the head's host.
    """

    address: str
    inside: tuple[str, ...]


@contextmanager
def linked_nodes(home: Path) -> Iterator[LinkedNodes]:
    """Run the two Ray nodes during the `with` block, and yield them.

    Raises:
        ConfigError: Ray is not installed
        RoadtrainError: a node did not start
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed", hint="pip install roadtrain[ray]")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nobody else can reach these networks
    home.mkdir(parents=True, exist_ok=True)
    nics = {kind.name: [LabNic(kind.rate * 1e6 / 8)] for kind in LINKED.hosts}
    # short, because the path of a Unix socket has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="rt") as short, Network(nics) as network:
        head, other = network.hosts.values()
        words = ("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={short}")
        address = f"{head.address}:{PORT}"
        with _node(head, home, words), _node(other, home, [f"--address={address}"]):
            yield LinkedNodes(address, tuple(inside(head.name, head.net, head.names, head.group)))


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


@contextmanager
def _node(host: LabHost, home: Path, words: Sequence[str]) -> Iterator[None]:
    """Run a Ray node with the name of its host during the `with` block. `words`: further arguments
    of `ray start`.
    """
    log = home / f"ray.{host.name}.log"
    more = (
        f"--node-ip-address={host.address}",
        f"--object-store-memory={128 * MIB}",
        f"--labels={LABEL}={host.name}",
    )
    with open(log, "wb") as output:
        node = host.run(
            [*RAY, *words, *more], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + STARTS_S
        while "Ray runtime started" not in log.read_text():
            if time.monotonic() > deadline or node.poll() is not None:
                raise RoadtrainError(
                    f"Ray did not start on host {host.name}: {log.read_text()[-1500:]}"
                )
            time.sleep(0.2)
        yield
    finally:
        started = _children(node.pid)
        node.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            node.wait(ENDS_S)
        _, left = psutil.wait_procs(started, timeout=ENDS_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill()
        node.wait()
