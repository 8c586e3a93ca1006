"""Simulate data-parallel ranks separately: if stages have different widths, hosts have different
speeds, or activations share network cards with gradients.

Each replica of a stage (with its tensor- and context-parallel devices) has its own state machines
and its part of the stage's state. Network cards, memory and SSDs of a host exist once and are
shared by all its ranks. A collective operation starts, or ends, when the last replica is ready.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from roadtrain.config.cluster import Cluster, Host, Nic
from roadtrain.config.plan_file import Plan
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Cost, Engine, Lane, Resource, Then, Uses, joined
from roadtrain.simulator.fabric import Fabric
from roadtrain.simulator.site import FlowGroup, Site

OF_A_DEVICE = ("to device", "from device", "fabric", "memory of the device", "processors")
OF_A_CARD = ("out", "in")


class SharedHost:
    """The resources of one host, each created once."""

    def __init__(self, engine: Engine, host: Host, name: str, constants: Constants) -> None:
        self.engine, self.host, self.name, self.constants = engine, host, name, constants
        self.resources: dict[str, Resource] = {}

    def site(self, nic: Nic | None, rank: str) -> Site:
        """Return the site of a rank: with its own devices, and the network card of its group."""

        def resource(what: str, capacity: float) -> Resource:
            if what in OF_A_DEVICE:
                return self._shared(f"{rank} {what}", capacity)
            if what in OF_A_CARD and nic is not None:
                return self.card(nic, what)
            return self._shared(f"{self.name} {what}", capacity)

        return Site(self.engine, self.host, nic, self.constants, f"{self.name} of {rank}", resource)

    def card(self, nic: Nic, way: str) -> Resource:
        """Return a network card's resource for one direction of OF_A_CARD. A link between switches
        may be slower than the card."""
        own = max((n for n in self.host.nics if n.kind == nic.kind), key=lambda n: n.total)
        return self._shared(f"{self.name} {nic.kind} {way}", own.total * self.constants.network)

    def _shared(self, name: str, capacity: float) -> Resource:
        if name not in self.resources:
            self.resources[name] = self.engine.resource(name, capacity)
        return self.resources[name]


class SwitchLinks:
    """The links between switches, shared by all traffic between them."""

    def __init__(self, engine: Engine, cluster: Cluster, constants: Constants) -> None:
        self.engine, self.cluster, self.constants = engine, cluster, constants
        self.resources: dict[tuple[str, str], Resource] = {}

    def uses(self, here: Nic, there: Nic) -> Uses:
        """Return the resource uses of a byte from one card to another; none inside one switch."""
        rate = self.cluster.between([here, there])
        ends = self.cluster.switch_of(here), self.cluster.switch_of(there)
        if ends[0] == ends[1] or rate == float("inf"):
            return []
        if ends not in self.resources:
            capacity = rate * self.constants.network
            self.resources[ends] = self.engine.resource(f"{ends[0]} to {ends[1]} link", capacity)
        return [(self.resources[ends], 1.0)]


class RankFabric(Fabric):
    """Costs of one replica's part. `across`: links between switches, and the number of pairs of
    ranks that communicate over each."""

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        group: FlowGroup,
        constants: Constants,
        across: Mapping[Resource, int],
    ) -> None:
        super().__init__(cluster, plan, group, constants)
        self.across = across

    def _network(self, ring: float, exchanged: float = 0.0) -> Uses:
        """Return the resource uses of a byte, as in Fabric, for separate ranks: a ring crosses a
        host's network card once for all its ranks; of data exchanged between all pairs of ranks,
        the part for other hosts crosses it."""
        group, own, beside = self.group, self.group.ranks, self.group.beside
        others, away = max(1, group.replicas - 1), group.replicas - beside
        near = exchanged * (beside - 1) / others + (ring if beside > 1 else 0.0)
        uses: Uses = [(self.site.fabric, near)] if near else []
        if away:
            far = group.tp * own * (ring / beside + exchanged * away / others)
            uses += [(self.site.out, far), (self.site.into, far)]
            uses += group.touched(2 * far)
        for link, pairs in self.across.items():
            each = group.tp * own / group.replicas  # fraction of the group's traffic
            uses.append((link, each * (ring + exchanged * pairs / others)))
        return uses


@dataclass(frozen=True)
class StagePush:
    """A replica's gradient of a chunk. `lane`: the replica's own, if replicas push separately."""

    cost: Cost
    then: Then
    lane: Lane | None


@dataclass
class ReplicaExchange:
    """The exchange of gradients between the replicas of one stage. `collective`: all transfers
    start when the last replica is ready; otherwise each replica pushes on its own, and the sum is
    complete when the last push has arrived."""

    engine: Engine
    where: str
    collective: bool
    # pushes of each incomplete gradient, and how many are expected; never complete or empty
    arrived: dict[Hashable, tuple[list[StagePush], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lane = self.engine.lane(f"{self.where} collectives")

    def push(self, at: Hashable, partners: int, pushed: StagePush) -> None:
        """Push a gradient. `at`: its chunk and round; `partners`: number of replicas that push
        it."""
        if self.collective:
            if (every := self._add(at, partners, pushed)) is not None:
                cost, then = joined([push.cost for push in every]), lambda: _finish(every)
                self.engine.task("Push", cost, then=then, lane=self.lane, where=self.where)
            return

        def arrived() -> None:
            if (every := self._add(at, partners, pushed)) is not None:
                _finish(every)

        self.engine.task("Push", pushed.cost, then=arrived, lane=pushed.lane, where=self.where)

    def _add(self, at: Hashable, partners: int, pushed: StagePush) -> list[StagePush] | None:
        """Add a push; return all pushes of the gradient if this was the last one."""
        every, of = self.arrived.setdefault(at, ([], partners))
        assert of == partners, "replicas push in different rounds"
        every.append(pushed)
        if len(every) < partners:
            return None
        del self.arrived[at]
        return every

    def check(self) -> None:
        assert all(0 < len(every) < partners for every, partners in self.arrived.values())


def _finish(every: Sequence[StagePush]) -> None:
    for push in every:
        push.then()


@dataclass(frozen=True)
class RankOf:
    """The position of a rank: its replica, the widths of all stages, and its stage's exchange."""

    replica: int
    widths: tuple[int, ...]
    exchange: ReplicaExchange
