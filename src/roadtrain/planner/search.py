"""Search for the best plan on a cluster, and explain it. Candidates: placements x parallelisms x
batches x options x stage sizes.

A candidate that does not fit into memory is refused. The others get a lower bound in closed form
(each resource's bytes over its capacity, without waiting), and are simulated in the order of the
bounds until no bound is better than the best simulated score. So the pick is the best of all
candidates by the simulator, although few are simulated. Lossy or delayed options are candidates
only on request (Rule 2). If no batch is given, many micro-batches per step show the best possible
score per sample, and the smallest batch that comes close to it is chosen. Pure.
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

# bound of a sample's score, number, the plan's scene, whether the bound is complete
Queued = tuple[float, int, Scene, bool]
Fitted = Callable[[Plan], Plan | str]
CLOSE = 0.05  # the chosen batch's score per sample is within this fraction of the best
SMALLER, MORE = 0.5, 1.1  # factors on a resource's rate, to see what it would change
NO_MEMORY = "memory of "  # prefix of the reason of a plan that does not fit into memory
LITTLE = 1e-3  # busy fraction of a step below which a resource's rate changes nothing


@dataclass(frozen=True)
class Found:
    """A simulated plan. `score`: seconds, currency or joules per sample."""

    plan: Plan
    result: Result
    score: float


@dataclass
class Family:
    """The candidates of one placement.

    Attributes:
        refused: Reason -> number of candidates that are refused for it.
        hints: Reason -> what to change, if known.
        left_out: Reason -> number of arrangements that were not tried.
        nearest: The smallest shortfall of a plan that does not fit into memory.
        pruned: Number of candidates whose bound was worse than the pick.
    """

    tried: int = 0
    simulated: int = 0
    pruned: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    nearest: tuple[Need, Plan] | None = None
    best: Found | None = None
    least: float = float("inf")  # smallest bound of a candidate's score per sample

    def refuse(self, why: str | ConfigError) -> None:
        reason = str(why).partition("\n")[0]
        self.refused[reason] = self.refused.get(reason, 0) + 1
        if isinstance(why, ConfigError):
            self.hints[reason] = why.hint


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search. `front`: the simulated plans that no other plan beats in both time
    and cost (or energy, without prices)."""

    pick: Found | None
    runner_up: Found | None
    families: dict[str, Family]
    front: list[Found]
    gains: dict[str, float]  # resource -> fraction of the pick's score that MORE of it saves
    flips: list[str]  # changes of rates with which the runner-up would win
    batch: int = 0  # samples per step; 0: nothing fits, and none was given
    chosen: str = ""  # why this batch was chosen, if it was not given


@value
class SearchOptions:
    """The goal of a search, and the plans to try."""

    goal: Literal["time", "cost", "energy"] = "time"
    # samples of a step; None: the smallest batch whose score per sample is within CLOSE of the best
    # with any number of micro-batches
    batch: Count | None = None
    placements: Sequence[str] = ()  # names to try; empty: all
    late: Flag = False  # also try staleness 1
    # fraction of each device's and host's memory that plans leave free
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
    """Search for the best plan.

    `options`: fields of SearchOptions. `fitted`: turns a candidate into the plan to try, or returns
    the reason why it is refused. Raises ConfigError for bad input. If nothing fits, the answer has
    no pick, and its families have the reasons."""
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
        raise ConfigError("goal is cost, but no host has a price", hint="set `price_per_hour`")
    if goal == "energy" and not any(h.device and h.device.peak_watts for h in cluster.workers):
        raise ConfigError(
            "goal is energy, but no device has a power draw", hint="set `peak_watts` of devices"
        )
    searcher = _Search(cluster, model, constants, settings, fitted)
    if batch is not None:
        return replace(searcher.best(batch, explain), batch=batch)
    most = searcher.best(None, explain=False)
    if most.pick is None:
        return most
    batch, score = searcher.least_batch(most.pick)
    why = (
        f"no batch was given; with micro-batches of 1 to {most_samples(model)} samples and up to"
        f" {MOST_MICROBATCHES} of them, this is the smallest within {CLOSE:.0%} of the best"
        f" {goal} per sample"
    )
    samples, less = most.pick.plan.samples, max(0.0, 1 - most.pick.score / score)
    tried = f" ({samples} samples need {less:.1%} less)"
    why += tried if batch < samples else "; it is the largest that was tried"
    return replace(searcher.best(batch, explain), batch=batch, chosen=why)


