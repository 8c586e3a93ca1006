"""A plan on a cluster, on the virtual clock: step time, what was busy, memory, energy and cost.

result = simulate(plan, cluster, shape("OPT-175B"), constants("vtrain"))
result.seconds, result.busy["stage 0 out"], result.peaks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roadtrain.config.cluster import Cluster, Device, Host, Nic, least_of
from roadtrain.config.models import ModelShape
from roadtrain.config.plan import Plan
from roadtrain.errors import ConfigError
from roadtrain.protocol.pipeline import FORWARD, RunBlocks
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Cost, Engine, Resource, Task
from roadtrain.simulator.fabric import Fabric, FlowGroup, Site, check_placement
from roadtrain.simulator.memory import Need, check, cut, needs
from roadtrain.simulator.step import SimulatedStage

MOST_STEPS, SAME = 12, 1e-6
# of what was counted: "seconds", a resource, a lane, (stage's key, 0 or 1)
Counts = dict[Any, float]


@dataclass(frozen=True)
class Result:
    """`seconds`: of a step in the steady state; `differ`: by how much the last two differ. `busy`:
    share of the time that each resource or device is taken. `stages`: (where, stage) -> seconds and
    bytes a step. `peaks`: bytes of each memory. `bytes`: a step, through each resource.
    """

    plan: Plan
    seconds: float
    differ: float
    steps: int
    busy: dict[str, float]
    stages: dict[tuple[str, str], tuple[float, float]]
    peaks: dict[str, float]
    bytes: dict[str, float]
    tasks: int
    watts: float = 0.0
    price: float = 0.0
    trace: list[Task] = field(default_factory=list, repr=False)
    needs: list[Need] = field(default_factory=list)
    timeline: dict[str, list[tuple[float, float]]] = field(default_factory=dict, repr=False)

    @property
    def samples_per_s(self) -> float:
        return self.plan.samples / self.seconds

    @property
    def joules(self) -> float:
        """Of a step."""
        return self.watts * self.seconds


def simulate(
    plan: Plan,
    cluster: Cluster,
    model: ModelShape,
    constants: Constants,
    *,
    traced: bool = False,
    logs: list[list[Any]] | None = None,
    checked: bool = True,
) -> Result:
    """Steps until two in a row take the same time. Of many micro-batches those that repeat are
    counted, not simulated, unless it is `traced` or logged. Raises ConfigError for a plan that
    this cluster cannot carry out, BudgetError (unless not `checked`) for one that does not fit
    its memories."""
    engine = Engine(traced)
    scene, parallelism = Scene(plan, cluster, model, constants), plan.parallelism
    if checked:
        check(scene.needs, plan)
    scene.build(engine, logs)
    steps = _Steps(scene)
    turn = parallelism.pp  # micro-batches after which a pipeline repeats itself
    counts = None
    for times in (2, 6):
        few = times * turn * parallelism.virtual_stages + plan.num_microbatches % turn
        if (
            counts is None
            and not traced
            and logs is None
            and 3 * plan.num_microbatches > 2 * (5 * few + 3 * turn)
        ):
            counts = steps.counted(few, turn, plan.num_microbatches)
    counts = counts or steps.steady(plan.num_microbatches)
    # work that piles up has to be done in the end
    seconds = max(counts["seconds"], scene.bound()[0])
    busy = {
        r.name: counts[r] / counts["seconds"] / r.capacity
        for r in engine.resources
        if counts[r] > 0
    }
    busy |= {lane.name: counts[lane] / counts["seconds"] for lane in engine.lanes}
    stages = {key: (counts[key, 0], counts[key, 1]) for key in engine.stages}
    engine.check()
    for stage in scene.stages:
        stage.check()
    watts = scene.watts(busy)
    price = scene.price_per_s() * seconds + watts * seconds / 3.6e6 * cluster.price_per_kwh
    return Result(
        plan,
        seconds,
        steps.differ,
        len(steps.marks) - 1,
        busy,
        stages,
        {p.name: p.peak for p in engine.pools.values()},
        {r.name: counts[r] for r in engine.resources},
        engine.made,
        watts,
        price,
        engine.trace or [],
        scene.needs,
        {p.name: p.changes for p in engine.pools.values()},
    )


class _Steps:
    """Runs steps. `marks`: after each, all that was counted until then: seconds, what each
    resource gave, what each lane and stage took. `differ`: seconds by which the last two steady
    steps differ."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.marks, self.differ = scene, [_mark(scene.engine)], 0.0

    def one(self, num_microbatches: int) -> Counts:
        engine, stages = self.scene.engine, self.scene.stages
        for stage in stages:
            stage.num_microbatches = num_microbatches
            stage.begin_step()
        engine.run(until=lambda: all(len(s.ends) == s.step for s in stages))
        if fixed := self.scene.constants.fixed:
            engine.task("Wait", Cost(fixed), where="step")
            engine.run(until=partial(_past, engine, engine.now + fixed))
        self.marks.append(_mark(engine))
        return _less(self.marks[-1], self.marks[-2])

    def steady(self, num_microbatches: int) -> Counts:
        """Of a step once two in a row are the same; of steps that take turns, their mean."""
        took: list[Counts] = []
        while len(took) < MOST_STEPS:
            took.append(self.one(num_microbatches))
            if len(took) >= 3 and self._same(took[-2], took[-1], self.marks[-1]):
                break
        self.differ = abs(took[-1]["seconds"] - took[-2]["seconds"])
        half = 1 if len(took) < MOST_STEPS else len(took) // 2
        return {key: n / half for key, n in _less(self.marks[-1], self.marks[-1 - half]).items()}

    def counted(self, few: int, turn: int, num_microbatches: int) -> Counts | None:
        """Of a step of `num_microbatches`, by what `turn` more do to steps of a few. None where
        that is not always the same."""
        base, one, two = self.steady(few), self.one(few + turn), self.one(few + 2 * turn)
        more = _less(two, one)
        for stage in self.scene.stages:
            stage.num_microbatches = num_microbatches
        before, took = _less(one, base), {(key, 0) for key in self.scene.engine.stages}
        if not self._same(before, more, self.marks[-1]) or any(
            abs(before.get(key, 0.0) - n) > SAME * two["seconds"]
            for key, n in more.items()
            if key in took
        ):
            return None
        return {
            key: n + more[key] * ((num_microbatches - few) / turn - 2) for key, n in two.items()
        }

    def _same(self, one: Counts, other: Counts, whole: Counts) -> bool:
        """`whole`: counts so far, of which it is a small part by which resources may differ."""
        return abs(one["seconds"] - other["seconds"]) <= SAME * other["seconds"] and all(
            abs(one[r] - other[r]) <= SAME * whole[r] for r in self.scene.engine.resources
        )


