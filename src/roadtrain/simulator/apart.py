"""Data-parallel ranks that are simulated apart: where stages have different widths, hosts different
speeds, or what passes between stages shares its cards with gradients.

Each replica of a stage (with its tensor- and context-parallel devices) has state machines of its
own and a part of the stage's state. Hosts have their cards, memory and SSDs once, whoever uses
them. What replicas do together begins, or ends, when the last of them is there.
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
    """One host's resources, of which each is made once."""

    def __init__(self, engine: Engine, host: Host, name: str, constants: Constants) -> None:
        self.engine, self.host, self.name, self.constants = engine, host, name, constants
        self.resources: dict[str, Resource] = {}

    def site(self, nic: Nic | None, rank: str) -> Site:
        """As a rank sees it: with devices of its own, by the card that its group uses."""

        def resource(what: str, capacity: float) -> Resource:
            if what in OF_A_DEVICE:
                return self._once(f"{rank} {what}", capacity)
            if what in OF_A_CARD and nic is not None:
                return self.card(nic, what)
            return self._once(f"{self.name} {what}", capacity)

        return Site(self.engine, self.host, nic, self.constants, f"{self.name} of {rank}", resource)

    def card(self, nic: Nic, way: str) -> Resource:
        """`way`: one of OF_A_CARD. A link between switches may be slower than the card."""
        own = max((n for n in self.host.nics if n.kind == nic.kind), key=lambda n: n.total)
        return self._once(f"{self.name} {nic.kind} {way}", own.total * self.constants.network)

    def _once(self, name: str, capacity: float) -> Resource:
        if name not in self.resources:
            self.resources[name] = self.engine.resource(name, capacity)
        return self.resources[name]


class SwitchLinks:
    """What crosses from one switch to another, together with all else that does."""

    def __init__(self, engine: Engine, cluster: Cluster, constants: Constants) -> None:
        self.engine, self.cluster, self.constants = engine, cluster, constants
        self.resources: dict[tuple[str, str], Resource] = {}

    def uses(self, here: Nic, there: Nic) -> Uses:
        """Of a byte from one card to the other; none inside one switch."""
        rate = self.cluster.between([here, there])
        ends = self.cluster.switch_of(here), self.cluster.switch_of(there)
        if ends[0] == ends[1] or rate == float("inf"):
            return []
        if ends not in self.resources:
            capacity = rate * self.constants.network
            self.resources[ends] = self.engine.resource(f"{ends[0]} to {ends[1]} link", capacity)
        return [(self.resources[ends], 1.0)]


class RankFabric(Fabric):
    """Costs of one replica's own part. `across`: links between switches, and how many pairs of
    ranks reach each other over each."""

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
        """A ring crosses a host's card once for all ranks there; of what each rank sends to each
        other, all crosses it that is for other hosts."""
        group, own, beside = self.group, self.group.ranks, self.group.beside
        others, away = max(1, group.replicas - 1), group.replicas - beside
        near = exchanged * (beside - 1) / others + (ring if beside > 1 else 0.0)
        uses: Uses = [(self.site.fabric, near)] if near else []
        if away:
            far = group.tp * own * (ring / beside + exchanged * away / others)
            uses += [(self.site.out, far), (self.site.into, far)]
            uses += group.touched(2 * far)
        for link, pairs in self.across.items():
            each = group.tp * own / group.replicas  # of what the whole group sends there
            uses.append((link, each * (ring + exchanged * pairs / others)))
        return uses


@dataclass(frozen=True)
class StagePush:
    """One replica's gradient of a chunk. `lane`: its own, where replicas push by themselves."""

    cost: Cost
    then: Then
    lane: Lane | None


@dataclass
class Meeting:
    """The replicas of one stage, where gradients meet. `together`: all transfer at once, as in a
    collective, from when the last has come; else each by itself, and the sum is there when the
    last has come."""

    engine: Engine
    where: str
    together: bool
    # Of each gradient of which some are there: these, and of how many. Never all of them.
    there: dict[Hashable, tuple[list[StagePush], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lane = self.engine.lane(f"{self.where} collectives")

    def push(self, at: Hashable, partners: int, pushed: StagePush) -> None:
        """`at`: the chunk and round; `partners`: replicas that push it."""
        if self.together:
            if (every := self._come(at, partners, pushed)) is not None:
                cost, then = joined([one.cost for one in every]), lambda: _all(every)
                self.engine.task("Push", cost, then=then, lane=self.lane, where=self.where)
            return

        def arrived() -> None:
            if (every := self._come(at, partners, pushed)) is not None:
                _all(every)

        self.engine.task("Push", pushed.cost, then=arrived, lane=pushed.lane, where=self.where)

    def _come(self, at: Hashable, partners: int, pushed: StagePush) -> list[StagePush] | None:
        """All of them, once the last is there."""
        every, of = self.there.setdefault(at, ([], partners))
        assert of == partners, "replicas push in different rounds"
        every.append(pushed)
        if len(every) < partners:
            return None
        del self.there[at]
        return every

    def check(self) -> None:
        assert all(0 < len(every) < partners for every, partners in self.there.values())


def _all(every: Sequence[StagePush]) -> None:
    for one in every:
        one.then()


@dataclass(frozen=True)
class RankOf:
    """Which replica of a stage, whose replicas meet where."""

    replica: int
    widths: tuple[int, ...]
    meeting: Meeting
