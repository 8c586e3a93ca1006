"""Search for the best plan on a cluster, and explain it. candidates.py generates the candidates.

A candidate that does not fit into memory is refused. For each other candidate, a formula gives a
lower bound of the score: the time that each resource needs for its work, without waiting. The
candidates are simulated in the order of their bounds, until no bound is better than the best
simulated score. So the search finds the best candidate, although it simulates only a few.

If no batch is given, a search with many micro-batches per step finds the best possible score per
sample. Then the smallest batch whose score is close to the best possible score is chosen.
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

# a waiting candidate: bound of its score per sample, a unique number, its scene, and True if the
# bound considers all resources or False if it considers only computing
Queued = tuple[float, int, Scene, bool]
Fitted = Callable[[Plan], Plan | str]
CLOSE = 0.05  # largest relative difference between the chosen batch's score and the best score
SMALLER, MORE = 0.5, 1.1  # factors on the rate of a kind of resource, for `flips` and `gains`
NO_MEMORY = "memory of "  # prefix of the reason if a plan does not fit into memory
LITTLE = 1e-3  # busy fraction of a step below which the rate of a resource does not matter


@dataclass(frozen=True)
class Found:
    """A simulated plan. `score`: the seconds, cost or joules per sample, as the goal of the search
    requires; smaller is better."""

    plan: Plan
    result: Result
    score: float


@dataclass
class Family:
    """The candidates of one placement.

    Attributes:
        tried: The number of candidates.
        simulated: The number of candidates that were simulated.
        pruned: The number of candidates that were not simulated because of their bound.
        refused: For each reason, the number of candidates that were refused.
        hints: For each reason that has a hint, a text that says what to change.
        left_out: For each reason, the number of combinations that are not tried.
        nearest: The plan that exceeds a memory the least, among the plans that do not fit, with the
            bytes that it needs of the memory that it exceeds the most; None if all plans fit.
        best: The simulated candidate with the best score.
    """

    tried: int = 0
    simulated: int = 0
    pruned: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    nearest: tuple[Need, Plan] | None = None
    best: Found | None = None
    least: float = float("inf")  # smallest bound of the score of a pruned candidate

    def refuse(self, why: str | ConfigError) -> None:
        reason = str(why).partition("\n")[0]
        self.refused[reason] = self.refused.get(reason, 0) + 1
        if isinstance(why, ConfigError):
            self.hints[reason] = why.hint


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    pick: Found | None  # the best plan; None if no plan fits
    runner_up: Found | None  # the best plan with another placement or parallelism than the pick
    families: dict[str, Family]  # by the name of the placement
    # the simulated plans that no other plan beats in both time and cost; energy counts as the cost
    # if there are no prices
    front: list[Found]
    gains: dict[str, float]  # for a kind of resource, the share of the score that MORE of it saves
    flips: list[str]  # changes of rates with which the runner-up would win
    batch: int = 0  # samples per step; 0 if no batch was given and no plan fits
    chosen: str = ""  # why this batch was chosen; "" if it was given


@value
class SearchOptions:
    """The goal of a search, and the plans to try."""

    goal: Literal["time", "cost", "energy"] = "time"
    # samples of a step; if None, the smallest batch whose score per sample is within CLOSE of the
    # best score with any batch
    batch: Count | None = None
    placements: Sequence[str] = ()  # names of the placements to try; if empty, all are tried
    late: Flag = False  # if True, plans with staleness 1 are also tried
    # fraction of the memory of each device and host that a plan leaves free
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
    """Search for the best plan. If no plan fits, `pick` of the result is None, and `families` has
    the reasons.

    Args:
        cluster: The cluster.
        model: The shape of the model.
        constants: The constants of the simulator.
        explain: If True, also fill in `gains` and `flips` of the result, which takes more
            simulations.
        fitted: Function that returns the plan to try for a candidate, or the reason why the
            candidate is refused.
        options: The fields of SearchOptions.

    Raises ConfigError if the input is not valid, or if no parallelism divides the batch.
    """
    settings = SearchOptions(**options)
    goal, batch = settings.goal, settings.batch
    if not cluster.device_count:
        raise ConfigError(
            f"cluster {cluster.name} has no devices",
            hint='set the `device` of a host, such as device = "A100-80GB"; `roadtrain probe` uses'
            ' kind "cpu" for hosts whose CPUs compute',
        )
    if goal == "cost" and not any(
        (*(host.price_per_hour for host in cluster.hosts), cluster.price_per_kwh)
    ):
        raise ConfigError("goal cost: no host has `price_per_hour`", hint="set it for hosts")
    if goal == "energy" and not any(h.device and h.device.peak_watts for h in cluster.workers):
        raise ConfigError("goal energy: no device has `peak_watts`", hint="set it for devices")
    searcher = _Search(cluster, model, constants, settings, fitted)
    if batch is not None:
        return replace(searcher.best(batch, explain), batch=batch)
    most = searcher.best(None, explain=False)
    if most.pick is None:
        return most
    batch, score = searcher.least_batch(most.pick)
    why = (
        f"no batch was given; with micro-batches of 1 to {most_samples(model)} samples and at most"
        f" {MOST_MICROBATCHES} micro-batches, this is the smallest batch within {CLOSE:.0%} of the"
        f" best {goal} per sample"
    )
    samples, less = most.pick.plan.samples, max(0.0, 1 - most.pick.score / score)
    tried = f" (a batch of {samples} samples needs {less:.1%} less per sample)"
    why += tried if batch < samples else "; it is the largest batch that was tried"
    return replace(searcher.best(batch, explain), batch=batch, chosen=why)


@dataclass(frozen=True)
class _Search:
    """The arguments of one search, with methods for its steps."""

    cluster: Cluster
    model: ModelShape
    constants: Constants
    options: SearchOptions
    fitted: Fitted | None = None
    # for a placement and ranks, why hosts cannot reach each other, or None if they can
    networks: dict[Any, ConfigError | None] = field(default_factory=dict)

    def scene(self, plan: Plan) -> Scene:
        """Return a plan's scene. Raises ConfigError if the plan is impossible on this cluster."""
        return Scene(plan, self.cluster, self.model, self.constants)

    def simulated(self, plan: Plan, cluster: Cluster | None = None) -> Found:
        """Simulate a plan on `cluster`, or on the cluster of the search if `cluster` is None."""
        result = simulate(plan, cluster or self.cluster, self.model, self.constants, checked=False)
        worth = {"time": result.seconds, "cost": result.price, "energy": result.joules}
        return Found(plan, result, worth[self.options.goal] / plan.samples)

    def score(self, seconds: float, scene: Scene) -> float:
        """Return a lower bound of the score of a plan whose step takes at least `seconds`."""
        samples = scene.plan.samples
        if self.options.goal == "cost":  # without the cost of energy
            return scene.price_per_s() * seconds / samples
        if self.options.goal == "energy":
            return scene.watts({}) * seconds / samples
        return seconds / samples

    def best(self, batch: int | None, explain: bool) -> SearchResult:
        """Search all candidates with this batch, or with the largest number of micro-batches if the
        batch is None."""
        families, waiting = self._screened(batch)
        found = self._simulated_in_order(waiting, families)
        if not found:
            return SearchResult(None, None, families, [], {}, [])
        pick = found[0]
        runner = next((other for other in found[1:] if _differs(other.plan, pick.plan)), None)
        if runner is None:  # it was pruned
            others = (scene.plan for _, scene in self._in_order(waiting, families))
            plan = next((plan for plan in others if _differs(plan, pick.plan)), None)
            runner = None if plan is None else self.simulated(plan)
        gains, flips = self._gains(pick) if explain else {}, list[str]()
        if runner is not None:
            family = families[runner.plan.placement.name]
            family.best = family.best or runner
            found.append(runner)
            flips = self._flips(pick, runner) if explain else []
        return SearchResult(pick, runner, families, _front(found), gains, flips)

    def least_batch(self, best: Found) -> tuple[int, float]:
        """Return the smallest batch whose score is at most 5% worse than the score of `best`, and
        the score with this batch. The parallelism is that of `best`, which has a very large
        batch."""
        ranks = best.plan.parallelism
        turn = max(ranks.widths, default=ranks.pp if ranks.virtual_stages > 1 else 1)
        passes = [turn << i for i in range(MOST_MICROBATCHES.bit_length())]
        sizes = [1 << i for i in range(most_samples(self.model).bit_length())]
        splits = sorted(product(sizes, passes), key=lambda split: (split[0] * split[1], -split[0]))
        for size, num_microbatches in splits:
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

    def _screened(self, batch: int | None) -> tuple[dict[str, Family], list[Queued]]:
        """Generate all candidates. Return the families by the name of the placement, and the
        candidates that fit into memory. Each candidate has a lower bound of its score that
        considers only computing."""
        families: dict[str, Family] = defaultdict(Family)
        fits: set[Plan] = set()
        waiting: list[Queued] = []
        passes: dict[Any, float] = {}  # cache for _first_bound
        for plan in self._candidates(batch, families):
            again = plan.activation_checkpointing
            if again and plan.changed(activation_checkpointing=False) in fits:
                continue  # checkpointing would only add computing
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
                f"no parallelism of {self.cluster.device_count} devices divides a batch of {batch}"
                " samples",
                hint=f"choose a multiple of the data-parallel ranks: {multiples}",
            )
        return families, waiting

    def _candidates(self, batch: int | None, families: dict[str, Family]) -> Iterator[Plan]:
        """Yield the possible candidates without duplicates. Add the reasons why other candidates
        are not possible to `families`."""
        seen: set[Plan] = set()

        def left_out(name: str, why: str, many: int) -> None:
            families[name].left_out[why] = many

        for plan in candidates(
            self.cluster,
            self.model,
            batch=batch,
            placements=self.options.placements,
            late=self.options.late,
            headroom=self.options.headroom,
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
        """Return the scene of a plan, with other numbers of layers per pipeline stage if only these
        fit into memory. If nothing fits, return None and add the reason to `family`."""
        try:
            scene = self.scene(plan)
            self._check_networks(scene)
        except ConfigError as error:
            family.refuse(error)
            return None
        worst = max(scene.needs, key=_over)
        if not worst.fits and (stages := stages_that_fit(scene)) is not None:
            other = plan.changed(parallelism=replace(plan.parallelism, stages=stages))
            # the job may set the stages, so that they cannot be changed
            if self.fitted is None or self.fitted(other) == other:
                plan, scene = other, self.scene(other)
                worst = max(scene.needs, key=_over)
        if worst.fits:
            return scene
        family.refuse(NO_MEMORY + worst.where.replace("stage ", "").lstrip("0123456789 "))
        if family.nearest is None or _over(worst) < _over(family.nearest[0]):
            family.nearest = worst, plan
        return None

    def _check_networks(self, scene: Scene) -> None:
        """Raise ConfigError if hosts of the plan cannot reach each other, or if the plan sums
        between hosts but uses only one host."""
        ranks = scene.plan.parallelism
        key = scene.plan.placement, ranks.replicas_of, ranks.tp
        if key not in self.networks:
            self.networks[key] = None
            try:
                scene.check_networks()
            except ConfigError as error:
                self.networks[key] = error
        if (why := self.networks[key]) is not None:
            raise why

    def _first_bound(self, scene: Scene, passes: dict[Any, float]) -> float:
        """Return a lower bound of the score that considers only computing. `passes`: a cache of the
        least seconds of a micro-batch."""
        if self.options.goal == "energy":
            return 0.0
        plan, ranks = scene.plan, scene.plan.parallelism
        key = plan.micro_batch, plan.activation_checkpointing, ranks.tp, ranks.cp, ranks.ep
        if key not in passes:
            passes[key] = _computing(plan, self.cluster, self.model, self.constants)
        return self.score(passes[key] * _turns(plan), scene)

    def _in_order(
        self, waiting: list[Queued], families: Mapping[str, Family]
    ) -> Iterator[tuple[float, Scene]]:
        """Yield scenes with their complete bounds, smallest bound first. A complete bound considers
        all resources. It is slow to compute, so it is computed only when a bound that considers
        only computing is the smallest of all."""
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
        self, waiting: list[Queued], families: Mapping[str, Family]
    ) -> list[Found]:
        """Simulate plans in the order of their bounds, until no bound is better than the best
        simulated score. Return the simulated plans, best first. The plans that remain in `waiting`
        count as pruned."""
        found: list[Found] = []
        best = float("inf")
        for least, scene in self._in_order(waiting, families):
            if least >= best:
                waiting.append((least, -1, self.scene(scene.plan), True))
                break
            simulated = self.simulated(scene.plan)
            families[scene.plan.placement.name].simulated += 1
            found.append(simulated)
            best = min(best, simulated.score)
        for least, _, scene, _ in waiting:
            family = families[scene.plan.placement.name]
            family.pruned, family.least = family.pruned + 1, min(family.least, least)
        found.sort(key=lambda simulated: simulated.score)
        for simulated in reversed(found):
            families[simulated.plan.placement.name].best = simulated
        return found

    def _gains(self, pick: Found) -> dict[str, float]:
        gains = {}
        for name, other in scaled(self.cluster, MORE).items():
            gain = 1 - self._score_with(pick, name, other) / pick.score
            if gain > 1e-4:
                gains[name] = gain
        return dict(sorted(gains.items(), key=lambda pair: -pair[1]))

    def _score_with(self, found: Found, name: str, other: Cluster) -> float:
        """Return the plan's score on the cluster `other`, in which all resources of the kind `name`
        have other rates. If the plan hardly uses them, the score is unchanged."""
        if busy_share(found.result, name) < LITTLE:
            return found.score
        return self.simulated(found.plan, other).score

    def _flips(self, pick: Found, runner: Found) -> list[str]:
        out = []
        for factor, words in ((SMALLER, "half as fast"), (1 / SMALLER, "twice as fast")):
            for name, other in scaled(self.cluster, factor).items():
                worse = 1 + busy_share(pick.result, name) if factor < 1 else 1.0
                better = 1.0 if factor < 1 else 1 - busy_share(runner.result, name) / 2
                if runner.score * better >= pick.score * worse:  # impossible even in the best case
                    continue
                mine, its = (self._score_with(f, name, other) for f in (pick, runner))
                if its < mine * (1 - 1e-3):
                    out.append(f"{name} {words}")
        return out


