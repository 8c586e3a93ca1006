"""Simulate a plan on a cluster, and return the step time, busy resources, memory, energy and cost.

result = simulate(plan, cluster, shape("OPT-175B"), constants("vtrain"))
result.seconds, result.busy["stage 0 out"], result.peaks
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from roadtrain.config.cluster import Cluster
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import Plan
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Cost, Engine, Task
from roadtrain.simulator.memory import Need, check
from roadtrain.simulator.scene import Scene

# MOST_STEPS: the most steps that are simulated to reach a steady state. SAME: the relative
# difference up to which two steps count as equal. MANY: the number of micro-batches of the shorter
# of the two steps from which a long step is estimated.
MOST_STEPS, SAME, MANY = 12, 1e-6, 64
# counts by key. The key is "seconds", a resource, a lane, or (key of `Engine.stages`, 0 or 1).
Counts = dict[Any, float]


@dataclass(frozen=True)
class Result:
    """The result of a simulation: figures of one step. The first steps differ, so the figures are
    taken from a later step, when consecutive steps take the same time.

    `differ`: the difference in seconds between the last two simulated steps. `estimated`: True if
    the figures are estimated from shorter steps. `busy`: for each resource or lane, the fraction of
    the time in which it is busy. `stages`: (pipeline stage or server, kind of work) -> the total
    seconds and the total work of these tasks. `peaks`: for each memory, the most bytes that the
    memory holds. `bytes`: for each resource, the bytes that use the resource.
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
    estimated: bool = False

    @property
    def samples_per_s(self) -> float:
        return self.plan.samples / self.seconds

    @property
    def joules(self) -> float:
        """Energy of a step in joules."""
        return self.watts * self.seconds


def simulate(
    plan: Plan,
    cluster: Cluster,
    model: ModelShape,
    constants: Constants,
    *,
    traced: bool = False,
    checked: bool = True,
    apart: bool = False,
) -> Result:
    """Simulate steps of a plan until two consecutive steps take the same time, and return the
    result.

    Of many equal micro-batches, only some are simulated. If micro-batches differ and a step has
    several hundred of them, the step is estimated from shorter steps. If `traced` is true, all
    micro-batches are simulated, and the result has a trace of all tasks. If `apart` is true, or if
    the plan has `widths`, each data-parallel rank is simulated separately. Otherwise the ranks of a
    stage are simulated as one rank on the host with the least resources. Raises ConfigError for a
    plan that is impossible on this cluster. If `checked` is true, raises BudgetError for a plan
    that does not fit into memory.
    """
    engine = Engine(traced)
    scene = Scene(plan, cluster, model, constants, apart=apart)
    if checked:
        check(scene.needs, plan)
    scene.build(engine)
    steps = _Steps(scene)
    counts = None if traced or scene.apart else steps.extrapolated()
    counts = counts or steps.steady(scene.num_microbatches)
    for stage in scene.stages:
        stage.num_microbatches = scene.num_microbatches
    # work that a step leaves to later steps must be done eventually
    seconds = max(counts["seconds"], scene.bound())
    used = [r for r in engine.resources if counts[r] > 0]
    busy = {r.name: counts[r] / counts["seconds"] / r.capacity for r in used}
    busy |= {lane.name: counts[lane] / counts["seconds"] for lane in engine.lanes}
    stages = {key: (counts[key, 0], counts[key, 1]) for key in engine.stages}
    engine.check()
    scene.check()
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
        engine.created,
        watts,
        price,
        engine.trace or [],
        scene.needs,
        {p.name: p.changes for p in engine.pools.values()},
        steps.estimated,
    )


