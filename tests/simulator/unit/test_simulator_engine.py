"""simulator/engine.py: sharing, lanes and order; a schedule computed by hand; folded workers take
as long as separate ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.errors import LoopError
from roadtrain.simulator.engine import Cost, Engine, Resource, Task, fair_rates


def test_ten_tasks_computed_by_hand() -> None:
    """Two hosts compute 1 s per block and push 2 blocks of 30 B over a link of 10 B/s; a server
    updates each in 2 s.

    0-1 both compute. 1-2 two pushes of 30 B share the link, 5 B/s each, while both compute again.
    From 2 on four share it, 2.5 B/s each: the first two have 25 B left and end at 12; the others
    then have 5 B left, at 5 B/s, and end at 13. The updates of the first two run in sequence:
    12-14, 14-16.
    """
    engine = Engine()
    link, cpu = engine.resource("link", 10), engine.lane("cpu")
    pushes: list[Task] = []
    for host in range(2):
        lane = engine.lane(f"host {host}")
        computed = engine.task("Forward", Cost(1), lane=lane)
        pushes.append(engine.task("Push", Cost(30, [(link, 1)]), after=[computed]))
        again = engine.task("Forward", Cost(1), lane=lane)
        pushes.append(engine.task("Push", Cost(30, [(link, 1)]), after=[again]))
    updates = [
        engine.task("Update", Cost(2), lane=cpu, after=[push]) for push in (pushes[0], pushes[2])
    ]
    engine.run()
    assert [push.end for push in pushes] == pytest.approx([12, 13, 12, 13])
    assert [update.end for update in updates] == pytest.approx([14, 16])
    assert engine.used(link) == pytest.approx(120)
    assert cpu.busy == pytest.approx(4)


def test_weights_and_rates() -> None:
    engine = Engine()
    link, disk = engine.resource("link", 10), engine.resource("disk", 4)
    slow = engine.task("slow", Cost(20, [(link, 1)], max_rate=2))  # limited by its own rate
    both = engine.task("both", Cost(20, [(link, 1), (disk, 1)]))  # the disk's
    rest = engine.task("rest", Cost(20, [(link, 1)]))  # gets the rest of the link
    engine.run()
    assert [task.end for task in (slow, both, rest)] == pytest.approx([10, 5, 5])


def test_latency_comes_before_the_transfer() -> None:
    engine = Engine()
    link = engine.resource("link", 10)
    first = engine.task("a", Cost(10, [(link, 1)]))
    second = engine.task("b", Cost(10, [(link, 1)], latency=1))
    engine.run()
    assert (first.end, second.end) == pytest.approx((1, 2))


def test_a_lane_runs_by_priority_then_arrival() -> None:
    engine = Engine()
    lane = engine.lane("lane")
    order: list[str] = []
    for name, priority in (("first", 5.0), ("third", 1.0), ("second", 0.0), ("fourth", 1.0)):
        engine.task(
            name, Cost(1), lane=lane, priority=priority, then=lambda n=name: order.append(n)
        )  # type: ignore[misc]
    engine.run()
    assert order == ["first", "second", "third", "fourth"] and lane.busy == 4


def test_tasks_that_never_begin_are_an_error() -> None:  # Rule 5
    engine = Engine()
    never = Task("never", 1, [], 99)
    engine.task("Update", Cost(1), after=[never], where="stage 0")
    with pytest.raises(LoopError, match=r"1 tasks wait .*Update of stage 0"):
        engine.run()


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Resource], list[Task]]:
    resources = [Resource(f"r{i}", draw(st.floats(1, 100))) for i in range(draw(st.integers(1, 4)))]
    tasks = []
    for number in range(draw(st.integers(1, 8))):
        own = draw(st.lists(st.sampled_from(resources), min_size=1, unique=True))
        task = Task("t", 1, [(resource, draw(st.floats(0.1, 5))) for resource in own], number)
        task.max_rate = draw(st.sampled_from([float("inf"), 1.0, 7.0]))
        tasks.append(task)
    return resources, tasks


@given(crowds())
def test_rates_are_fair(crowd: tuple[list[Resource], list[Task]]) -> None:
    """No resource exceeds its capacity, and no task could get more except from a task with no
    higher rate."""
    resources, tasks = crowd
    rates = fair_rates(tasks, resources)
    used = {r: sum(rates[t] * w for t in tasks for u, w in t.uses if u is r) for r in resources}
    assert all(used[r] <= r.capacity * (1 + 1e-6) for r in resources)
    for task in tasks:
        if rates[task] >= task.max_rate * (1 - 1e-6):
            continue
        full = [r for r, _ in task.uses if used[r] >= r.capacity * (1 - 1e-6)]
        assert full, "it could run faster"
        assert any(
            all(
                rates[other] <= rates[task] * (1 + 1e-6)
                for other in tasks
                if any(u is r for u, _ in other.uses)
            )
            for r in full
        )


@settings(max_examples=40)
@given(
    st.integers(2, 16),
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(1, 50), st.booleans()), min_size=1, max_size=6),
)
def test_folded_workers_take_as_long_as_separate_ones(
    workers: int, steps: list[tuple[float, float, bool]]
) -> None:
    """n identical workers, each with its own device and card, and a server: equal to a single
    worker whose transfers have weight n at the server."""

    def run(count: int, weight: float) -> float:
        engine = Engine()
        server = engine.resource("server", 20)
        for i in range(count):
            lane, card = engine.lane(f"device {i}"), engine.resource(f"card {i}", 7)
            last: Task | None = None
            for seconds, nbytes, waits in steps:
                after = [last] if last is not None and waits else []
                computed = engine.task("Forward", Cost(seconds), lane=lane, after=after)
                last = engine.task(
                    "Push", Cost(nbytes, [(card, 1), (server, weight)]), after=[computed]
                )
        engine.run()
        return engine.now

    assert run(1, float(workers)) == pytest.approx(run(workers, 1.0), rel=1e-6)


def test_a_pool_keeps_its_peak() -> None:
    engine = Engine()
    engine.hold("device", 10)
    engine.task("Forward", Cost(1), then=lambda: engine.hold("device", 5))
    engine.task("Backward", Cost(2), then=lambda: engine.hold("device", -15))
    engine.run()
    pool = engine.pools["device"]
    assert (pool.peak, pool.held) == (15, 0)
    assert pool.changes == [(0.0, 10), (1.0, 15), (2.0, 0)]
