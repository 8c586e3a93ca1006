"""A Ray cluster as a launch sees it: how it is reached, its nodes, which of them leave.

Ray has no public call that tells a program of drained nodes (2.60: `ray drain-node`, and notices of
spot machines through the autoscaler); `get_draining_nodes` is what Ray Train itself uses.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import psutil
import ray
from ray._private.state import state as ray_state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roadtrain.errors import LaunchError
from roadtrain.launch.ray.nodes import LABEL, NOTICE_S, RayNode
from roadtrain.transport.address import address_of

NAMESPACE = "roadtrain"  # of all our actors
CONNECT_S = 10.0
NODE_PROCESS, HEADS_ADDRESS = "raylet", "--gcs-address="  # Ray's process of a node
HEAD = "node:__internal_head__"  # a resource of the head alone


def connect(address: str) -> None:
    """This process becomes a driver of the cluster. address: of its head, HOST:PORT; "" or "auto":
    the one that this host is a node of. Raises LaunchError, ConfigError."""
    _answers(address)
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        first = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"no Ray cluster is reached at {address or 'auto'}: {first}",
            hint="`ray start --head` begins one; --ray-address HOST:PORT names it",
        ) from error


def _answers(address: str) -> None:
    """Raises LaunchError soon: Ray itself tries for minutes."""
    if address in ("", "auto"):
        return
    try:
        socket.create_connection(address_of(address), timeout=CONNECT_S).close()
    except OSError as error:
        raise LaunchError(
            f"no Ray cluster is reached at {address}: {error}",
            hint="`ray start --head --port=PORT` begins one",
        ) from error


def has_node_here(address: str) -> bool:
    """Whether a node of the cluster runs on this host, though its head may not answer. address: as
    of `connect`."""
    port = "" if address in ("", "auto") else f":{address_of(address)[1]}"
    words = (
        word
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == NODE_PROCESS
        for word in process.info["cmdline"] or ()
    )
    return any(word.startswith(HEADS_ADDRESS) and word.endswith(port) for word in words)


def disconnect() -> None:
    ray.shutdown()


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """There and nowhere else."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def nodes() -> list[RayNode]:
    """Those that are alive."""
    leaving = ray_state.get_draining_nodes()
    return [_node(one, leaving) for one in ray.nodes() if one["Alive"]]


def reasons() -> dict[str, str]:
    """Node id -> why it is dead."""
    return {one["NodeID"]: one["DeathReasonMessage"] for one in ray.nodes() if not one["Alive"]}


def _node(one: dict[str, Any], leaving: dict[str, int]) -> RayNode:
    resources = one["Resources"]
    node_id = one["NodeID"]
    leaves_in_s = None
    if node_id in leaving:
        deadline_ms = leaving[node_id]
        leaves_in_s = max(0.0, deadline_ms / 1e3 - time.time()) if deadline_ms else NOTICE_S
    return RayNode(
        node_id,
        one["NodeName"],
        one["NodeManagerAddress"],
        one["NodeManagerHostname"],
        one["Labels"].get(LABEL, ""),
        int(resources.get("CPU", 0)),
        int(resources.get("GPU", 0)),
        int(resources.get("memory", 0)),
        leaves_in_s,
        HEAD in resources,
    )
