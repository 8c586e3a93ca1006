"""Which node of a Ray cluster is which host of a plan, and what follows when nodes come and go.
Pure.

    a node with the label roadtrain-host=NAME, else of that node name, address or host name
                                             is that host
    an unnamed host of the plan (address "") is the node at the address where it was before; one
                                             that never had a node is given a free one with enough
                                             accelerators, or processors where no node has any, in
                                             a stable order
    a node that came later                   is one more host, under its own name; where it came
                                             before Ray knew that the node of its host is dead, it
                                             is that host once Ray does
    a host with workers that was lost        is again where a node is that is it by the same rules,
                                             and can run as many; a free node never takes its name:
                                             one that was there from the first is told as a host
                                             that came, so that somebody asks what of the run's
                                             state rested on the lost one

A host stays on its node while that lives. Does NOT ask Ray (ray_cluster.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from roadtrain.config.machines import PlanHost
from roadtrain.launch.protocol.run_events import HostJoined, HostLeaving, HostLost, RunEvent

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
    leaves_in_s: float | None = None  # it is drained
    head: bool = False


class HostMap:
    """spares: those of the plan that run nothing. known: host -> address of the node that it was in
    starts before. Invariant: a node is one host at most, and a host one node."""

    def __init__(
        self,
        hosts: Sequence[PlanHost],
        spares: Sequence[PlanHost] = (),
        known: Mapping[str, str] | None = None,
    ) -> None:
        self._hosts = {host.name: host for host in (*hosts, *spares)}
        self._replaceable = [host.name for host in hosts if host.workers]
        self._nodes: dict[str, RayNode] = {}  # host -> its node
        self._addresses = dict(known or {})  # hosts that have had a node -> where it is or was
        self._before: dict[str, RayNode] = {}  # lost host -> the node that it had
        self._lost: set[str] = set()  # of those, the ones that HostLost was told of
        self._leaving: set[str] = set()  # nodes that HostLeaving was told of
        self._others: set[str] | None = None  # nodes that were there first and are no host of it
        self._instead: dict[str, str] = {}  # lost host -> the other that was told as one that came

    def address_of(self, host: str) -> str:
        """By which the others reach a host that is there: as the plan says, which may be that of
        another card than Ray's."""
        planned = self._hosts.get(host)
        return (planned.address if planned else "") or self._nodes[host].address

    @property
    def hosts(self) -> Mapping[str, RayNode]:
        """Those that are there: the plan's, then others, under the names of their nodes."""
        return self._nodes

    def missing(self) -> list[PlanHost]:
        """Hosts of the plan without a node, spare ones too."""
        return [host for name, host in self._hosts.items() if name not in self._nodes]

    def was_at(self, host: str) -> str:
        """The address of the node that a host has or had, or ""."""
        return self._addresses.get(host, "")

    def remember(self, host: str, node_id: str) -> None:
        """A host is on this node already: a service of it was found there."""
        self._addresses.setdefault(host, "")
        self._nodes[host] = RayNode(node_id, "", "", "", "", 0, 0)

    def missing_events(self) -> list[RunEvent]:
        """Those of the plan that the first look has not found."""
        why = "it is no node of the cluster"
        missing = [host.name for host in self.missing()]
        self._lost.update(missing)
        return [HostLost(name, why) for name in missing]

    def look(
        self, nodes: Sequence[RayNode], why: Callable[[str], str] = lambda node_id: ""
    ) -> list[RunEvent]:
        """What has changed. nodes: all that are alive; why: of a node id, why it is not."""
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
        """Hosts whose nodes are to be hosts of the plan: they came under names of their own, as
        Ray took the nodes before them for alive. Those are free then."""
        events: list[RunEvent] = []
        for host in self.missing():
            for name, node in list(self._nodes.items()):
                if name not in self._hosts and self._was_early(host, node):
                    del self._nodes[name]
                    why = f"Ray's node {node.node_id[:8]} is {host.name} again"
                    events.append(HostLost(name, why))
                    break
        return events

    def _was_early(self, host: PlanHost, node: RayNode) -> bool:
        """By its address only where no other node has that: nodes of one machine are no twins."""
        if node.leaves_in_s is not None or not self._is_large_enough(host, node):
            return False
        if _by_label(host, node) or _by_name(host, node):
            return True
        alone = [one.address for one in self._nodes.values()].count(node.address) == 1
        return alone and (_by_address(host, node) or self._by_earlier_address(host, node))

    def _free(self, nodes: Iterable[RayNode]) -> list[RayNode]:
        taken = {node.node_id for node in self._nodes.values()}
        return [n for n in nodes if n.node_id not in taken and n.leaves_in_s is None]

    def _leaves(self) -> list[RunEvent]:
        told, self._leaving = self._leaving, set()
        events: list[RunEvent] = []
        for host, node in self._nodes.items():
            if node.leaves_in_s is not None:
                self._leaving.add(node.node_id)
                if node.node_id not in told:
                    events.append(HostLeaving(host, node.leaves_in_s))
        return events

    def _assign(self, nodes: Sequence[RayNode], free: list[RayNode]) -> list[str]:
        """Gives hosts without a node one. Returns those hosts, and those that came. free: of the
        nodes; those that it gives are removed."""
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
        came = [node for node in free if node.node_id not in self._others]
        return (
            new
            + [self._give(self._name_of(node), node, free) for node in came]
            + (self._give_instead(free, devices))
        )

    def _give(self, host: str, node: RayNode, free: list[RayNode]) -> str:
        self._nodes[host] = node
        free.remove(node)
        return host

    def _give_own(self, free: list[RayNode]) -> list[str]:
        """Nodes that are hosts of the plan by their label, name or address."""
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
        """Of a node that may be a host again. At the first start the checks say what is lacking."""
        if host.name not in self._addresses:
            return True
        before = self._before.get(host.name)
        with_devices = node.devices or (before is not None and before.devices)
        has = min(node.processors, node.devices) if with_devices else node.processors
        return has >= host.workers

    def _name_of(self, node: RayNode) -> str:
        """Of a node that is no host of the plan."""
        name = node.label or node.name
        return node.node_id[:8] if name in {*self._hosts, *self._nodes} else name

    def _give_instead(self, free: list[RayNode], devices: bool) -> list[str]:
        """For each lost host one of the nodes that were there from the first, as a host that
        came."""
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
        """What the plan's hosts with workers need of Ray, each of its own node."""
        places = []
        for name in self._replaceable:
            count, node = self._hosts[name].workers, self._nodes.get(name)
            devices = {"GPU": count} if node is not None and node.devices else {}
            places.append({"CPU": count, **devices})
        return places

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


def _best_for(host: PlanHost) -> Callable[[RayNode], tuple[int, bool, str, str]]:
    """The fewest accelerators would stand idle; the head last: it has Ray's own work to do."""
    return lambda node: (
        max(0, node.devices - host.workers),
        node.head,
        node.address,
        node.node_id,
    )


def _capacity(node: RayNode, devices: bool) -> int:
    """Workers it can run."""
    return node.devices if devices else node.processors