def _computing(plan: Plan, cluster: Cluster, model: ModelShape, constants: Constants) -> float:
    """Return a lower bound of the seconds in which the fastest device computes one micro-batch,
    forward and backward."""
    found = []
    for host in cluster.workers:
        assert host.device is not None
        of = constants.of_host(host.name)
        forward = [of.forward_of(block, plan, host.device) for block in model.blocks]
        again = sum(forward[:-1]) if plan.activation_checkpointing else 0.0
        found.append(sum(forward) * (1 + of.backward) + again)
    return min(found)


def _turns(plan: Plan) -> float:
    """Return a lower bound of the time of a step, as a multiple of the time that one micro-batch
    takes through the whole model.

    A pipeline stage starts when the first micro-batch has passed all earlier stages. Therefore the
    best division of the model gives later stages less work: each stage takes (1 - 1 /
    num_microbatches) times as long as the previous stage.
    """
    if widths := plan.parallelism.widths:
        return max(1.0, plan.num_microbatches / sum(widths))  # shared by all devices
    n = plan.num_microbatches * plan.parallelism.virtual_stages
    return 1 / plan.parallelism.virtual_stages / (1 - (1 - 1 / n) ** plan.parallelism.pp)


def _over(need: Need) -> float:
    """Return the bytes that a plan needs of a memory, divided by the available bytes."""
    return need.nbytes / max(need.room, 1.0)


