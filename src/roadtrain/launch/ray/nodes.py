"""Which node of a Ray cluster is which host of a plan, and what follows when nodes come and go.
Pure.

    a node with the label roadtrain-host=NAME, else of that node name, address or host name
                                             is that host
    an unnamed host of the plan (address "") is given a free node with enough accelerators, or
                                             processors where no node has any, in a stable order
    a node that came later                   is one more host, under its own name
    a host that was lost                     is again where a node is that is it by the same rules;
                                             a free node takes its place where it kept no store

A host stays on its node while that lives. Does NOT ask Ray (cluster.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roadtrain.config.machines import PlanHost
from roadtrain.protocol.launch import HostCame, HostLeaves, HostLost, RunEvent

LABEL = "roadtrain-host"
NOTICE_S = 120.0  # of a node that is drained without a deadline, as spot machines have


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster as it is now."""

    node_id: str
    name: str
    address: str
    host_name: str
    label: str  # the value of its label roadtrain-host, or ""
    processors: int  # as Ray was told, not as there are
    devices: int
    memory: int  # bytes
    leaves_in_s: float | None = None  # it is drained
    head: bool = False


@dataclass(frozen=True)
class GoneNode:
    """A node that was there."""

    node_id: str
    why: str


class HostMap:
    """Invariant: a node is one host at most, and a host one node."""

    def __init__(self, hosts: Sequence[PlanHost]) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._nodes: dict[str, RayNode] = {}  # host -> its node
        self._had: set[str] = set()  # hosts that have had a node
        self._lost: set[str] = set()  # of those, the ones that HostLost was told of
        self._leaving: set[str] = set()  # nodes that HostLeaves was told of
        self._others: set[str] | None = None  # nodes that were there first and are no host of it

    def node_of(self, host: str) -> RayNode | None:
        return self._nodes.get(host)

    @property
    def hosts(self) -> Mapping[str, RayNode]:
        """Those that are there: the plan's, then others, under the names of their nodes."""
        return self._nodes

    def missing(self) -> list[PlanHost]:
        """Hosts of the plan without a node."""
        return [host for name, host in self._hosts.items() if name not in self._nodes]

    def remember(self, host: str, node_id: str) -> None:
        """A host is on this node already: a service of it was found there."""
        self._had.add(host)
        self._nodes[host] = RayNode(node_id, "", "", "", "", 0, 0, 0)

    def look(
        self, nodes: Sequence[RayNode], at: float, why: Mapping[str, str] | None = None
    ) -> list[RunEvent]:
        """What has changed. nodes: all that are alive; why: node id -> why it is not."""
        alive = {node.node_id: node for node in nodes}
        events: list[RunEvent] = []
        for host, node in list(self._nodes.items()):
            if node.node_id in alive:
                self._nodes[host] = alive[node.node_id]
                continue
            del self._nodes[host]
            self._lost.add(host)
            cause = (why or {}).get(node.node_id) or "it has died"
            events.append(HostLost(host, f"Ray's node {node.node_id[:8]}: {cause}", at))
        first = self._others is None
        new = self._assign(list(alive.values()))
        for host in new:
            if host in self._lost or not first:
                node = self._nodes[host]
                self._lost.discard(host)
                events.append(HostCame(host, node.address, self.workers_of(host), at))
        self._had.update(new)
        events += self._leaves(at)
        return events

    def _leaves(self, at: float) -> list[RunEvent]:
        leaving = {
            host: node.leaves_in_s
            for host, node in self._nodes.items()
            if node.leaves_in_s is not None
        }
        told, self._leaving = self._leaving, {self._nodes[host].node_id for host in leaving}
        return [
            HostLeaves(host, within_s, at)
            for host, within_s in leaving.items()
            if self._nodes[host].node_id not in told
        ]

    def _assign(self, nodes: Sequence[RayNode]) -> list[str]:
        """Gives hosts without a node one. Returns those hosts."""
        taken = {node.node_id for node in self._nodes.values()}
        free = [n for n in nodes if n.node_id not in taken and n.leaves_in_s is None]
        new = []
        for same in (_by_label, _by_name, _by_address, _by_host_name):
            for host in self.missing():
                found = min((n for n in free if same(host, n)), key=_order, default=None)
                if found is not None:
                    self._nodes[host.name] = found
                    free.remove(found)
                    new.append(host.name)
        devices = any(n.devices for n in nodes)
        for host in self.missing():
            if not self._any_fits(host):
                continue
            fitting = [n for n in free if not n.label and _capacity(n, devices) >= host.workers]
            if fitting:
                best = min(fitting, key=lambda n: (_waste(n, host), *_order(n)))
                self._nodes[host.name] = best
                free.remove(best)
                new.append(host.name)
        if self._others is None:
            self._others = {node.node_id for node in nodes if node in free}
        for node in [node for node in free if node.node_id not in self._others]:
            name = node.label or node.name
            name = node.node_id[:8] if name in {*self._hosts, *self._nodes} else name
            self._nodes[name] = node
            new.append(name)
        return new

    def _any_fits(self, host: PlanHost) -> bool:
        """Whether any node may become this host, if it is large enough."""
        return not host.address if host.name not in self._had else not host.servers

    def workers_of(self, host: str) -> int:
        """As many as the plan has there; on another host, as many as it can run."""
        if host in self._hosts:
            return self._hosts[host].workers
        return _capacity(self._nodes[host], any(n.devices for n in self._nodes.values()))

    def check(self) -> None:
        nodes = [node.node_id for node in self._nodes.values()]
        assert len(set(nodes)) == len(nodes), "a node is two hosts"
        assert not self._lost & self._nodes.keys()


def _by_label(host: PlanHost, node: RayNode) -> bool:
    return node.label == host.name


def _by_name(host: PlanHost, node: RayNode) -> bool:
    return not node.label and node.name == host.name


def _by_address(host: PlanHost, node: RayNode) -> bool:
    return not node.label and node.address == host.address


def _by_host_name(host: PlanHost, node: RayNode) -> bool:
    return not node.label and node.host_name in (host.name, host.address)


def _order(node: RayNode) -> tuple[bool, str, str]:
    """The head last: it has Ray's own work to do."""
    return node.head, node.address, node.node_id


def _capacity(node: RayNode, devices: bool) -> int:
    """Workers it can run."""
    return node.devices if devices else node.processors


def _waste(node: RayNode, host: PlanHost) -> int:
    """Accelerators that would stand idle."""
    return max(0, node.devices - host.workers)
