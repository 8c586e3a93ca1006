"""Which plan is best on a cluster, and why. Candidates: placements x parallelisms x batches x
options x stage sizes.

Each is first refused where a memory is too small, then bounded from below in closed form (each
resource's bytes over its capacity; nothing waits), and simulated in the order of the bounds until
no bound is better than the best simulated one: so the pick is the best of all candidates by the
simulator, though few are simulated. Lossy or late options are candidates only where they are asked
for (Rule 2). Where no batch is given, many micro-batches a step say how fast a sample can be at
best, and the least batch that comes close to that is planned for. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any, Literal

from pydantic import Field

from roadtrain.config.cluster import Cluster
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import HEADROOM, Plan
from roadtrain.errors import ConfigError
from roadtrain.options.schema import Count, Flag, Number, value
from roadtrain.planner.candidates import (
    MOST_MICROBATCHES,
    candidates,
    most_samples,
    nearest_batches,
    stages_that_fit,
)
from roadtrain.planner.resources import busy_share, scaled
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Engine
from roadtrain.simulator.memory import Need
from roadtrain.simulator.run import Result, simulate
from roadtrain.simulator.scene import Scene

# bound of a sample, number, the plan; whether all is in the bound
Waiting = tuple[float, int, Scene, bool]
Fitted = Callable[[Plan], Plan | str]
CLOSE = 0.05  # what a larger batch would have to take off a sample's score to be chosen
SMALLER, MORE = 0.5, 1.1  # a resource's rate, to see what it would change
NO_MEMORY = "memory of "  # begins the reason of a plan that does not fit
LITTLE = 1e-3  # share of a step in which a resource is taken, that no rate of it changes anything


@dataclass(frozen=True)
class Found:
    """A plan that was simulated. `score`: seconds, currency or joules a sample."""

    plan: Plan
    result: Result
    score: float


@dataclass
class Family:
    """Candidates of one placement.

    Attributes:
        refused: Reason -> how many of the plans that were tried cannot be.
        hints: Reason -> what to change, where that is known.
        left_out: Reason -> how many arrangements of it were not tried.
        nearest: The smallest shortfall of a plan that does not fit a memory.
        pruned: How many had a bound that was worse than the pick.
    """

    tried: int = 0
    simulated: int = 0
    pruned: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    nearest: tuple[Need, Plan] | None = None
    best: Found | None = None
    least: float = float("inf")  # bound of the best candidate, a sample

    def refuse(self, why: str | ConfigError) -> None:
        reason = str(why).partition("\n")[0]
        self.refused[reason] = self.refused.get(reason, 0) + 1
        if isinstance(why, ConfigError):
            self.hints[reason] = why.hint


@dataclass(frozen=True)
class SearchResult:
    """`front`: simulated plans that no other beats in both time and (cost, else energy)."""

    pick: Found | None
    runner_up: Found | None
    families: dict[str, Family]
    front: list[Found]
    gains: dict[str, float]  # resource -> what MORE of it takes off the pick's score, a share
    flips: list[str]  # where the runner-up would win
    batch: int = 0  # samples of a step that all of it is for; 0: nothing fits, and none was given
    chosen: str = ""  # why, where nobody gave it


@value
class SearchOptions:
    """What a plan shall be good for."""

    goal: Literal["time", "cost", "energy"] = "time"
    # samples of a step; None: the least whose score a sample is within CLOSE of the best there is,
    # by any number of micro-batches
    batch: Count | None = None
    placements: Sequence[str] = ()  # that are tried; none: all
    late: Flag = False  # staleness 1 is tried too
    # the share of each device's and host's memory that plans leave free
    headroom: Number = Field(default=HEADROOM, lt=1)


def search(
    cluster: Cluster,
    model: ModelShape,
    constants: Constants,
    *,
    explain: bool = True,
    fitted: Fitted | None = None,
    **options: Any,
) -> SearchResult:
    """`options`: fields of SearchOptions. `fitted`: makes of a candidate the plan that is tried, or
    says why it cannot be. Raises ConfigError for bad input; where nothing fits the
    answer has no pick, and its families say what is lacking."""
    asked = SearchOptions(**options)
    goal, batch = asked.goal, asked.batch
    if not cluster.device_count:
        raise ConfigError(
            f"cluster {cluster.name} has no devices",
            hint='give a host a `device`, as device = "A100-80GB"; `roadtrain probe` writes one of'
            ' kind "cpu" where processors shall compute',
        )
    if goal == "cost" and not any(
        (*(host.price_per_hour for host in cluster.hosts), cluster.price_per_kwh)
    ):
        raise ConfigError("goal cost, and no host has a price", hint="give hosts `price_per_hour`")
    if goal == "energy" and not any(h.device and h.device.peak_watts for h in cluster.workers):
        raise ConfigError(
            "goal energy, and no device says what it takes", hint="give devices `peak_watts`"
        )
    one = _Search(cluster, model, constants, asked, fitted)
    if batch is not None:
        return replace(one.best(batch, explain), batch=batch)
    most = one.best(None, explain=False)
    if most.pick is None:
        return most
    batch, score = one.least_batch(most.pick)
    why = (
        f"no batch was given; of micro-batches of 1 to {most_samples(model)} samples and up to"
        f" {MOST_MICROBATCHES} of them, this is the least that is within {CLOSE:.0%} of the best"
        f" {goal} a sample"
    )
    samples, less = most.pick.plan.samples, max(0.0, 1 - most.pick.score / score)
    tried = f" ({samples} samples take {less:.1%} less)"
    why += tried if batch < samples else "; it is the most that was tried"
    return replace(one.best(batch, explain), batch=batch, chosen=why)


@dataclass(frozen=True)
class _Search:
    """What is searched for, as in `search`."""

    cluster: Cluster
    model: ModelShape
    constants: Constants
    asked: SearchOptions
    fitted: Fitted | None = None
    # what tells networks of plans apart -> why they cannot be
    reached: dict[Any, ConfigError | None] = field(default_factory=dict)

    def scene(self, plan: Plan) -> Scene:
        """Raises ConfigError where the plan cannot be on this cluster."""
        return Scene(plan, self.cluster, self.model, self.constants)

    def simulated(self, plan: Plan, cluster: Cluster | None = None) -> Found:
        """`cluster`: another one than is searched for."""
        result = simulate(plan, cluster or self.cluster, self.model, self.constants, checked=False)
        worth = {"time": result.seconds, "cost": result.price, "energy": result.joules}
        return Found(plan, result, worth[self.asked.goal] / plan.samples)

    def score(self, seconds: float, scene: Scene) -> float:
        """Of a sample, at least."""
        samples = scene.plan.samples
        if self.asked.goal == "cost":  # what energy costs comes on top
            return scene.price_per_s() * seconds / samples
        if self.asked.goal == "energy":
            return scene.watts({}) * seconds / samples
        return seconds / samples

    def best(self, batch: int | None, explain: bool) -> SearchResult:
        """Of all candidates of one batch."""
        families, waiting = self._screened(batch)
        found = self._simulated_in_order(waiting, families)
        if not found:
            return SearchResult(None, None, families, [], {}, [])
        pick = found[0]
        runner = next((one for one in found[1:] if _differs(one.plan, pick.plan)), None)
        if runner is None:
            runner = self._pruned_runner_up(pick, waiting, families)
        gains, flips = self._gains(pick) if explain else {}, list[str]()
        if runner is not None:
            family = families[runner.plan.placement.name]
            family.best = family.best or runner
            found.append(runner)
            flips = self._flips(pick, runner) if explain else []
        return SearchResult(pick, runner, families, _front(found), gains, flips)

    def least_batch(self, best: Found) -> tuple[int, float]:
        """Samples of the least step, and its score, by which the best plan's way is within
        CLOSE of its score."""
        ranks = best.plan.parallelism
        turn = max(ranks.widths, default=ranks.pp if ranks.virtual_stages > 1 else 1)
        passes = [turn << i for i in range(MOST_MICROBATCHES.bit_length())]
        sizes = [1 << i for i in range(most_samples(self.model).bit_length())]
        ways = sorted(product(sizes, passes), key=lambda way: (way[0] * way[1], -way[0]))
        for size, num_microbatches in ways:
            plan = best.plan.changed(micro_batch=size, num_microbatches=num_microbatches)
            if plan.samples >= best.plan.samples:
                break
            scene = self.scene(plan)
            if not all(need.fits for need in scene.needs):
                continue
            scene.build(Engine())
            most = best.score * (1 + CLOSE)
            if self.score(scene.bound(), scene) > most:
                continue
            found = self.simulated(plan)
            if found.score <= most:
                return plan.samples, found.score
        return best.plan.samples, best.score

    def _screened(self, batch: int | None) -> tuple[dict[str, Family], list[Waiting]]:
        """All candidates by placement; those that fit every memory, with a first bound."""
        families: dict[str, Family] = defaultdict(Family)
        fits: set[Plan] = set()
        waiting: list[Waiting] = []
        passes: dict[Any, float] = {}  # what tells them apart -> seconds of a micro-batch
        for plan in self._candidates(batch, families):
            again = plan.activation_checkpointing
            if again and plan.changed(activation_checkpointing=False) in fits:
                continue  # it would only compute more
            family = families[plan.placement.name]
            family.tried += 1
            scene = self._fitting(plan, family)
            if scene is None:
                continue
            fits.add(scene.plan)
            waiting.append((self._first_bound(scene, passes), len(waiting), scene, False))
        if not any(family.tried for family in families.values()):
            multiples = nearest_batches(batch or 1, self.cluster.device_count)
            raise ConfigError(
                f"no parallelism of {self.cluster.device_count} devices takes a batch of {batch}"
                " samples",
                hint=f"a multiple of the data-parallel ranks: {multiples}",
            )
        return families, waiting

    def _candidates(self, batch: int | None, families: dict[str, Family]) -> Iterator[Plan]:
        """Those that can be, each once; `families` say why others cannot."""
        seen: set[Plan] = set()

        def left_out(name: str, why: str, many: int) -> None:
            families[name].left_out[why] = many

        for plan in candidates(
            self.cluster,
            self.model,
            batch=batch,
            placements=self.asked.placements,
            late=self.asked.late,
            headroom=self.asked.headroom,
            left_out=left_out,
        ):
            made = plan if self.fitted is None else self.fitted(plan)
            if isinstance(made, str):
                family = families[plan.placement.name]
                family.tried += 1
                family.refuse(made)
            elif self.fitted is None or made not in seen:
                seen.add(made)
                yield made

    def _fitting(self, plan: Plan, family: Family) -> Scene | None:
        """The plan's scene, with other pipeline stages where only those fit; None where no
        memory would do: `family` says why."""
        try:
            scene = self.scene(plan)
            self._check_reached(scene)
        except ConfigError as error:
            family.refuse(error)
            return None
        worst = max(scene.needs, key=_over)
        if not worst.fits and (stages := stages_that_fit(scene)) is not None:
            other = plan.changed(parallelism=replace(plan.parallelism, stages=stages))
            if self.fitted is None or self.fitted(other) == other:  # the job may state them
                plan, scene = other, self.scene(other)
                worst = max(scene.needs, key=_over)
        if worst.fits:
            return scene
        family.refuse(NO_MEMORY + worst.where.replace("stage ", "").lstrip("0123456789 "))
        if family.nearest is None or _over(worst) < _over(family.nearest[0]):
            family.nearest = worst, plan
        return None

    def _check_reached(self, scene: Scene) -> None:
        """Raise ConfigError for a plan whose hosts cannot reach each other, or that names hosts
        as summing which have nothing to sum."""
        ranks = scene.plan.parallelism
        key = scene.plan.placement, ranks.replicas_of, ranks.tp
        if key not in self.reached:
            self.reached[key] = None
            try:
                scene.check_networks()
            except ConfigError as error:
                self.reached[key] = error
        if (why := self.reached[key]) is not None:
            raise why

    def _first_bound(self, scene: Scene, passes: dict[Any, float]) -> float:
        """By computing alone. `passes`: what was computed before."""
        if self.asked.goal == "energy":
            return 0.0
        plan, ranks = scene.plan, scene.plan.parallelism
        key = plan.micro_batch, plan.activation_checkpointing, ranks.tp, ranks.cp, ranks.ep
        if key not in passes:
            passes[key] = _computing(plan, self.cluster, self.model, self.constants)
        return self.score(passes[key] * _turns(plan), scene)

    def _in_order(
        self, waiting: list[Waiting], families: Mapping[str, Family]
    ) -> Iterator[tuple[float, Scene]]:
        """Bounds and scenes, the least first. What is bounded by computing alone is built when
        it comes first, since that takes a while."""
        heapify(waiting)
        while waiting:
            least, number, scene, built = heappop(waiting)
            if built:
                yield least, scene
                continue
            try:
                scene.build(Engine())
            except ConfigError as error:
                families[scene.plan.placement.name].refuse(error)
                continue
            bound = max(least, self.score(scene.bound(), scene))
            heappush(waiting, (bound, number, scene, True))

    def _simulated_in_order(
        self, waiting: list[Waiting], families: Mapping[str, Family]
    ) -> list[Found]:
        """Those whose bound is better than the best of all simulated before, best first; the
        others are counted as pruned and stay in `waiting`."""
        found: list[Found] = []
        best = float("inf")
        for least, scene in self._in_order(waiting, families):
            if least >= best:
                waiting.append((least, -1, self.scene(scene.plan), True))
                break
            one = self.simulated(scene.plan)
            families[scene.plan.placement.name].simulated += 1
            found.append(one)
            best = min(best, one.score)
        for least, _, scene, _ in waiting:
            family = families[scene.plan.placement.name]
            family.pruned, family.least = family.pruned + 1, min(family.least, least)
        found.sort(key=lambda one: one.score)
        for one in reversed(found):
            families[one.plan.placement.name].best = one
        return found

    def _pruned_runner_up(
        self, pick: Found, waiting: list[Waiting], families: Mapping[str, Family]
    ) -> Found | None:
        """The best bound of another way than the pick: the bound alone says that it lost."""
        for _, scene in self._in_order(waiting, families):
            if _differs(scene.plan, pick.plan):
                return self.simulated(scene.plan)
        return None

    def _gains(self, pick: Found) -> dict[str, float]:
        gains = {}
        for name, other in scaled(self.cluster, MORE).items():
            if busy_share(pick.result, name) < LITTLE:
                continue
            gain = 1 - self._score_with(pick, name, other) / pick.score
            if gain > 1e-4:
                gains[name] = gain
        return dict(sorted(gains.items(), key=lambda pair: -pair[1]))

    def _score_with(self, one: Found, name: str, other: Cluster) -> float:
        """Its score where what is called `name` is as fast as in `other`: its own if it hardly
        uses that."""
        if busy_share(one.result, name) < LITTLE:
            return one.score
        return self.simulated(one.plan, other).score

    def _flips(self, pick: Found, runner: Found) -> list[str]:
        out = []
        for factor, words in ((SMALLER, "half as fast"), (1 / SMALLER, "twice as fast")):
            for name, other in scaled(self.cluster, factor).items():
                worse = 1 + busy_share(pick.result, name) if factor < 1 else 1.0
                better = 1.0 if factor < 1 else 1 - busy_share(runner.result, name) / 2
                if runner.score * better >= pick.score * worse:  # whatever waits for it
                    continue
                mine, its = (self._score_with(one, name, other) for one in (pick, runner))
                if its < mine * (1 - 1e-3):
                    out.append(f"{name} {words}")
        return out


def _computing(plan: Plan, cluster: Cluster, model: ModelShape, constants: Constants) -> float:
    """Seconds that one micro-batch takes at least, both ways, on the fastest device."""
    found = []
    for host in cluster.workers:
        assert host.device is not None
        of = constants.of_host(host.name)
        forward = [of.forward_of(block, plan, host.device) for block in model.blocks]
        again = sum(forward[:-1]) if plan.activation_checkpointing else 0.0
        found.append(sum(forward) * (1 + of.backward) + again)
    return min(found)


def _turns(plan: Plan) -> float:
    """How many micro-batches' passes of the whole model a step of a pipeline takes at least: stage
    s begins when the first has come through all before it, so it is (1 - 1 / num_microbatches) as
    long as the one before, at best.
    """
    if widths := plan.parallelism.widths:
        return max(1.0, plan.num_microbatches / sum(widths))  # of all devices together
    n = plan.num_microbatches * plan.parallelism.virtual_stages
    return 1 / plan.parallelism.virtual_stages / (1 - (1 - 1 / n) ** plan.parallelism.pp)


def _over(need: Need) -> float:
    return need.nbytes / max(need.room, 1.0)


def _differs(one: Plan, other: Plan) -> bool:
    """Whether it is another way, not another batch of the same."""
    return (one.placement, one.parallelism) != (other.placement, other.parallelism)


def _front(found: Sequence[Found]) -> list[Found]:
    def second(one: Found) -> float:
        return (one.result.price or one.result.joules) / one.plan.samples

    out: list[Found] = []
    for one in sorted(found, key=lambda f: (f.result.seconds / f.plan.samples, second(f))):
        if not out or second(one) < second(out[-1]):
            out.append(one)
    return out


def least_change(answer: SearchResult) -> tuple[Need, Plan] | None:
    """Of all plans that fit nowhere, the need nearest to its room."""
    near = [family.nearest for family in answer.families.values() if family.nearest is not None]
    return min(near, key=lambda pair: _over(pair[0]), default=None)


def main_reason(answer: SearchResult) -> tuple[str, str] | None:
    """The reason that keeps most placements from any plan, and what to change; None where the
    only thing that they lack is memory."""
    found = Counter[str]()
    hints: dict[str, str] = {}
    for family in answer.families.values():
        found.update(reason for reason in family.refused if not reason.startswith(NO_MEMORY))
        hints |= family.hints
    if least_change(answer) is not None or not found:
        return None
    reason = found.most_common(1)[0][0]
    return reason, hints.get(reason, "")