def _mark(engine: Engine) -> Counts:
    marks: Counts = {"seconds": engine.now} | {r: engine.used(r) for r in engine.resources}
    marks |= {lane: lane.busy for lane in engine.lanes}
    return marks | {(key, i): both[i] for key, both in engine.stages.items() for i in (0, 1)}


def _less(after: Counts, before: Counts) -> Counts:
    return {key: n - before.get(key, 0.0) for key, n in after.items()}


class Scene:
    """A plan on a cluster: `needs`, what it takes of every memory; once built, the stages on their
    hosts, the server, and what goes between stages. Raises ConfigError for a plan that this cluster
    cannot carry out.
    """

    def __init__(
        self, plan: Plan, cluster: Cluster, model: ModelShape, constants: Constants
    ) -> None:
        self.plan, self.cluster, self.model, self.constants = plan, cluster, model, constants
        parallelism = plan.parallelism
        hosts = [host for host in cluster.workers for _ in range(host.count)]
        slots = [i for i, host in enumerate(hosts) for _ in range(host.devices)]
        self.hosts, self.slots = hosts, slots
        if parallelism.devices > len(slots):
            raise ConfigError(
                f"{parallelism} is {parallelism.devices} devices, the cluster has {len(slots)}",
                hint="smaller groups, or more hosts",
            )
        if parallelism.virtual_stages > 1 and plan.placement.streamed:
            raise ConfigError(
                f"placement {plan.placement.name} streams parameters in the order of one part a"
                f" stage, virtual_stages is {parallelism.virtual_stages}",
                hint="virtual_stages = 1, or parameters that stay on the device",
            )
        self.used_hosts = [hosts[i] for i in dict.fromkeys(slots[: parallelism.devices])]
        check_placement(plan.placement, cluster, self.used_hosts)
        n = parallelism.tp * parallelism.replicas
        self.groups_of = [
            [hosts[i] for i in dict.fromkeys(slots[k * n : (k + 1) * n])]
            for k in range(parallelism.pp)
        ]
        self.cuts = cut(model.blocks, plan)
        self.least = [least_of(group) for group in self.groups_of]
        stages: dict[int, set[int]] = {}  # of each host
        for i, slot in enumerate(slots[: parallelism.devices]):
            stages.setdefault(slot, set()).add(i // n)
        sharing = [
            max(len(stages[slot]) for slot in set(slots[k * n : (k + 1) * n]))
            for k in range(parallelism.pp)
        ]
        self.needs = needs(
            plan,
            cluster,
            model,
            [[b for part in parts for b in part] for parts in self.cuts],
            self.least,
            sharing,
        )

    def build(self, engine: Engine, logs: list[list[Any]] | None = None) -> None:
        """Raises ConfigError where hosts have no network in common, or a tensor group does not
        fit them."""
        plan, cluster, constants, parallelism = (
            self.plan,
            self.cluster,
            self.constants,
            self.plan.parallelism,
        )
        self.engine, per_stage = engine, parallelism.tp * parallelism.replicas
        server = None
        if plan.placement.served:
            node = cluster.spares[0].together
            nics = [cluster.common([host, node])[1] for host in cluster.workers]
            server = Site(engine, node, min(nics, key=lambda n: n.total), constants, "server")
        self.stages: list[SimulatedStage] = []
        self.groups: list[FlowGroup] = []
        for number, parts in enumerate(self.cuts):
            mine = self.groups_of[number]
            first = self.least[number]  # the slowest sets the pace
            fewest = min(host.devices for host in mine)
            if (parallelism.tp % fewest or fewest < first.devices) and fewest % parallelism.tp:
                raise ConfigError(
                    f"a tensor group of {parallelism.tp} does not fit a host of {fewest} devices",
                    hint="tp divides the devices of a host, or is a multiple of them",
                )
            nics = self._nics(mine, "dp")
            slowest = min(nics, key=lambda n: n.total) if nics else None
            # they meet over a link
            if slowest is not None and (most := cluster.between(nics)) < slowest.total:
                slowest = slowest.model_copy(update={"rate": most, "count": 1})
            # of each host
            devices = Counter(self.slots[number * per_stage : (number + 1) * per_stage]).values()
            ranks = min(parallelism.replicas, max(devices) // parallelism.tp or 1)
            many = (
                len(devices) if parallelism.tp <= first.devices else parallelism.replicas // ranks
            )
            rates = tuple((n.total if n else 1.0) * constants.network for n in nics)
            site = Site(engine, first, slowest, constants, f"stage {number}")
            group = FlowGroup(
                site, many, ranks, min(parallelism.tp, first.devices), rates, parallelism.replicas
            )
            fabric = Fabric(engine, cluster, plan, group, constants, server, cluster.spares)
            assert first.device is not None
            if logs is not None:
                logs.append([])
            self.groups.append(group)
            self.stages.append(
                SimulatedStage(
                    engine,
                    fabric,
                    parts,
                    first.device,
                    number,
                    self._send,
                    log=None if logs is None else logs[-1],
                )
            )
        ends = [(i * per_stage - 1, i * per_stage) for i in range(1, parallelism.pp)]
        # the next part begins
        ends += (
            [(parallelism.devices - 1, 0)]
            if parallelism.virtual_stages > 1 and parallelism.pp > 1
            else []
        )
        self.between = [self._boundary(*pair) for pair in ends]

    def _nics(self, hosts: Sequence[Host], group: str) -> list[Nic]:
        """The card of each host that the group's data takes."""
        wanted = self.plan.networks.get(group)
        if self.plan.placement.sum == "relay" and group == "dp":
            hosts = [
                h.model_copy(update={"nics": tuple(n for n in h.nics if n.relay)}) for h in hosts
            ]
        if wanted is not None:
            hosts = [
                h.model_copy(update={"nics": tuple(n for n in h.nics if n.kind == wanted)})
                for h in hosts
            ]
        if len({h.name for h in hosts}) == 1 and len(hosts) == 1:
            return [max(hosts[0].nics, key=lambda n: n.total)] if hosts[0].nics else []
        return list(self.cluster.common(hosts))

    def _boundary(self, last: int, at: int) -> tuple[Resource, Resource, float] | None:
        """(forward, backward, latency) from the stage of device `last` to that of `at`; None:
        inside a host."""
        hosts, a, b = self.hosts, self.slots[last], self.slots[at]
        if a == b:
            return None
        nics = self._nics([hosts[a], hosts[b]], "pp")
        rate = min(*(n.total for n in nics), self.cluster.between(nics))
        flows = self.groups[0].ranks  # that each host sends side by side
        name = f"between {at}"
        each = rate * self.constants.network / flows
        return (
            self.engine.resource(name + " forth", each),
            self.engine.resource(name + " back", each),
            max(n.latency for n in nics),
        )

    def _send(self, stage: SimulatedStage, run: RunBlocks) -> None:
        assert stage.machine is not None
        if (goes := stage.machine.goes(run)) is None:
            return
        to, part, _ = goes
        forth = run.what == FORWARD
        way = self.between[stage.number if forth else to] if self.between else None
        nbytes = (
            2.0
            * self.model.hidden
            * self.model.tokens
            * self.plan.micro_batch
            / self.plan.parallelism.cp
        )
        uses = [] if way is None else [(way[0] if forth else way[1], 1.0)]
        self.engine.task(
            "Activations",
            Cost(nbytes if uses else 0.0, uses, way[2] if way else 0.0),
            then=lambda: self.stages[to].arrived(run.what, run.micro, part),
            where=stage.name,
        )

    def bound(self) -> tuple[float, str]:
        """Seconds that a step takes at least, and what takes them."""
        bounds, before = [stage.bound() for stage in self.stages], 0.0
        # its first micro-batch comes through all stages before it, its last goes back
        for stage in self.stages:
            bounds.append(
                (before + self.plan.num_microbatches * stage.pass_s, f"{stage.name} device")
            )
            before += stage.first_s
        seconds, what = max(bounds)
        return seconds + self.constants.fixed, what

    def watts(self, busy: dict[str, float]) -> float:
        """Idle, and what the busy share adds, of all hosts and devices that the plan uses."""
        total, n = 0.0, max(1, len(self.stages))
        for stage, group in zip(self.stages, self.groups):
            device, host = stage.device, group.site.host
            share = busy.get(stage.lane.name, 0.0)
            devices = self.plan.parallelism.replicas * self.plan.parallelism.tp
            total += devices * _watts(device, share)
            work = max(
                busy.get(f"stage {stage.number} {what}", 0.0) for what in ("updates", "sums", "out")
            )
            total += len(self.used_hosts) / n * _watts(host, work)
        if self.plan.placement.served or self.plan.placement.sum in ("spares", "separate"):
            for host in self.cluster.spares:
                total += host.count * _watts(host, busy.get("server updates", 0.0))
        return total

    def price_per_s(self) -> float:
        """Of the hosts that the plan uses, by the hour."""
        hosts = [*self.used_hosts]
        if self.plan.placement.served or self.plan.placement.sum in ("spares", "separate"):
            hosts += [host for host in self.cluster.spares for _ in range(host.count)]
        return sum(host.price_per_hour for host in hosts) / 3600


def _past(engine: Engine, second: float) -> bool:
    return engine.now >= second


def _watts(of: Host | Device, share: float) -> float:
    """What says no peak takes what it takes idle."""
    return of.idle_watts + max(0.0, of.peak_watts - of.idle_watts) * share
