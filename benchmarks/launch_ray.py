"""Two Ray nodes on this machine for items of `launch`, each a raylet of its own, as
`ray.cluster_utils` makes them. Does NOT launch anything."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.launch_scene import HostKind, Scene
from roadtrain.errors import ConfigError

CPUS = 2
GIB = 1 << 30


def ray_scene() -> Scene:
    """Two hosts with a worker each; names and addresses are the engine's to find."""
    address = socket.gethostbyname(socket.gethostname())
    return Scene(
        "two Ray nodes",
        (HostKind("node", 1000, 2, addresses=(address, address)),),
        "zero1",
        loopback=True,
    )


@contextmanager
def on_ray(home: Path) -> Iterator[str]:
    """The cluster's address. Raises ConfigError where Ray is not installed."""
    try:
        utils = importlib.import_module("ray.cluster_utils")
    except ImportError as cause:
        raise ConfigError("Ray is not installed", hint="pip install roadtrain[ray]") from cause
    home.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": CPUS, "object_store_memory": GIB // 8}
    cluster = utils.Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield str(cluster.address)
    finally:
        cluster.shutdown()
