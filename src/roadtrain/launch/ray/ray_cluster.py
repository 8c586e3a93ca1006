"""A Ray cluster as a launch sees it: how it is reached, its nodes, which of them leave.

Ray has no public call that tells a program of drained nodes (2.60: `ray drain-node`, and notices of
spot machines through the autoscaler); `get_draining_nodes` is what Ray Train itself uses.
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

NAMESPACE = "roadtrain"  # of all our actors
CONNECT_S = 10.0
NODE_PROCESS, HEADS_ADDRESS = "raylet", "--gcs-address="  # Ray's process of a node
# What OMP_NUM_THREADS was where `launch` was typed, or "": Ray sets it in each process of its own.
USERS_THREADS = "ROADTRAIN_USERS_THREADS"
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


def is_same(one: str, other: str) -> bool:
    """Whether two HOST:PORT are one. Where a name has no address now, the ports say it."""
    (host, port), (other_host, other_port) = address_of(one), address_of(other)
    if port != other_port:
        return False
    found, others = addresses_of(host), addresses_of(other_host)
    return not found or not others or bool(found & others)


def addresses_of(host: str) -> set[str]:
    """Of a host; of this one all that it has."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
    own = {one.address for all in psutil.net_if_addrs().values() for one in all}
    return found | own if found & own else found


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """There and nowhere else."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def nodes() -> list[RayNode]:
    """Those that are alive."""
    leaving = ray_state.get_draining_nodes()
    return [_node(one, leaving) for one in ray.nodes() if one["Alive"]]


def ask_for(places: Sequence[Mapping[str, int]]) -> None:
    """The autoscaler keeps nodes for all of these from now on, and starts another in the place of
    one that dies: what is bound to a node asks for no other. None: it is withdrawn. There is one
    such wish in a cluster, so that of another program is replaced. Without an autoscaler nobody
    reads it."""
    with suppress(RayError, RuntimeError, OSError):
        request_resources(bundles=[dict(place) for place in places])


def why_dead(node_id: str) -> str:
    """Why a node is dead, or "" where Ray does not say."""
    dead = {node["NodeID"]: node["DeathReasonMessage"] for node in ray.nodes() if not node["Alive"]}
    return str(dead.get(node_id, ""))


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
        leaves_in_s,
        HEAD in resources,
    )