@dataclass(frozen=True)
class _Search:
    """The arguments of a search, as in `search`, and its steps."""

    cluster: Cluster
    model: ModelShape
    constants: Constants
    options: SearchOptions
    fitted: Fitted | None = None
    # placement and ranks -> why hosts cannot reach each other; None if they can
    networks: dict[Any, ConfigError | None] = field(default_factory=dict)

    def scene(self, plan: Plan) -> Scene:
        """Build a plan's scene. Raises ConfigError if the plan is impossible on this cluster."""
        return Scene(plan, self.cluster, self.model, self.constants)

    def simulated(self, plan: Plan, cluster: Cluster | None = None) -> Found:
        """Simulate a plan. `cluster`: another cluster than that of the search."""
        result = simulate(plan, cluster or self.cluster, self.model, self.constants, checked=False)
        worth = {"time": result.seconds, "cost": result.price, "energy": result.joules}
        return Found(plan, result, worth[self.options.goal] / plan.samples)

    def score(self, seconds: float, scene: Scene) -> float:
        """Return a lower bound of the score per sample for a step of `seconds`."""
        samples = scene.plan.samples
        if self.options.goal == "cost":  # without the cost of energy
            return scene.price_per_s() * seconds / samples
        if self.options.goal == "energy":
            return scene.watts({}) * seconds / samples
        return seconds / samples

    def best(self, batch: int | None, explain: bool) -> SearchResult:
        """Search all candidates with one batch."""
        families, waiting = self._screened(batch)
        found = self._simulated_in_order(waiting, families)
        if not found:
            return SearchResult(None, None, families, [], {}, [])
        pick = found[0]
        runner = next((other for other in found[1:] if _differs(other.plan, pick.plan)), None)
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
        """Find the smallest batch with which the best plan's parallelism has a score within CLOSE
        of its own; returns the samples and the score."""
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
        """Generate all candidates by placement; return those that fit into memory with a first
        bound."""
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
        """Yield the possible candidates without duplicates; `families` get the reasons of
        others."""
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
        """Return the plan's scene, with other pipeline stages if only those fit; None if it does
        not fit, with the reason in `family`."""
        try:
            scene = self.scene(plan)
            self._check_networks(scene)
        except ConfigError as error:
            family.refuse(error)
            return None
        worst = max(scene.needs, key=_over)
        if not worst.fits and (stages := stages_that_fit(scene)) is not None:
            other = plan.changed(parallelism=replace(plan.parallelism, stages=stages))
            if self.fitted is None or self.fitted(other) == other:  # not if the job sets the stages
                plan, scene = other, self.scene(other)
                worst = max(scene.needs, key=_over)
        if worst.fits:
            return scene
        family.refuse(NO_MEMORY + worst.where.replace("stage ", "").lstrip("0123456789 "))
        if family.nearest is None or _over(worst) < _over(family.nearest[0]):
            family.nearest = worst, plan
        return None

    def _check_networks(self, scene: Scene) -> None:
        """Raise ConfigError if hosts of the plan cannot reach each other, or hosts that it uses for
        summing have nothing to sum."""
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
        """Return a lower bound from computing alone. `passes`: cache of seconds per micro-batch."""
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
        """Yield bounds and scenes, smallest first. A scene whose bound is from computing alone is
        built only when it comes first, because building is slow."""
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
        """Simulate plans as long as the next bound is better than the best simulated score; return
        them best first. The others are counted as pruned and stay in `waiting`."""
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

    def _pruned_runner_up(
        self, pick: Found, waiting: list[Queued], families: Mapping[str, Family]
    ) -> Found | None:
        """Simulate the plan with the best bound among those that differ from the pick in placement
        or parallelism; its bound already shows that it is worse."""
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

    def _score_with(self, found: Found, name: str, other: Cluster) -> float:
        """Return the plan's score on the cluster `other`, in which resource `name` has another
        rate; the score is unchanged if the plan hardly uses it."""
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
    """Return the least seconds of one micro-batch, forward and backward, on the fastest device."""
    found = []
    for host in cluster.workers:
        assert host.device is not None
        of = constants.of_host(host.name)
        forward = [of.forward_of(block, plan, host.device) for block in model.blocks]
        again = sum(forward[:-1]) if plan.activation_checkpointing else 0.0
        found.append(sum(forward) * (1 + of.backward) + again)
    return min(found)


def _turns(plan: Plan) -> float:
    """Return how many passes of a micro-batch through the whole model a step of a pipeline takes at
    least. Stage s starts when the first micro-batch has passed all stages before it, so at best its
    part takes (1 - 1 / num_microbatches) times as long as the part of the stage before.
    """
    if widths := plan.parallelism.widths:
        return max(1.0, plan.num_microbatches / sum(widths))  # shared by all devices
    n = plan.num_microbatches * plan.parallelism.virtual_stages
    return 1 / plan.parallelism.virtual_stages / (1 - (1 - 1 / n) ** plan.parallelism.pp)


def _over(need: Need) -> float:
    return need.nbytes / max(need.room, 1.0)


def _differs(a: Plan, b: Plan) -> bool:
    """Whether two plans differ in more than their batch."""
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
    """Return the need that is closest to its room among all plans that do not fit, and the plan."""
    near = [family.nearest for family in answer.families.values() if family.nearest is not None]
    return min(near, key=lambda pair: _over(pair[0]), default=None)


def main_reason(answer: SearchResult) -> tuple[str, str] | None:
    """Return the reason for which most placements have no plan, and what to change; None if only
    memory is missing."""
    found = Counter[str]()
    hints: dict[str, str] = {}
    for family in answer.families.values():
        found.update(reason for reason in family.refused if not reason.startswith(NO_MEMORY))
        hints |= family.hints
    if least_change(answer) is not None or not found:
        return None
    reason = found.most_common(1)[0][0]
    return reason, hints.get(reason, "")
