"""Simulate each data-parallel rank separately. This matters if stages have different numbers of
replicas, if hosts have different speeds, or if activations and gradients share network cards.

Each replica of a stage has its own state machines. All ranks on a host share the host's network
cards, memory and SSDs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from roadtrain.config.cluster import Cluster, Host, Nic
from roadtrain.config.plan_file import Plan
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Cost, Engine, Lane, Resource, Then, Uses, joined
from roadtrain.simulator.fabric import Fabric
from roadtrain.simulator.site import FlowGroup, Site

OF_A_DEVICE = ("to device", "from device", "fabric", "memory of the device", "processors")
OF_A_CARD = ("out", "in")


class SharedHost:
    """The resources of one host."""

    def __init__(self, engine: Engine, host: Host, name: str, constants: Constants) -> None:
        self.engine, self.host, self.name, self.constants = engine, host, name, constants
        self._shared = cache(engine.resource)

    def site(self, nic: Nic | None, rank: str) -> Site:
        """Return the resources that a rank uses. The rank has its own device resources, and shares
        all other resources with all ranks of the host. `nic`: the network card of the rank's group.
        `rank`: the name of the rank."""

        def resource(what: str, capacity: float) -> Resource:
            if what in OF_A_DEVICE:
                return self._shared(f"{rank} {what}", capacity)
            if what in OF_A_CARD and nic is not None:
                return self.card(nic, what)
            return self._shared(f"{self.name} {what}", capacity)

        return Site(self.engine, self.host, nic, self.constants, f"{self.name} of {rank}", resource)

    def card(self, nic: Nic, way: str) -> Resource:
        """Return the resource of a network card in the direction `way` ("out" or "in")."""
        own = max((n for n in self.host.nics if n.kind == nic.kind), key=lambda n: n.total)
        return self._shared(f"{self.name} {nic.kind} {way}", own.total * self.constants.network)


class SwitchLinks:
    """The links between switches. All traffic over a link shares it."""

    def __init__(self, engine: Engine, cluster: Cluster, constants: Constants) -> None:
        self.cluster, self.constants, self._shared = cluster, constants, cache(engine.resource)

    def uses(self, here: Nic, there: Nic) -> Uses:
        """Return the links between switches on the path of a byte from one network card to
        another."""
        rate = self.cluster.between([here, there])
        ends = self.cluster.switch_of(here), self.cluster.switch_of(there)
        if ends[0] == ends[1] or rate == float("inf"):
            return []
        name, capacity = f"{ends[0]} to {ends[1]} link", rate * self.constants.network
        return [(self._shared(name, capacity), 1.0)]


class RankFabric(Fabric):
    """The costs of transfers, updates, reads and writes of one replica. `across`: for each link
    between switches, the number of pairs of ranks that communicate over the link."""

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
        """Return the resources that this replica uses for one byte of a collective, in both
        directions. `ring`: the fraction of the byte that each device sends to the next device.
        `exchanged`: the fraction that each device sends to all other devices together."""
        group, own, beside = self.group, self.group.ranks, self.group.beside
        others, away = max(1, group.replicas - 1), group.replicas - beside
        near = exchanged * (beside - 1) / others + (ring if beside > 1 else 0.0)
        uses: Uses = [(self.site.fabric, near)] if near else []
        if away:
            far = group.tp * own * (ring / beside + exchanged * away / others)
            uses += [(self.site.out, far), (self.site.into, far)]
            uses += group.touched(2 * far)
        for link, pairs in self.across.items():
            each = group.tp * own / group.replicas  # the replica's fraction of the group's traffic
            uses.append((link, each * (ring + exchanged * pairs / others)))
        return uses


@dataclass(frozen=True)
class StagePush:
    """A replica's push of a chunk's gradient. `then`: called when the gradients of all replicas are
    summed. `lane`: the queue in which the replica's pushes run one at a time, or None if pushes run
    concurrently."""

    cost: Cost
    then: Then
    lane: Lane | None


@dataclass
class ReplicaExchange:
    """The exchange of gradients between the replicas of one stage. If `collective` is true, the
    transfers of all replicas start when the last replica is ready. Otherwise each replica starts
    its transfer when its own gradient is ready."""

    engine: Engine
    where: str
    collective: bool
    # for each gradient that is not complete, its pushes (at least one) and the number of expected
    # pushes
    arrived: dict[Hashable, tuple[list[StagePush], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lane = self.engine.lane(f"{self.where} collectives")

    def push(self, at: Hashable, partners: int, pushed: StagePush) -> None:
        """Push a gradient. `at`: a key for the chunk and the round. `partners`: the number of
        replicas that push this chunk in this round."""
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
        """Add a replica's push. If it is the last of `partners` pushes, return all of them;
        otherwise return None."""
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
    """The position of a replica. `replica`: the replica's number in its stage. `widths`: the number
    of replicas of each stage. `exchange`: the exchange of gradients between the stage's
    replicas."""

    replica: int
    widths: tuple[int, ...]
    exchange: ReplicaExchange
