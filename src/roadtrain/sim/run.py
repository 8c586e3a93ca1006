"""A plan on a cluster, on the virtual clock: step time, what was busy, memory, energy and cost.

    result = simulate(plan, cluster, shape("OPT-175B"), constants("vtrain"))
    result.seconds, result.busy["stage 0 out"], result.peaks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roadtrain.errors import ConfigError
from roadtrain.flow.pipeline import FORWARD, Run
from roadtrain.sim.compute import Constants
from roadtrain.sim.engine import Engine, Resource, Task
from roadtrain.sim.fabric import Fabric, Group, Site
from roadtrain.sim.memory import Need, check, cut, needs
from roadtrain.sim.step import Stage
from roadtrain.spec.cluster import Cluster, Host, Nic
from roadtrain.spec.placement import Plan
from roadtrain.spec.shapes import ModelShape

MOST_STEPS, SAME = 12, 1e-6


@dataclass(frozen=True)
class Result:
    """`seconds`: of a step in the steady state; `differ`: by how much the last two differ. `busy`: share of the time
    that each resource or device is taken. `stages`: (where, stage) ->
    seconds and bytes a step. `peaks`: bytes of each memory. `bytes`: a step, through each resource."""

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
    plan: Plan, cluster: Cluster, model: ModelShape, constants: Constants, *, traced: bool = False,
    logs: list[list[Any]] | None = None, checked: bool = True,
) -> Result:
    """Steps until two in a row take the same time. Raises ConfigError for a plan that this cluster cannot carry out,
    BudgetError (unless not `checked`) for one that does not fit its memories."""
    engine = Engine(traced)
    scene = Scene(engine, plan, cluster, model, constants, logs, checked)
    marks: list[tuple[float, dict[Resource, float], dict[tuple[str, str], tuple[float, float]], list[float]]] = []
    took: list[float] = []
    while True:
        before = engine.now
        for stage in scene.stages:
            stage.begin_step()
        engine.run(until=lambda: all(len(s.ends) == s.step for s in scene.stages))
        if constants.fixed:
            engine.task("Wait", constants.fixed, where="step")
            engine.run(until=partial(_past, engine, engine.now + constants.fixed))
        took.append(engine.now - before)
        marks.append((engine.now, {r: engine.used(r) for r in engine.resources},
                      {k: (v[0], v[1]) for k, v in engine.stages.items()}, [lane.busy for lane in engine.lanes]))
        n = len(took)
        steady = n >= 3 and abs(took[-1] - took[-2]) <= SAME * took[-1] and all(
            abs(marks[-1][1][r] - 2 * marks[-2][1][r] + marks[-3][1][r]) <= SAME * marks[-1][1][r]
            for r in engine.resources)
        if steady or n >= MOST_STEPS:
            break
    half = 1 if steady else len(took) // 2  # steps that take turns: their mean
    (t1, used1, stages1, lanes1), (t0, used0, stages0, lanes0) = marks[-1], marks[-1 - half]
    seconds = max((t1 - t0) / half, scene.bound()[0])  # work that piles up has to be done in the end
    busy = {r.name: (used1[r] - used0[r]) / (t1 - t0) / r.capacity for r in engine.resources if used1[r] > used0[r]}
    busy |= {lane.name: (b1 - b0) / (t1 - t0) for lane, b1, b0 in zip(engine.lanes, lanes1, lanes0)}
    nbytes = {r.name: (used1[r] - used0[r]) / half for r in engine.resources}
    stages = {key: ((s - stages0.get(key, (0, 0))[0]) / half, (w - stages0.get(key, (0, 0))[1]) / half)
              for key, (s, w) in stages1.items()}
    engine.check()
    return Result(
        plan, seconds, abs(took[-1] - took[-2]), len(took), busy, stages,
        {p.name: p.peak for p in engine.pools.values()}, nbytes, engine.made, scene.watts(busy),
        scene.price_per_s() * seconds, engine.trace or [], scene.needs,
        {p.name: p.changes for p in engine.pools.values()})


class Scene:
    """The stages of a plan on their hosts, the server, and what goes between stages."""

    def __init__(self, engine: Engine, plan: Plan, cluster: Cluster, model: ModelShape, constants: Constants,
                 logs: list[list[Any]] | None, checked: bool) -> None:
        self.engine, self.plan, self.cluster, self.model, self.constants = engine, plan, cluster, model, constants
        layout = plan.layout
        hosts = [host for host in cluster.workers for _ in range(host.count)]
        slots = [i for i, host in enumerate(hosts) for _ in range(host.devices)]
        if layout.devices > len(slots):
            raise ConfigError(f"{layout} is {layout.devices} devices, the cluster has {len(slots)}",
                              hint="smaller groups, or more hosts")
        if layout.vp > 1 and plan.placement.streamed:
            raise ConfigError(f"placement {plan.placement.name} streams parameters in the order of one part a stage, "
                              f"vp is {layout.vp}", hint="vp = 1, or parameters that stay on the device")
        server = None
        if plan.placement.served:
            if not cluster.spares:
                raise ConfigError(f"placement {plan.placement.name} needs a host without devices, the cluster has none",
                                  hint="add one to the cluster, or choose a placement on the workers' hosts")
            node = cluster.spares[0].together
            nics = [cluster.common([host, node])[1] for host in cluster.workers]
            server = Site(engine, node, min(nics, key=lambda n: n.total), constants, "server")
        self.stages: list[Stage] = []
        self.groups: list[Group] = []
        per_stage = layout.tp * layout.replicas
        cuts = cut(model.blocks, plan)
        firsts = [min((hosts[s] for s in slots[i * per_stage : (i + 1) * per_stage]),
                      key=lambda host: host.device.memory if host.device else 0.0) for i in range(layout.pp)]
        self.needs = needs(plan, cluster, model, [[b for part in parts for b in part] for parts in cuts], firsts)
        if checked:
            check(self.needs, plan)
        for number, parts in enumerate(cuts):
            own = list(dict.fromkeys(slots[number * per_stage : (number + 1) * per_stage]))
            mine = [hosts[i] for i in own]
            first = min(mine, key=lambda host: host.device.flops if host.device else 0.0)  # the slowest sets the pace
            if first.devices % layout.tp and layout.tp % first.devices:
                raise ConfigError(f"a tensor group of {layout.tp} does not fit a host of {first.devices} devices",
                                  hint="tp divides the devices of a host, or is a multiple of them")
            nics = self._nics(mine, "dp")
            slowest = min(nics, key=lambda n: n.total) if nics else None
            if slowest is not None and (most := cluster.between(nics)) < slowest.total:  # they meet over a link
                slowest = slowest.model_copy(update={"rate": most, "count": 1})
            ranks = min(first.devices, per_stage) // layout.tp or 1
            rates = tuple((n.total if n else 1.0) * constants.network for n in nics)
            site = Site(engine, first, slowest, constants, f"stage {number}")
            group = Group(site, max(1, layout.replicas // ranks), min(ranks, layout.replicas),
                          min(layout.tp, first.devices), rates)
            fabric = Fabric(engine, cluster, plan, group, constants, server, cluster.spares)
            assert first.device is not None
            if logs is not None:
                logs.append([])
            self.groups.append(group)
            self.stages.append(Stage(engine, fabric, plan, parts, first.device, constants, number, self._send,
                                     log=None if logs is None else logs[-1]))
        self.used_hosts = [hosts[i] for i in dict.fromkeys(slots[: layout.devices])]
        ends = [(i * per_stage - 1, i * per_stage) for i in range(1, layout.pp)]
        ends += [(layout.devices - 1, 0)] if layout.vp > 1 and layout.pp > 1 else []  # the next part begins
        self.between = [self._boundary(hosts, slots, *pair) for pair in ends]

    def _nics(self, hosts: Sequence[Host], group: str) -> list[Nic]:
        """The card of each host that the group's data takes."""
        wanted = self.plan.networks.get(group)
        if wanted is not None:
            hosts = [h.model_copy(update={"nics": tuple(n for n in h.nics if n.kind == wanted)}) for h in hosts]
        if len({h.name for h in hosts}) == 1 and len(hosts) == 1:
            return [max(hosts[0].nics, key=lambda n: n.total)] if hosts[0].nics else []
        return list(self.cluster.common(hosts))

    def _boundary(
        self, hosts: Sequence[Host], slots: Sequence[int], last: int, at: int
    ) -> tuple[Resource, Resource, float] | None:
        """(forward, backward, latency) from the stage of device `last` to that of `at`; None: inside a host."""
        a, b = slots[last], slots[at]
        if a == b:
            return None
        nics = self._nics([hosts[a], hosts[b]], "pp")
        rate = min(*(n.total for n in nics), self.cluster.between(nics))
        flows = self.groups[0].ranks  # that each host sends side by side
        name = f"between {at}"
        each = rate * self.constants.network / flows
        return (self.engine.resource(name + " forth", each), self.engine.resource(name + " back", each),
                max(n.latency for n in nics))

    def _send(self, stage: Stage, run: Run) -> None:
        assert stage.decider is not None
        if (goes := stage.decider.goes(run)) is None:
            return
        to, part = goes
        forth = run.what == FORWARD
        way = self.between[stage.number if forth else to] if self.between else None
        nbytes = 2.0 * self.model.hidden * self.model.tokens * self.plan.micro_batch / self.plan.layout.cp
        uses = [] if way is None else [(way[0] if forth else way[1], 1.0)]
        self.engine.task("Activations", nbytes if uses else 0.0, uses, latency=way[2] if way else 0.0,
                         then=lambda: self.stages[to].arrived(run.what, run.micro, part), where=stage.name)

    def bound(self) -> tuple[float, str]:
        """Seconds that a step takes at least, and what takes them."""
        bounds, before = [stage.bound() for stage in self.stages], 0.0
        for stage in self.stages:  # its first micro-batch comes through all stages before it, its last goes back
            bounds.append((before + self.plan.micros * stage.pass_s, f"{stage.name} device"))
            before += stage.first_s
        seconds, what = max(bounds)
        return seconds + self.constants.fixed, what

    def watts(self, busy: dict[str, float]) -> float:
        """Idle, and what the busy share adds, of all hosts and devices that the plan uses."""
        total, n = 0.0, max(1, len(self.stages))
        for stage, group in zip(self.stages, self.groups):
            device, host = stage.device, group.site.host
            share = busy.get(stage.lane.name, 0.0)
            devices = self.plan.layout.replicas * self.plan.layout.tp
            total += devices * (device.idle_watts + (device.peak_watts - device.idle_watts) * share)
            work = max(busy.get(f"stage {stage.number} {what}", 0.0) for what in ("updates", "sums", "out"))
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


def _watts(host: Host, share: float) -> float:
    return host.idle_watts + (host.peak_watts - host.idle_watts) * share
