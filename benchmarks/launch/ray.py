"""Ray nodes on this machine for the items of `launch`, each with a raylet of its own. A dead node
is detected after 2 s instead of Ray's 15 s. Does NOT launch a run.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from roadtrain.errors import ConfigError
from roadtrain.launch.ray.nodes import LABEL
from roadtrain.units import MIB

CPUS = 2
FOUND_DEAD = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class RayNodes:
    """A running Ray cluster. `names`: names of its hosts; the first is the head. A node with the
    name "" can take the role of any host.
    """

    def __init__(self, names: Sequence[str]) -> None:
        try:
            utils = importlib.import_module("ray.cluster_utils")
        except ImportError as cause:
            raise ConfigError("Ray is not installed", hint="pip install roadtrain[ray]") from cause
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        head = {"include_dashboard": False, "_system_config": FOUND_DEAD}
        self._cluster = utils.Cluster(
            initialize_head=True, head_node_args=_options(names[0]) | head
        )
        self._nodes: dict[str, Any] = {}
        for name in names[1:]:
            self.add(name)
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str) -> None:
        self._nodes[name] = self._cluster.add_node(**_options(name))

    def kill(self, name: str) -> None:
        """Kill all Ray processes of a node with SIGKILL."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def kill_raylet(self, name: str) -> None:
        """Kill only the raylet of a node. The other processes of the node end by themselves
        later.
        """
        node = self._nodes.pop(name)
        for raylet in node.all_processes["raylet"]:
            psutil.Process(raylet.process.pid).kill()

    def close(self) -> None:
        self._cluster.shutdown()


def _options(name: str) -> dict[str, Any]:
    labelled = {"labels": {LABEL: name}, "node_name": name} if name else {}
    return {"num_cpus": CPUS, "object_store_memory": 128 * MIB} | labelled


@contextmanager
def on_nodes(*names: str) -> Iterator[RayNodes]:
    nodes = RayNodes(names)
    try:
        yield nodes
    finally:
        nodes.close()
