"""stages/protocol/step_model.py and stage_sizes.py: step times against the state machines, the
exact search against brute force, the paper's formula."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.stages.parallelism import balanced, even
from roadtrain.stages.protocol import step_model
from roadtrain.stages.protocol.pipeline import (
    FORWARD,
    Peer,
    PipelineShape,
    RunBlocks,
    StageStateMachine,
)
from roadtrain.stages.protocol.stage_sizes import (
    all_fit,
    best_sizes,
    blocks_of,
    compare_sizes,
    paper_sizes,
)
from roadtrain.stages.protocol.step_model import BoundarySpeed, StageSpeed, StepModel, StepWork
from tests.support.step_works import still_work


def simulated_seconds(work: StepWork, sizes: tuple[int, ...]) -> float:
    """Run the state machines on a virtual clock: one run at a time per replica, and one message at
    a time per replica, boundary and direction. Returns the step time."""
    p, parts, widths = len(work.stages), work.virtual_stages, work.widths
    machines = {
        (s, r): StageStateMachine(PipelineShape(s, r, widths, parts, work.num_microbatches))
        for s in range(p)
        for r in range(widths[s])
    }
    stops = [*itertools.accumulate(sizes, initial=0)]
    events: list[tuple[float, int, str, tuple[int, int], RunBlocks, Peer | None]] = []
    numbers, free, ended = itertools.count(), dict[tuple, float](), dict[int, float]()

    def begin(now: float, key: tuple[int, int], runs: list[RunBlocks]) -> None:
        for run in runs:
            part = run.part * p + key[0]
            speed = work.stages[key[0]]
            rate = speed.forward_s if run.what == FORWARD else speed.backward_s
            took = work.weight(part, stops[part], stops[part + 1]) * rate
            heapq.heappush(events, (now + took, next(numbers), "ran", key, run, None))

    for key, machine in machines.items():
        begin(0.0, key, machine.start())
    while events:
        now, _, what, key, run, to = heapq.heappop(events)
        if what == "came":
            assert to is not None
            begin(now, key, machines[key].arrived(run.what, run.micro, to.part))
            continue
        ended[key[0]] = now
        to = machines[key].consumer(run)
        begin(now, key, machines[key].ended(run))
        if to is None:
            continue
        there = to.stage, to.replica
        took = 0.0
        if there != key:
            speed = work.boundaries[key[0] if run.what == FORWARD else to.stage]
            took = speed.activations_s if run.what == FORWARD else speed.gradients_s
            channel = key, run.what, to.stage
            free[channel] = now = max(now, free.get(channel, 0.0)) + took
        heapq.heappush(events, (now, next(numbers), "came", there, run, to))
    assert all(machine.finished for machine in machines.values())
    return max(ended.values())


@st.composite
def works(draw: st.DrawFn, most_blocks: int = 8) -> StepWork:
    rng = Random(draw(st.integers(0, 1 << 30)))
    p = draw(st.integers(1, 4))
    v = draw(st.sampled_from([1, 1, 1, 2]))
    blocks = draw(st.integers(p * v, max(p * v, most_blocks)))
    widths = tuple(rng.randint(1, 3) for _ in range(p)) if v == 1 else (1,) * p
    micros = p * rng.randint(1, 3) if v > 1 else rng.randint(max(widths), 9)
    link = rng.choice([0.0, 0.0, 0.5, 4.0])
    return StepWork(
        tuple(StageSpeed(rng.choice([0.6, 1.0, 1.7]), rng.choice([2.0, 2.5])) for _ in range(p)),
        tuple(rng.choice([1.0, 1.0, 1.0, 0.5, 2.0]) for _ in range(blocks)),
        micros,
        widths,
        tuple(
            BoundarySpeed(link * rng.random(), link * rng.random())
            for _ in range(p if v > 1 and p > 1 else p - 1)
        ),
        (rng.choice([0.0, 0.3]), rng.choice([0.0, 1.4])),
        v,
    )


def all_sizes(work: StepWork) -> list[tuple[int, ...]]:
    blocks = len(work.weights)
    return [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, blocks)))
        for cuts in itertools.combinations(range(1, blocks), work.parts - 1)
    ]


@settings(deadline=None)
@given(works())
def test_the_modeled_step_time_equals_that_of_the_machines(work: StepWork) -> None:
    """Rule 7, with unequal widths, interleaved parts, messages and updates."""
    many = all_sizes(work)
    found = StepModel(work).seconds_of_all(many)
    for sizes, step_s in list(zip(many, found.tolist()))[:5]:
        assert step_s == pytest.approx(simulated_seconds(work, sizes))


def test_many_sizes_are_modeled_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    work = still_work((StageSpeed(1.0, 2.0), StageSpeed(2.0, 4.0)), 7, 4)
    many = all_sizes(work)
    at_once = StepModel(work).seconds_of_all(many)
    monkeypatch.setattr(step_model, "MOST_TIMES", 0)
    assert StepModel(work).seconds_of_all(many).tolist() == at_once.tolist()


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 1), (4, 8, 1), (4, 8, 2), (3, 9, 3)])
def test_equal_stages_take_the_papers_time(p: int, m: int, v: int) -> None:
    """3 m + 3 (p - 1) / v (Narayanan et al., 2021, section 2.2)."""
    work = still_work((StageSpeed(1 / v, 2 / v),) * p, p * v, m, virtual_stages=v)
    expected = float(3 * m + Fraction(3 * (p - 1), v))
    assert StepModel(work).seconds((1,) * p * v) == pytest.approx(expected)


@settings(deadline=None, max_examples=200)
@given(works(), st.sampled_from([99.0, 4.0, 3.0, 2.0]), st.integers(0, 3))
@pytest.mark.slow
def test_the_exact_search_finds_the_best_of_all(work: StepWork, room: float, less: int) -> None:
    """Against brute force, with different memory limits."""

    def fits(stage: int, blocks: tuple[range, ...]) -> bool:
        return sum(map(len, blocks)) <= room * work.virtual_stages - (stage == less)

    many = [sizes for sizes in all_sizes(work) if all_fit(sizes, len(work.stages), fits)]
    found = best_sizes(work, fits=fits)
    if not many:
        assert found is None
        return
    best = min(StepModel(work).seconds_of_all(many))
    assert found is not None and found.proven
    assert (
        found.step_s == pytest.approx(best) == pytest.approx(simulated_seconds(work, found.sizes))
    )
    assert all_fit(found.sizes, len(work.stages), fits)


@settings(deadline=None)
@given(works(), st.sampled_from([99.0, 3.0]), st.integers(0, 200))
def test_the_exact_search_is_never_worse_than_the_formula(
    work: StepWork, room: float, most: int
) -> None:
    """Nor worse than even stages, even if the search is stopped early."""

    def fits(stage: int, blocks: tuple[range, ...]) -> bool:
        return sum(map(len, blocks)) <= room * work.virtual_stages

    clusters = ["a" if stage < 2 else "b" for stage in range(len(work.stages))]
    table = compare_sizes(work, clusters, fits=fits, most_looked_at=most)
    if table is None:
        return
    for row in (*table.others.values(), (table.best.sizes, table.best.step_s)):
        if row is not None:
            assert all_fit(row[0], len(work.stages), fits)
            assert row[1] == pytest.approx(simulated_seconds(work, row[0]))
            assert table.best.step_s <= row[1] * (1 + 1e-9)
    assert table.best.at_least_s <= table.best.step_s


def test_the_search_minimizes_the_step_not_the_slowest_stage() -> None:
    """With two micro-batches the path through the other stages counts: 4 + 1 + 4 has the fastest
    slowest stage but takes 3 x (2 x 4 + 2 + 4) = 42 s."""
    work = still_work((StageSpeed(1, 2), StageSpeed(2, 4), StageSpeed(1, 2)), 9, 2)
    assert balanced([1.0] * 9, [1.0, 0.5, 1.0]) == (4, 1, 4)
    assert StepModel(work).seconds((4, 1, 4)) == 42
    best = best_sizes(work)
    assert best is not None and best.sizes == (5, 1, 3) and best.step_s == 40


@pytest.mark.slow
def test_a_deep_pipeline_is_found_exactly() -> None:
    """There are too many sizes for brute force (C(47, 7) = 63 million)."""
    rng = Random(3)
    work = StepWork(
        tuple(StageSpeed(s, 2 * s) for s in (rng.choice([0.8, 1.0, 1.3]) for _ in range(8))),
        (1.0,) * 48,
        32,
        (1,) * 8,
        (BoundarySpeed(0.2, 0.2),) * 7,
        ends=(0.2, 1.5),
    )
    best = best_sizes(work)
    assert best is not None and best.proven
    others = balanced([1.0] * 48, [1 / s.forward_s for s in work.stages], ends=work.ends)
    assert others is not None and best.step_s <= StepModel(work).seconds(others)


def test_even_stages_are_chosen_if_they_are_as_good() -> None:
    work = still_work((StageSpeed(1, 2),) * 4, 12, 16)
    found = best_sizes(work)
    assert found is not None and found.sizes == even(12, 4)


def paper_work(layers: int, *speeds: float) -> StepWork:
    return still_work(tuple(StageSpeed(1 / s, 2 / s) for s in speeds), layers, 8)


def test_the_papers_formula() -> None:
    """Yang et al. (Holmes), section 3.3 with alpha = 1.05 and 1, the speeds of its Table 3."""
    clusters = ["ib", "roce"]
    assert paper_sizes(paper_work(30, 197, 160), clusters) == (17, 13)
    assert paper_sizes(paper_work(30, 197, 160), clusters, alpha=1) == (16, 14)
    assert paper_sizes(paper_work(36, 189, 185), clusters) == (19, 17)
    assert paper_sizes(paper_work(36, 189, 185), clusters, alpha=1) == (18, 18)
    four = paper_work(30, 197, 197, 160, 160)
    assert paper_sizes(four, ["ib", "ib", "roce", "roce"]) == (9, 8, 7, 6)


def test_the_papers_formula_under_memory() -> None:
    """Layers without room in the first cluster go to the last; those of the last go to the first
    with room."""
    work, clusters = paper_work(30, 197, 160), ["ib", "roce"]

    def at_most(*most: int):
        return lambda stage, blocks: sum(map(len, blocks)) <= most[stage]

    assert paper_sizes(work, clusters, fits=at_most(15, 20)) == (15, 15)
    assert paper_sizes(work, clusters, fits=at_most(20, 11)) == (19, 11)
    assert paper_sizes(work, clusters, fits=at_most(15, 14)) is None
    assert best_sizes(work, fits=at_most(15, 14)) is None
    assert compare_sizes(work, clusters, fits=at_most(15, 14)) is None


def test_the_table() -> None:
    work = replace(paper_work(30, 197, 150), ends=(0.0, 2.4))
    table = compare_sizes(work, ["ib", "roce"])
    assert table is not None and str(table).splitlines() == [
        "even     15 + 15  3.01 s a step, 17.6% more",
        "paper    17 + 13  2.72 s a step, 6.3% more",
        "exact    19 + 11  2.56 s a step",
    ]


def test_blocks_of_stages() -> None:
    assert blocks_of((2, 1, 1, 2), 2) == [(range(2), range(3, 4)), (range(2, 3), range(4, 6))]