def _differs(a: Plan, b: Plan) -> bool:
    """Return True if two plans differ in their placement or their parallelism."""
    return (a.placement, a.parallelism) != (b.placement, b.parallelism)


def _front(found: Sequence[Found]) -> list[Found]:
    def second(f: Found) -> float:
        return (f.result.price or f.result.joules) / f.plan.samples

    out: list[Found] = []
    for f in sorted(found, key=lambda f: (f.result.seconds / f.plan.samples, second(f))):
        if not out or second(f) < second(out[-1]):
            out.append(f)
    return out


def least_change(answer: SearchResult) -> tuple[Need, Plan] | None:
    """Return the plan that exceeds a memory the least, among the plans that do not fit, and its
    need of the memory that it exceeds the most. Return None if no plan was refused because of
    memory."""
    near = [family.nearest for family in answer.families.values() if family.nearest is not None]
    return min(near, key=lambda pair: _over(pair[0]), default=None)


def main_reason(answer: SearchResult) -> tuple[str, str] | None:
    """Return the most common reason why candidates were refused, and a hint that says what to
    change. Return None if no candidate was refused, or if memory was a reason."""
    found = Counter[str]()
    hints: dict[str, str] = {}
    for family in answer.families.values():
        found.update({r: n for r, n in family.refused.items() if not r.startswith(NO_MEMORY)})
        hints |= family.hints
    if least_change(answer) is not None or not found:
        return None
    reason = found.most_common(1)[0][0]
    return reason, hints.get(reason, "")
