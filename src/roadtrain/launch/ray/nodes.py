"""HostMap: assign the nodes of a Ray cluster to the hosts of a plan, and report changes. Does no
I/O, and does NOT call Ray (ray_cluster.py).

    by name       A node with the label roadtrain-host=NAME is the host NAME. A node without this
                  label is the host that has its node name, address or host name.
    by resources  A host without an address gets the node at the host's earlier address, or else a
                  free node with enough accelerators (or processors, if no node has accelerators).
                  The same nodes always give the same assignment.
    joining       A node that appears later becomes an additional host with its own name. If it
                  replaces a node whose death Ray notices later, it then becomes the host of the
                  dead node.
    returning     A lost host with workers returns on a node that has its name or earlier address
                  and is large enough. Otherwise, a large enough node that has been free since the
                  start joins as a new host under its own name.

A host keeps its node while the node is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from roadtrain.config.machines import PlanHost
from roadtrain.launch.protocol.run_events import HostJoined, HostLeaving, HostLost, RunEvent

LABEL = "roadtrain-host"
NOTICE_S = 120.0  # assumed notice of a node that is drained without a deadline


@dataclass(frozen=True)
class RayNode:
    """The current state of a node of the cluster."""

    node_id: str
    name: str
    address: str
    host_name: str
    label: str  # the value of the node's label roadtrain-host, or ""
    processors: int  # Ray's CPU resource, which may differ from the hardware
    devices: int  # Ray's GPU resource
    leaves_in_s: float | None = None  # seconds until a drained node is lost; None if not drained
    head: bool = False  # True for the cluster's head node


class HostMap:
    """The assignment of nodes to hosts. Invariant: a node is assigned to at most one host, and a
    host has at most one node. `addresses`: for a host name, the address of its node in earlier
    starts of the run."""

    def __init__(
        self,
        hosts: Sequence[PlanHost],
        spares: Sequence[PlanHost] = (),
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self._hosts = {host.name: host for host in (*hosts, *spares)}
        self._replaceable = [host.name for host in hosts if host.workers]
        self._nodes: dict[str, RayNode] = {}  # the node of each host that is up
        self._addresses = dict(addresses or {})  # address of each host's current or last node
        self._before: dict[str, RayNode] = {}  # the last node of each lost host
        self._lost: set[str] = set()  # hosts that HostLost has reported and that are not back yet
        self._leaving: set[str] = set()  # ids of nodes that HostLeaving has reported
        self._others: set[str] | None = None  # ids of nodes that stayed free at the first `look`
        self._instead: dict[str, str] = {}  # for a lost host, the joined host in its place

    def address_of(self, host: str) -> str:
        """Return the address by which other hosts reach a host that is up. The plan's address has
        precedence over Ray's, which may belong to another network card."""
        planned = self._hosts.get(host)
        return (planned.address if planned else "") or self._nodes[host].address

    @property
    def hosts(self) -> Mapping[str, RayNode]:
        """The hosts that are up, with their nodes. A host that is not in the plan is named after
        its node."""
        return self._nodes

    def missing(self) -> list[PlanHost]:
        """Return the plan's hosts and spare hosts that have no node."""
        return [host for name, host in self._hosts.items() if name not in self._nodes]

    def was_at(self, host: str) -> str:
        """Return the address of a host's current or last node, or "" if it never had one."""
        return self._addresses.get(host, "")

    def remember(self, host: str, node_id: str) -> None:
        """Assign a host to the node on which one of its services was found."""
        self._addresses.setdefault(host, "")
        self._nodes[host] = RayNode(node_id, "", "", "", "", 0, 0)

    def missing_events(self) -> list[RunEvent]:
        """Return an event HostLost for each host and spare host of the plan that has no node. Call
        this method once, after the first `look`."""
        why = "the cluster has no node for this host"
        missing = [host.name for host in self.missing()]
        self._lost.update(missing)
        return [HostLost(name, why) for name in missing]

    def look(
        self, nodes: Sequence[RayNode], why: Callable[[str], str] = lambda node_id: ""
    ) -> list[RunEvent]:
        """Update the assignment of nodes to hosts, and return the changes as events. `nodes`: all
        nodes that are alive. `why`: function that returns the reason why the node with a given id
        is dead, or ""."""
        alive = {node.node_id: node for node in nodes}
        events: list[RunEvent] = []
        for host, node in list(self._nodes.items()):
            if node.node_id in alive:
                self._nodes[host] = alive[node.node_id]
                continue
            del self._nodes[host]
            self._lost.add(host)
            self._before[host] = node
            cause = why(node.node_id) or "the node has died"
            events.append(HostLost(host, f"Ray's node {node.node_id[:8]}: {cause}"))
        first = self._others is None
        events += self._lose_early()
        free = self._free(alive.values())
        for host in self._assign(list(alive.values()), free):
            if host in self._lost or host not in self._hosts or not first:
                self._lost.discard(host)
                events.append(HostJoined(host, self.address_of(host), self.workers_of(host)))
        self._addresses |= {host: node.address for host, node in self._nodes.items()}
        events += self._leaves()
        return events

    def _lose_early(self) -> list[RunEvent]:
        """Free the nodes that joined as additional hosts, but replace nodes whose death Ray has now
        noticed. Return a HostLost for each additional host."""
        events: list[RunEvent] = []
        for host in self.missing():
            for name, node in list(self._nodes.items()):
                if name not in self._hosts and self._was_early(host, node):
                    del self._nodes[name]
                    why = f"Ray's node {node.node_id[:8]} is now host {host.name} again"
                    events.append(HostLost(name, why))
                    break
        return events

    def _was_early(self, host: PlanHost, node: RayNode) -> bool:
        """Return True if `node` has joined as an additional host, but should be the node of the
        plan's host `host`. An address counts only if it is unique."""
        if node.leaves_in_s is not None or not self._is_large_enough(host, node):
            return False
        if _by_label(host, node) or _by_name(host, node):
            return True
        alone = [other.address for other in self._nodes.values()].count(node.address) == 1
        return alone and (_by_address(host, node) or self._by_earlier_address(host, node))

    def _free(self, nodes: Iterable[RayNode]) -> list[RayNode]:
        used = {node.node_id for node in self._nodes.values()}
        return [n for n in nodes if n.node_id not in used and n.leaves_in_s is None]

    def _leaves(self) -> list[RunEvent]:
        reported, self._leaving = self._leaving, set()
        events: list[RunEvent] = []
        for host, node in self._nodes.items():
            if node.leaves_in_s is not None:
                self._leaving.add(node.node_id)
                if node.node_id not in reported:
                    events.append(HostLeaving(host, node.leaves_in_s))
        return events

    def _assign(self, nodes: Sequence[RayNode], free: list[RayNode]) -> list[str]:
        """Assign free nodes to hosts, and remove them from `free`. Return the names of these
        hosts."""
        new = self._give_own(free)
        devices = any(n.devices for n in nodes)
        for host in self.missing():
            if host.address or host.name in self._addresses:
                continue
            fitting = [n for n in free if not n.label and _capacity(n, devices) >= host.workers]
            if fitting:
                new.append(self._give(host.name, min(fitting, key=_best_for(host)), free))
        if self._others is None:
            self._others = {node.node_id for node in free}
        joined = [node for node in free if node.node_id not in self._others]
        return (
            new
            + [self._give(self._name_of(node), node, free) for node in joined]
            + (self._give_instead(free, devices))
        )

    def _give(self, host: str, node: RayNode, free: list[RayNode]) -> str:
        self._nodes[host] = node
        free.remove(node)
        return host

    def _give_own(self, free: list[RayNode]) -> list[str]:
        """Assign free nodes to the hosts that the nodes' labels, names or addresses identify.
        Return the names of these hosts."""
        new = []
        for same in (_by_label, _by_name, _by_address, _by_host_name, self._by_earlier_address):
            for host in self.missing():
                own = [n for n in free if same(host, n) and self._is_large_enough(host, n)]
                if own:
                    new.append(self._give(host.name, min(own, key=_best_for(host)), free))
        return new

    def _by_earlier_address(self, host: PlanHost, node: RayNode) -> bool:
        return not node.label and not host.address and node.address == self.was_at(host.name)

    def _is_large_enough(self, host: PlanHost, node: RayNode) -> bool:
        """Return True if a node has enough processors and devices for a host that had a node
        before. Any node is large enough for a host that never had one."""
        if host.name not in self._addresses:
            return True
        before = self._before.get(host.name)
        with_devices = node.devices or (before is not None and before.devices)
        has = min(node.processors, node.devices) if with_devices else node.processors
        return has >= host.workers

    def _name_of(self, node: RayNode) -> str:
        """Return a host name for a node that is not a host of the plan."""
        name = node.label or node.name
        return node.node_id[:8] if name in {*self._hosts, *self._nodes} else name

    def _give_instead(self, free: list[RayNode], devices: bool) -> list[str]:
        """Let a large enough free node join for each lost host with workers. Return the new hosts'
        names."""
        new = []
        for host in self.missing():
            if host.name not in self._replaceable or self._instead.get(host.name) in self._nodes:
                continue
            fitting = [n for n in free if not n.label and _capacity(n, devices) >= host.workers]
            if fitting:
                node = min(fitting, key=_best_for(host))
                self._instead[host.name] = name = self._name_of(node)
                new.append(self._give(name, node, free))
        return new

    def places_of_workers(self) -> list[dict[str, int]]:
        """Return the resources that each worker host of the plan needs from its node, such as
        {"CPU": 2, "GPU": 2}."""
        places = []
        for name in self._replaceable:
            count, node = self._hosts[name].workers, self._nodes.get(name)
            devices = {"GPU": count} if node is not None and node.devices else {}
            places.append({"CPU": count, **devices})
        return places

    def workers_of(self, host: str) -> int:
        """Return the planned number of workers of a host of the plan, or the number of workers that
        a joined host can run."""
        if host in self._hosts:
            return self._hosts[host].workers
        return _capacity(self._nodes[host], any(n.devices for n in self._nodes.values()))

    def check(self) -> None:
        nodes = [node.node_id for node in self._nodes.values()]
        assert len(set(nodes)) == len(nodes), "a node is assigned to two hosts"
        assert not self._lost & self._nodes.keys()


def _by_label(host: PlanHost, node: RayNode) -> bool:
    return node.label == host.name


def _by_name(host: PlanHost, node: RayNode) -> bool:
    return not node.label and node.name == host.name


def _by_address(host: PlanHost, node: RayNode) -> bool:
    return not node.label and node.address == host.address


def _by_host_name(host: PlanHost, node: RayNode) -> bool:
    return not node.label and node.host_name in (host.name, host.address)


def _best_for(host: PlanHost) -> Callable[[RayNode], tuple[int, bool, str, str]]:
    """Return a sort key by which the best node for a host comes first: few idle accelerators, then
    not the head node."""
    return lambda node: (
        max(0, node.devices - host.workers),
        node.head,
        node.address,
        node.node_id,
    )


def _capacity(node: RayNode, devices: bool) -> int:
    """Return the number of workers that a node can run: one per accelerator if `devices` is True,
    else one per processor."""
    return node.devices if devices else node.processors
