"""HostMap: assign the nodes of a Ray cluster to the hosts of a plan, and report changes. Pure.

    by name       a node with the label roadtrain-host=NAME or, without one, with that node name,
                  address or host name is the host NAME
    by resources  a host without an address gets the node at its earlier address; if it never had a
                  node, a free one with enough accelerators (or processors, if no node has
                  accelerators), in a stable order
    joining       a node that appears later becomes an additional host with its own name. If it
                  appeared before Ray noticed the death of the node that it replaces, it becomes
                  that host once Ray does
    returning     a lost host with workers returns on a node that matches it by name or earlier
                  address and is large enough. Another free node that was there from the start never
                  gets its name, but is reported as a host that joined: so it is checked whether
                  state of the run was on the lost host

A host keeps its node while that is alive. Does NOT call Ray (ray_cluster.py).
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
    label: str  # the value of its label roadtrain-host, or ""
    processors: int  # Ray's CPU resource, which may differ from the hardware
    devices: int  # Ray's GPU resource
    leaves_in_s: float | None = None  # seconds until a drained node is lost; None: not drained
    head: bool = False


class HostMap:
    """The assignment of nodes to hosts. Invariant: a node is at most one host, and vice versa.

    Args:
        hosts: The plan's hosts.
        spares: The plan's spare hosts.
        addresses: Host -> address of its node in earlier starts of the run.
    """

    def __init__(
        self,
        hosts: Sequence[PlanHost],
        spares: Sequence[PlanHost] = (),
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self._hosts = {host.name: host for host in (*hosts, *spares)}
        self._replaceable = [host.name for host in hosts if host.workers]
        self._nodes: dict[str, RayNode] = {}  # host -> its node
        self._addresses = dict(addresses or {})  # host -> address of its current or last node
        self._before: dict[str, RayNode] = {}  # lost host -> its last node
        self._lost: set[str] = set()  # hosts reported by HostLost and not back yet
        self._leaving: set[str] = set()  # ids of nodes reported by HostLeaving
        self._others: set[str] | None = None  # ids of nodes left over by the first assignment
        self._instead: dict[str, str] = {}  # lost host -> joined host that was reported for it

    def address_of(self, host: str) -> str:
        """Return the address by which the others reach a host that is up. An address in the plan
        has precedence over Ray's, which may be of another network card."""
        planned = self._hosts.get(host)
        return (planned.address if planned else "") or self._nodes[host].address

    @property
    def hosts(self) -> Mapping[str, RayNode]:
        """The hosts that are up: those of the plan, then others, named after their nodes."""
        return self._nodes

    def missing(self) -> list[PlanHost]:
        """Return the plan's hosts and spare hosts that have no node."""
        return [host for name, host in self._hosts.items() if name not in self._nodes]

    def was_at(self, host: str) -> str:
        """Return the address of a host's current or last node, or ""."""
        return self._addresses.get(host, "")

    def remember(self, host: str, node_id: str) -> None:
        """Assign a host to the node on which one of its services was found."""
        self._addresses.setdefault(host, "")
        self._nodes[host] = RayNode(node_id, "", "", "", "", 0, 0)

    def missing_events(self) -> list[RunEvent]:
        """Report the plan's hosts that the first `look` did not find as lost."""
        why = "the cluster has no node for it"
        missing = [host.name for host in self.missing()]
        self._lost.update(missing)
        return [HostLost(name, why) for name in missing]

    def look(
        self, nodes: Sequence[RayNode], why: Callable[[str], str] = lambda node_id: ""
    ) -> list[RunEvent]:
        """Update the assignment and return the changes. nodes: all nodes that are alive; why:
        returns the reason why a node, given by its id, is dead."""
        alive = {node.node_id: node for node in nodes}
        events: list[RunEvent] = []
        for host, node in list(self._nodes.items()):
            if node.node_id in alive:
                self._nodes[host] = alive[node.node_id]
                continue
            del self._nodes[host]
            self._lost.add(host)
            self._before[host] = node
            cause = why(node.node_id) or "it has died"
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
        """Free nodes that should be hosts of the plan, but joined under their own names because Ray
        still considered their predecessors alive. Report those joined hosts as lost."""
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
        """Return True if a joined node should be this host of the plan. A matching address counts
        only if no other node has it, as a machine may run several nodes."""
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
        """Assign free nodes, and remove them from `free`. Return the hosts that got a node and the
        hosts that joined."""
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
        """Assign nodes that match hosts of the plan by label, name or address."""
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
        """Return True if a node is large enough to be a host again. A host's first node is not
        tested here: checks.py reports what it lacks."""
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
        """Let a node that was free from the start join as a new host, one for each lost host."""
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
        """Return the resources that each of the plan's worker hosts needs from its node."""
        places = []
        for name in self._replaceable:
            count, node = self._hosts[name].workers, self._nodes.get(name)
            devices = {"GPU": count} if node is not None and node.devices else {}
            places.append({"CPU": count, **devices})
        return places

    def workers_of(self, host: str) -> int:
        """Return the planned number of workers; for a host outside the plan, its capacity."""
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
    """Return a sort key that prefers nodes with the fewest idle accelerators, and the head last,
    as it also runs Ray's own services."""
    return lambda node: (
        max(0, node.devices - host.workers),
        node.head,
        node.address,
        node.node_id,
    )


def _capacity(node: RayNode, devices: bool) -> int:
    """Return the number of workers that a node can run."""
    return node.devices if devices else node.processors