class _Steps:
    """The simulated steps of a scene. `marks`: the clock and the use of each resource and lane,
    before the first step and after each step. `differ`: the difference in seconds between the last
    two steps. `estimated`: whether the counts were estimated from shorter steps."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.marks = scene, [_mark(scene.engine)]
        self.differ, self.estimated = 0.0, False

    def step(self, num_microbatches: int) -> Counts:
        engine, stages = self.scene.engine, self.scene.stages
        for stage in stages:
            stage.num_microbatches = num_microbatches
            stage.begin_step()
        engine.run(until=lambda: all(len(s.ends) == s.step for s in stages))
        if fixed := self.scene.constants.fixed:
            engine.task("Wait", Cost(fixed), where="step")
            end = engine.now + fixed
            engine.run(until=lambda: engine.now >= end)
        self.marks.append(_mark(engine))
        return _less(self.marks[-1], self.marks[-2])

    def steady(self, num_microbatches: int) -> Counts:
        """Simulate steps until two consecutive steps are equal, and return the counts of the last
        step. If steps stay unequal, return the mean counts of several steps."""
        took: list[Counts] = []
        while len(took) < MOST_STEPS:
            took.append(self.step(num_microbatches))
            if len(took) >= 3 and self._same(took[-2], took[-1], self.marks[-1]):
                break
        self.differ = abs(took[-1]["seconds"] - took[-2]["seconds"])
        half = 1 if len(took) < MOST_STEPS else len(took) // 2
        return {key: n / half for key, n in _less(self.marks[-1], self.marks[-1 - half]).items()}

    def extrapolated(self) -> Counts | None:
        """Return the counts of a step of many micro-batches, computed from shorter steps, or None
        if the step has too few micro-batches."""
        plan = self.scene.plan
        turn = plan.parallelism.pp  # number of micro-batches after which a pipeline repeats
        number, odd = plan.num_microbatches, plan.num_microbatches % turn
        least = turn * plan.parallelism.virtual_stages
        for few in (2 * least + odd, 6 * least + odd):
            if 3 * number > 2 * (5 * few + 3 * turn) and (counts := self.counted(few, turn)):
                return counts
        many = max(6 * least, turn * ceil(MANY / turn))
        if number <= 6 * many:
            return None
        self.estimated = True
        few_counts, counts = self.steady(many + odd), self.steady(3 * many + odd)
        times = (number - odd - 3 * many) / (2 * many)
        return {key: n + times * (n - few_counts.get(key, 0.0)) for key, n in counts.items()}

    def counted(self, few: int, turn: int) -> Counts | None:
        """Return the counts of the plan's step, extrapolated from steps of `few`, `few + turn` and
        `few + 2 * turn` micro-batches. Return None if the counts do not grow linearly."""
        base, first, second = self.steady(few), self.step(few + turn), self.step(few + 2 * turn)
        more = _less(second, first)
        before, took = _less(first, base), [(key, 0) for key in self.scene.engine.stages]
        changes = [abs(before.get(key, 0.0) - more[key]) for key in took if key in more]
        steady = max(changes, default=0.0) <= SAME * second["seconds"]
        if not steady or not self._same(before, more, self.marks[-1]):
            return None
        times = (self.scene.num_microbatches - few) / turn - 2
        return {key: n + more[key] * times for key, n in second.items()}

    def _same(self, a: Counts, b: Counts, whole: Counts) -> bool:
        """Return whether the counts of two steps are equal. Differences that are small compared
        with the use of a resource in all steps so far (`whole`) do not count."""
        return abs(a["seconds"] - b["seconds"]) <= SAME * b["seconds"] and all(
            abs(a[r] - b[r]) <= SAME * whole[r] for r in self.scene.engine.resources
        )


def _mark(engine: Engine) -> Counts:
    marks: Counts = {"seconds": engine.now} | {r: engine.used(r) for r in engine.resources}
    marks |= {lane: lane.busy for lane in engine.lanes}
    return marks | {(key, i): both[i] for key, both in engine.stages.items() for i in (0, 1)}


def _less(after: Counts, before: Counts) -> Counts:
    return {key: n - before.get(key, 0.0) for key, n in after.items()}
