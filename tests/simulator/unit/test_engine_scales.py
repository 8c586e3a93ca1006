"""simulator/engine.py at any scale of bytes and seconds: sharing is exact max-min, scaled rates
give scaled times, and hosts with eight fast SSDs finish a step (their weights are about 1e-12
seconds per byte)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import BlockShape, ModelShape
from roadtrain.config.plan_file import PLACEMENTS, Plan, PlanMemory, placement
from roadtrain.simulator import compute, site
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Cost, Engine, Resource, Task, fair_rates
from roadtrain.simulator.run import simulate
from roadtrain.stages.parallelism import Parallelism

WIDE = st.builds(lambda a, e: a * 10.0**e, st.floats(1, 9.99), st.integers(-15, 15))


@st.composite
def sharing(draw: st.DrawFn) -> tuple[list[Resource], list[Task]]:
    """Draw tasks that share resources, with capacities, weights and rates between 1e-15 and
    1e16."""
    resources = [Resource(f"r{i}", draw(WIDE)) for i in range(draw(st.integers(1, 4)))]
    tasks = []
    for number in range(draw(st.integers(1, 6))):
        # a resource may occur twice
        chosen = draw(st.lists(st.sampled_from(resources), min_size=1, max_size=4))
        task = Task("Push", 1.0, [(resource, draw(WIDE)) for resource in chosen], number)
        task.max_rate = draw(st.one_of(st.just(float("inf")), WIDE))
        tasks.append(task)
    return resources, tasks


def exact_rates(tasks: list[Task], resources: list[Resource]) -> dict[Task, Fraction]:
    """Reference: progressive filling in exact fractions."""
    rates: dict[Task, Fraction] = {}
    left = {resource: Fraction(resource.capacity) for resource in resources}
    growing = [*tasks]
    while growing:
        used = {
            r: sum((Fraction(w) for t in growing for own, w in t.uses if own is r), Fraction())
            for r in resources
        }
        levels = [left[r] / used[r] for r in resources if used[r]]
        levels += [Fraction(task.max_rate) for task in growing if task.max_rate < float("inf")]
        level = min(levels)
        full = {r for r in resources if used[r] and left[r] / used[r] == level}
        stay = [t for t in growing if t.max_rate == level or any(r in full for r, _ in t.uses)]
        for task in stay:
            rates[task] = level
            growing.remove(task)
            for resource, weight in task.uses:
                left[resource] -= level * Fraction(weight)
    return rates


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(sharing())
def test_sharing_is_max_min_at_any_scale(case: tuple[list[Resource], list[Task]]) -> None:
    """No resource exceeds its capacity, and each task has its max-min rate up to rounding (1e-11 of
    the capacity)."""
    resources, tasks = case
    found, expected = fair_rates(tasks, resources), exact_rates(tasks, resources)
    assert set(found) == set(tasks)
    for resource in resources:
        used = sum(
            found[task] * weight for task in tasks for own, weight in task.uses if own is resource
        )
        assert used <= resource.capacity * (1 + 1e-9)
    for task in tasks:
        slack = max(1e-11 * resource.capacity / weight for resource, weight in task.uses)
        assert found[task] == pytest.approx(float(expected[task]), rel=1e-9, abs=slack)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(WIDE, WIDE), min_size=1, max_size=8), WIDE)
@pytest.mark.slow
def test_every_task_ends_at_any_scale(tasks: list[tuple[float, float]], capacity: float) -> None:
    """A resource is busy until all tasks are done: the end is the total work over its capacity."""
    engine = Engine()
    link = engine.resource("link", capacity)
    for work, weight in tasks:
        engine.task("Push", Cost(work, [(link, weight)]))
    engine.run()
    total = sum(work * weight for work, weight in tasks)
    assert engine.now == pytest.approx(total / capacity, rel=1e-9)
    assert engine.used(link) == pytest.approx(total)
    engine.check()


def test_a_resource_without_a_limit_limits_nothing() -> None:
    engine = Engine()
    wide, link = (
        engine.resource("a way without a limit", float("inf")),
        engine.resource("link", 2.0),
    )
    free = engine.task("Push", Cost(1e9, [(wide, 1.0)]))
    held = engine.task("Push", Cost(10.0, [(wide, 1.0), (link, 1.0)]))
    engine.run()
    assert free.end == 0.0 and held.end == 5.0


def cluster(scale: float, hosts: int = 2) -> Cluster:
    """Two hosts and a spare host, with all rates multiplied and all latencies divided by
    `scale`."""

    def rate(gigabytes: float) -> str:
        return f"{gigabytes * 1e9 * scale:.12f}B/s"

    def latency(seconds: float) -> str:
        return f"{seconds / scale:.15f}s"

    ssd = {
        "count": 8,
        "read": rate(7),
        "write": rate(5),
        "capacity": "8TB",
        "updates": rate(7),
        "internal": rate(7),
    }
    base: dict[str, Any] = {
        "memory": "2TB",
        "memory_rate": rate(200),
        "updates": rate(120),
        "sums": rate(120),
        "uplink": rate(50),
        "ssds": [ssd],
        "nics": [{"rate": rate(12.5), "latency": latency(2e-5), "relay": True}],
    }
    device = {
        "flops": f"{100 * scale:.18f}TFLOP/s",
        "memory": "80GB",
        "memory_rate": rate(2000),
        "copy": rate(25),
    }
    kinds = [{**base, "name": "gpu", "count": hosts, "device": device}, {**base, "name": "spare"}]
    return make_cluster({"hosts": kinds, "switches": [{"name": "ethernet", "sums": True}]})


def lump(params: float) -> ModelShape:
    own = BlockShape("layer", int(params / 8), params / 8 * 2e3, 0.0, 0.0)
    return ModelShape("lump", own.times(8), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("power", "name"),  # powers of two: from 1 B/s to beyond 100 TB/s
    [
        pytest.param(
            power,
            name,
            id=f"{power}-{name}",
            marks=pytest.mark.exhaustive if (power < 0) == number % 2 else (),
        )
        for power in (-30, 14)
        for number, name in enumerate(PLACEMENTS)
    ],
)
def test_rates_times_k_give_seconds_over_k(
    name: str, power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats of the fan-in and launches of blocks depend on the clock, so it is scaled too."""
    plan = Plan(placement(name), Parallelism(dp=2), 1, 2, memory=PlanMemory(buffers=8))
    of = Constants(efficiency=0.5, network=1.0)
    seconds, beat_s, launch_s = [], site.BEAT_S, compute.LAUNCH_S
    for scale in (1.0, 2.0**power):
        monkeypatch.setattr(site, "BEAT_S", beat_s / scale)
        monkeypatch.setattr(compute, "LAUNCH_S", launch_s / scale)
        result = simulate(plan, cluster(scale), lump(1e9), of, checked=False)
        seconds.append(result.seconds)
    assert seconds[1] * 2.0**power == pytest.approx(seconds[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [8, 1e5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1e9, 1e12)), 1e15]
)
def test_models_of_any_size_come_to_a_step(params: float) -> None:
    for name in PLACEMENTS:
        plan = Plan(
            placement(name), Parallelism(dp=2), update_at="gradient", memory=PlanMemory(buffers=8)
        )
        result = simulate(plan, cluster(1.0), lump(params), Constants(), checked=False)
        assert 0 < result.seconds < float("inf"), name
