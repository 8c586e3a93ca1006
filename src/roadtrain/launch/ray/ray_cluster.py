"""Access to a Ray cluster: connect to the cluster, list its nodes, and request nodes.

Ray (2.60) has no public API that lists drained nodes, so this module uses `get_draining_nodes`, as
Ray itself does.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray._private.state import state as ray_state
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roadtrain.errors import LaunchError
from roadtrain.launch.ray.nodes import LABEL, NOTICE_S, RayNode
from roadtrain.transport.address import address_of

NAMESPACE = "roadtrain"  # Ray's namespace for all actors of roadtrain
CONNECT_S = 10.0  # timeout of a connection to the cluster's head
# The name of a node's process, and its argument that gives the address of the head.
NODE_PROCESS, HEADS_ADDRESS = "raylet", "--gcs-address="
# Environment variable with the user's OMP_NUM_THREADS or "". Needed because Ray sets
# OMP_NUM_THREADS in its own processes.
USERS_THREADS = "ROADTRAIN_USERS_THREADS"
HEAD = "node:__internal_head__"  # a resource that only the head has


def connect(address: str) -> None:
    """Make this process a driver of a cluster. `address`: the HOST:PORT of the cluster's head; ""
    or "auto" for the cluster of this host's node. Raises LaunchError if the connection fails, and
    ConfigError if the address is not valid."""
    _check_reachable(address)
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
            f"cannot connect to a Ray cluster at {address or 'auto'}: {first}",
            hint="`ray start --head` starts a cluster; --ray-address HOST:PORT selects one",
        ) from error


def _check_reachable(address: str) -> None:
    """Raise LaunchError if nothing listens at `address`. Ray itself would retry for minutes."""
    if address in ("", "auto"):
        return
    try:
        socket.create_connection(address_of(address), timeout=CONNECT_S).close()
    except OSError as error:
        raise LaunchError(
            f"cannot connect to a Ray cluster at {address}: {error}",
            hint="`ray start --head --port=PORT` starts a cluster",
        ) from error


def has_node_here(address: str) -> bool:
    """Return True if this host runs a node of the cluster, even if the cluster's head does not
    answer. `address`: as in `connect`."""
    heads = [
        word.removeprefix(HEADS_ADDRESS)
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == NODE_PROCESS
        for word in process.info["cmdline"] or ()
        if word.startswith(HEADS_ADDRESS)
    ]
    if address in ("", "auto"):
        return bool(heads)
    return any(is_same(address, head) for head in heads)


def is_same(address: str, other: str) -> bool:
    """Return True if two texts HOST:PORT can mean the same server. A host name that cannot be
    resolved matches any host."""
    (host, port), (other_host, other_port) = address_of(address), address_of(other)
    if port != other_port:
        return False
    found, others = addresses_of(host), addresses_of(other_host)
    return not found or not others or bool(found & others)


def addresses_of(host: str) -> set[str]:
    """Return the IP addresses of a host, of all network interfaces if it is this host. The set is
    empty if the name cannot be resolved."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
    own = {nic.address for addresses in psutil.net_if_addrs().values() for nic in addresses}
    return found | own if found & own else found


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy that places an actor or a task on this node only."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def nodes() -> list[RayNode]:
    """Return the nodes of the cluster that are alive."""
    leaving = ray_state.get_draining_nodes()
    return [_node(info, leaving) for info in ray.nodes() if info["Alive"]]


def request_nodes(places: Sequence[Mapping[str, int]]) -> None:
    """Ask Ray's autoscaler to keep enough nodes for the resources in `places`, and to replace nodes
    that die. (The autoscaler does not replace the node of an actor that is bound to a node.) An
    empty sequence withdraws the request. A cluster has only one such request, so this call replaces
    the request of any other program."""
    with suppress(RayError, RuntimeError, OSError):
        request_resources(bundles=[dict(place) for place in places])


def why_dead(node_id: str) -> str:
    """Return the reason why a node is dead, or "" if Ray does not know it."""
    dead = {node["NodeID"]: node["DeathReasonMessage"] for node in ray.nodes() if not node["Alive"]}
    return str(dead.get(node_id, ""))


def _node(info: dict[str, Any], leaving: dict[str, int]) -> RayNode:
    resources = info["Resources"]
    node_id = info["NodeID"]
    leaves_in_s = None
    if node_id in leaving:
        deadline_ms = leaving[node_id]
        leaves_in_s = max(0.0, deadline_ms / 1e3 - time.time()) if deadline_ms else NOTICE_S
    return RayNode(
        node_id,
        info["NodeName"],
        info["NodeManagerAddress"],
        info["NodeManagerHostname"],
        info["Labels"].get(LABEL, ""),
        int(resources.get("CPU", 0)),
        int(resources.get("GPU", 0)),
        leaves_in_s,
        HEAD in resources,
    )
