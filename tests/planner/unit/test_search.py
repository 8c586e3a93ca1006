"""planner/search.py on a small cluster, against a search that simulates every candidate."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.planner.paper_clusters import gpt
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.plan_file import Plan, placement
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.planner.arrangements import arrangements, best_arrangement
from roadtrain.planner.candidates import (
    MOST_MICROBATCHES,
    candidates,
    most_samples,
)
from roadtrain.planner.resources import scaled
from roadtrain.planner.search import (
    CLOSE,
    MORE,
    NO_MEMORY,
    Family,
    SearchResult,
    least_change,
    main_reason,
    search,
)
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.run import simulate
from roadtrain.stages.parallelism import Parallelism

OF = Constants()
MODEL = gpt(3, 256, 4, vocab=512, seq_len=64)
NAMES = ["ddp", "zero1", "server"]
BATCH = 8


def cluster_of(memory: str = "8GB", flops: str = "1TFLOP/s", network: str = "1GB/s") -> Cluster:
    """Two hosts of one device each, and a cheap spare host; all have prices and powers."""
    device = {
        "flops": flops,
        "memory": memory,
        "memory_rate": "200GB/s",
        "copy": "2GB/s",
        "peak_watts": 300,
        "idle_watts": 30,
    }
    both = {
        "memory": "64GB",
        "memory_rate": "20GB/s",
        "updates": "5GB/s",
        "sums": "5GB/s",
        "nics": [{"rate": network, "latency": "20us"}],
        "idle_watts": 100,
    }
    workers = {"name": "gpu", "count": 2, "device": device, "price_per_hour": 2.0, **both}
    spare = {"name": "spare", "count": 1, "price_per_hour": 0.7, **both}
    return make_cluster({"hosts": [workers, spare]})


def score(plan: Plan, cluster: Cluster, goal: str) -> float:
    result = simulate(plan, cluster, MODEL, OF, checked=False)
    worth = {"time": result.seconds, "cost": result.price, "energy": result.joules}
    return worth[goal] / plan.samples


def every_score(cluster: Cluster, goal: str) -> list[tuple[float, Plan]]:
    """Simulate every candidate that is possible and fits. Best first."""
    found = []
    for plan in candidates(cluster, MODEL, batch=BATCH, placements=NAMES):
        try:
            simulate(plan, cluster, MODEL, OF)
        except RoadtrainError:
            continue
        found.append((score(plan, cluster, goal), plan))
    return sorted(found, key=lambda pair: pair[0])


@pytest.fixture(scope="module", params=["time", "cost", "energy"])
def goal(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def answer(goal: str) -> SearchResult:
    return search(cluster_of(), MODEL, OF, goal=goal, batch=BATCH, placements=NAMES)


@pytest.mark.slow
def test_the_pick_and_the_runner_up_are_the_best_of_all_candidates(
    answer: SearchResult, goal: str
) -> None:
    every = every_score(cluster_of(), goal)
    assert answer.pick is not None and answer.runner_up is not None
    assert answer.pick.score == pytest.approx(every[0][0])
    pick, runner = answer.pick.plan, answer.runner_up.plan
    assert (runner.placement, runner.parallelism) != (pick.placement, pick.parallelism)
    others = [
        value
        for value, plan in every
        if (plan.placement, plan.parallelism) != (pick.placement, pick.parallelism)
    ]
    # a runner-up that was pruned is the one with the best bound
    assert answer.runner_up.score >= others[0] * (1 - 1e-9)
    assert answer.runner_up.score in [pytest.approx(value) for value in others]


@pytest.mark.slow
def test_bounds_are_below_scores_where_a_step_takes_seconds(goal: str) -> None:
    slow = cluster_of(flops="1GFLOP/s")
    found = search(slow, MODEL, OF, goal=goal, batch=BATCH, placements=NAMES)
    every = every_score(slow, goal)
    assert found.pick is not None and found.pick.result.seconds > 1
    assert found.pick.score == pytest.approx(every[0][0])
    for name, family in found.families.items():
        worst = max(value for value, plan in every if plan.placement.name == name)
        assert not family.pruned or family.least <= worst
    assert goal == "energy" or any(family.pruned for family in found.families.values())


@pytest.mark.slow
def test_each_candidate_is_simulated_pruned_or_refused(answer: SearchResult, goal: str) -> None:
    every = every_score(cluster_of(), goal)
    for name, family in answer.families.items():
        assert family.tried == family.simulated + family.pruned + sum(family.refused.values())
        assert family.simulated >= 0 and family.pruned >= 0
        if family.pruned:
            assert answer.pick is not None and family.least >= answer.pick.score * (1 - 1e-9)
        if family.best is not None:
            best = min(value for value, plan in every if plan.placement.name == name)
            assert family.best.score >= best * (1 - 1e-9)
    assert sum(family.simulated for family in answer.families.values()) < len(every)


def test_gains_are_those_of_a_simulation_with_faster_resources(
    answer: SearchResult, goal: str
) -> None:
    assert answer.pick is not None
    gains = {}
    for name, other in scaled(cluster_of(), MORE).items():
        gain = 1 - score(answer.pick.plan, other, goal) / answer.pick.score
        if gain > 1e-4:
            gains[name] = pytest.approx(gain, abs=1e-3)
    assert answer.gains == gains
    assert [*answer.gains.values()] == sorted(answer.gains.values(), reverse=True)


def test_resources_that_a_plan_does_not_use_gain_nothing() -> None:
    answer = search(cluster_of(), MODEL, OF, batch=BATCH, placements=["ddp"])
    assert "host updates" not in answer.gains and "computing" in answer.gains


@pytest.mark.parametrize("network", ["100MB/s", "1GB/s", "2GB/s"])
@pytest.mark.slow
def test_flips_are_the_rates_with_which_the_runner_up_wins(network: str) -> None:
    cluster = cluster_of(network=network)
    answer = search(cluster, MODEL, OF, batch=BATCH, placements=["zero1", "server"])
    assert answer.pick is not None and answer.runner_up is not None
    flips = []
    for factor, words in ((0.5, "half as fast"), (2.0, "twice as fast")):
        for name, other in scaled(cluster, factor).items():
            pick = score(answer.pick.plan, other, "time")
            if score(answer.runner_up.plan, other, "time") < pick * (1 - 1e-3):
                flips.append(f"{name} {words}")
    assert answer.flips == flips
    assert flips or network == "100MB/s"


@pytest.mark.parametrize(
    ("network", "names"), [("1GB/s", ["summation", "ddp"]), ("10GB/s", ["ddp"])]
)
def test_the_front_has_the_plans_that_no_other_beats_in_time_and_cost(
    network: str, names: list[str]
) -> None:
    """A spare host sums faster than the workers over a slow network, and it has a price."""
    model = gpt(1, 256, 4, vocab=512, seq_len=64)
    answer = search(
        cluster_of(network=network), model, OF, batch=BATCH, placements=["ddp", "summation"]
    )
    assert [found.plan.placement.name for found in answer.front] == names
    seconds = [found.result.seconds / found.plan.samples for found in answer.front]
    prices = [found.result.price / found.plan.samples for found in answer.front]
    assert seconds == sorted(seconds) and prices == sorted(prices, reverse=True)


@pytest.mark.slow
def test_without_a_batch_the_smallest_that_is_close_to_the_best_is_chosen() -> None:
    cluster = cluster_of(network="100MB/s")
    answer = search(cluster, MODEL, OF, placements=["zero1"], explain=False)
    assert answer.pick is not None and answer.batch == answer.pick.plan.samples
    assert f"within {CLOSE:.0%} of the best time per sample" in answer.chosen
    sizes = [1 << i for i in range(most_samples(MODEL).bit_length())]
    passes = [1 << i for i in range(MOST_MICROBATCHES.bit_length())]
    plans = [
        plan
        for size, count in product(sizes, passes)
        for plan in [
            answer.pick.plan.changed(micro_batch=size, num_microbatches=count),
        ]
    ]
    scores = {plan: score(plan, cluster, "time") for plan in plans}
    best = min(scores.values())
    close = min(plan.samples for plan in plans if scores[plan] <= best * (1 + CLOSE))
    assert answer.batch == close < max(plan.samples for plan in plans)


def test_stages_of_unequal_size_are_tried_where_equal_ones_do_not_fit() -> None:
    """The first stage has the embedding, so the last one has room for more layers."""
    model, most = gpt(4, 256, 4, vocab=8192, seq_len=64), {}
    plan = Plan(placement("zero1"), Parallelism(pp=2), 2, 4)
    for stages in ((2, 2), (1, 3)):
        split = plan.changed(parallelism=replace(plan.parallelism, stages=stages))
        needs = simulate(split, cluster_of(), model, OF).needs
        most[stages] = max(need.nbytes for need in needs if need.where.endswith("device"))
    assert most[1, 3] < most[2, 2]
    small = cluster_of(memory=f"{(most[1, 3] + most[2, 2]) / 2:.0f}B")
    tried: list[Plan] = []

    def fitted(candidate: Plan) -> Plan:
        """A job that sets two stages and micro-batches of two samples, but not the layers."""
        tried.append(candidate)
        return plan if len(candidate.parallelism.stages) != 2 else candidate

    def fixed(candidate: Plan) -> Plan:
        return plan

    answers = {
        name: search(
            small, model, OF, batch=BATCH, placements=["zero1"], fitted=function, explain=False
        )
        for name, function in (("fitted", fitted), ("fixed", fixed))
    }
    assert answers["fixed"].pick is None, "the job sets the stages, and they do not fit"
    pick = answers["fitted"].pick
    assert pick is not None and pick.plan.parallelism.stages == (1, 3)


def test_a_candidate_that_fits_keeps_its_stages() -> None:
    answer = search(cluster_of(), MODEL, OF, batch=BATCH, placements=["ddp"], explain=False)
    assert answer.pick is not None and answer.pick.plan.parallelism.stages == ()


def test_a_model_without_layers_has_one_stage() -> None:
    model = replace(MODEL, blocks=(MODEL.blocks[0], MODEL.blocks[-1]))
    assert model.layers == 0
    found = [*candidates(cluster_of(), model, batch=BATCH, placements=["ddp"])]
    assert found and all(plan.parallelism.pp == 1 for plan in found)


def test_the_main_reason_is_the_most_common_one_that_is_not_memory() -> None:
    families = {
        "a": Family(refused={"rare": 1, "common": 2}, hints={"common": "do this"}),
        "b": Family(refused={"rare": 1, "common": 3, NO_MEMORY + "host": 9}),
    }
    answer = SearchResult(None, None, families, [], {}, [])
    assert main_reason(answer) == ("common", "do this") and least_change(answer) is None


def test_the_number_of_arrangements_that_were_tried_is_told() -> None:
    hosts = cluster_of().hosts
    slow = hosts[0].model_copy(update={"name": "slow", "count": 1, "memory_rate": 1e9})
    cluster = cluster_of().model_copy(update={"hosts": (*hosts, slow)})
    every = [arrangement.cluster for arrangement in arrangements(cluster)]

    def searched(other: Cluster) -> SearchResult:
        if other == every[1]:
            raise ConfigError("not this one")
        return search(other, MODEL, OF, batch=6 * 2, placements=["ddp"], explain=False)

    found = best_arrangement(cluster, searched)
    assert found.tried == len(every) > 2
