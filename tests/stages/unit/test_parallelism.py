"""stages/parallelism.py and stages/protocol/pipeline.py: groups as in Yang et al. (Holmes), balanced
stages, one forward one backward."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.errors import ConfigError
from roadtrain.stages.parallelism import Parallelism, RankPosition, balanced, even
from roadtrain.stages.protocol.pipeline import (
    BACKWARD,
    FORWARD,
    PipelineShape,
    RunBlocks,
    StageStateMachine,
)


def pipeline_groups(parallelism: Parallelism) -> list[list[int]]:
    """The ranks on each path that micro-batches take through the stages: one path for each
    replica, context-parallel and tensor-parallel rank."""
    cp, tp, replicas_of = parallelism.cp, parallelism.tp, parallelism.replicas_of
    paths = itertools.product(
        range(math.lcm(*(n // cp for n in replicas_of))), range(cp), range(tp)
    )
    return [
        [
            parallelism.rank(RankPosition(stage, way * cp % replicas + context, tensor))
            for stage, replicas in enumerate(replicas_of)
        ]
        for way, context, tensor in paths
    ]


def test_the_papers_groups() -> None:
    """N = 16, d = 2, t = 2, p = 4, counted from 1 as printed."""
    parallelism = Parallelism(dp=2, tp=2, pp=4)

    def printed(groups: list[list[int]]) -> list[set[int]]:
        return [{rank + 1 for rank in group} for group in groups]

    assert printed(parallelism.tensor_groups()) == [{i, i + 1} for i in range(1, 16, 2)]
    assert printed(pipeline_groups(parallelism)) == [
        {1, 5, 9, 13},
        {2, 6, 10, 14},
        {3, 7, 11, 15},
        {4, 8, 12, 16},
    ]
    assert printed(parallelism.data_groups()) == [
        {1, 3},
        {2, 4},
        {5, 7},
        {6, 8},
        {9, 11},
        {10, 12},
        {13, 15},
        {14, 16},
    ]


@given(
    st.integers(1, 8), st.integers(1, 4), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4)
)
def test_each_family_has_every_device_once(dp: int, tp: int, pp: int, cp: int, ep: int) -> None:
    parallelism = Parallelism(dp * ep, tp, pp, cp=cp, ep=ep)
    for groups in (
        parallelism.tensor_groups(),
        pipeline_groups(parallelism),
        parallelism.data_groups(),
    ):
        assert sorted(rank for group in groups for rank in group) == list(
            range(parallelism.devices)
        )


def test_context_and_expert_ranks() -> None:
    parallelism = Parallelism(dp=2, tp=2, cp=2, ep=4)
    assert parallelism.devices == 8
    with pytest.raises(ConfigError, match="ep 3 does not divide dp 2 x cp 2"):
        Parallelism(dp=2, cp=2, ep=3)


def test_layers_of_stages() -> None:
    assert even(10, 3) == (4, 3, 3)
    with pytest.raises(
        ConfigError,
        match="stages 4, 5 divide 9 layers among 2 stages, but 10 layers and 2 stages are needed",
    ):
        Parallelism(pp=2, stages=(4, 5)).layers(10)
    with pytest.raises(ConfigError, match="2 layers cannot fill 3 stages"):
        even(2, 3)


def test_one_forward_one_backward() -> None:
    order = PipelineShape(1, 0, (1,) * 4, 1, 4).order()
    assert "".join(run.what[0] + str(run.micro) for run in order) == "F0F1F2B0F3B1B2B3"
    assert [run.last for run in order] == [False] * 7 + [True]


def test_the_interleaved_schedule_equals_the_papers() -> None:
    """Narayanan et al. (2021), Figure 4, bottom: the last of 4 stages with 2 parts and 8
    micro-batches (counted from 1, those of the second part marked)."""
    order = PipelineShape(3, 0, (1,) * 4, 2, 8).order()
    text = " ".join(run.what[0] + str(run.micro + 1) + "'" * run.part for run in order)
    assert text.startswith("F1 F2 F3 F4 F1' B1' F2' B2' F3' B3' F4' B4' F5 B1 F6 B2")
    assert text.endswith("F8' B8' B5 B6 B7 B8")
    with pytest.raises(ConfigError, match="6 micro-batches cannot be divided over 4 stages"):
        PipelineShape(0, 0, (1,) * 4, 2, 6).order()


def run_stages(
    stages: int, num_microbatches: int, parts: int, pick: Callable[[int], int]
) -> list[tuple[int, RunBlocks]]:
    """Run state machines whose messages arrive in any order. Returns all runs of blocks in
    order."""
    shapes = [PipelineShape(s, 0, (1,) * stages, parts, num_microbatches) for s in range(stages)]
    machines = [StageStateMachine(shape) for shape in shapes]
    todo: list[tuple[int, RunBlocks]] = [
        (s, run) for s, machine in enumerate(machines) for run in machine.start()
    ]
    done: list[tuple[int, RunBlocks]] = []
    while todo:
        stage, run = todo.pop(pick(len(todo)))
        done.append((stage, run))
        to = machines[stage].consumer(run)
        todo += [(stage, other) for other in machines[stage].ended(run)]
        if to is not None:
            todo += [
                (to[0], other) for other in machines[to[0]].arrived(run.what, run.micro, to[1])
            ]
        for machine in machines:
            machine.check()
    assert all(machine.finished for machine in machines)
    return done


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_stages_finish_for_any_order_of_messages(
    stages: int, num_microbatches: int, parts: int, random: Random
) -> None:
    """Every part of every stage runs every micro-batch once in each direction, its gradients are
    complete once, and no stage holds more activations than its depth."""
    num_microbatches = num_microbatches * stages if parts > 1 else num_microbatches
    done = run_stages(stages, num_microbatches, parts, random.randrange)
    assert sorted((s, r.what, r.micro, r.part) for s, r in done) == sorted(
        (s, what, m, k)
        for s in range(stages)
        for what in (FORWARD, BACKWARD)
        for m in range(num_microbatches)
        for k in range(parts)
    )
    assert sorted((s, r.part) for s, r in done if r.last) == [
        (s, k) for s in range(stages) for k in range(parts)
    ]


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_the_bubble_equals_the_papers(stages: int, turns: int, parts: int) -> None:
    """With equal stages, a forward of 1 / v, a backward of 2 / v and messages that take no time, a
    step takes 3 m + 3 (p - 1) / v (Narayanan et al., 2021, section 2.2)."""
    num_microbatches, now, ends, numbers = (
        turns * stages,
        Fraction(),
        list[tuple[Fraction, int, int, RunBlocks]](),
        itertools.count(),
    )
    shapes = [PipelineShape(s, 0, (1,) * stages, parts, num_microbatches) for s in range(stages)]
    machines = [StageStateMachine(shape) for shape in shapes]

    def begin(stage: int, runs: list[RunBlocks]) -> None:
        for run in runs:
            took = Fraction(1 if run.what == FORWARD else 2, parts)
            heapq.heappush(ends, (now + took, next(numbers), stage, run))

    for stage, machine in enumerate(machines):
        begin(stage, machine.start())
    while ends:
        now, _, stage, run = heapq.heappop(ends)
        to = machines[stage].consumer(run)
        if to is not None:
            begin(to[0], machines[to[0]].arrived(run.what, run.micro, to[1]))
        begin(stage, machines[stage].ended(run))
    assert now == 3 * num_microbatches + Fraction(3 * (stages - 1), parts)


@pytest.mark.parametrize("seed", range(100))
def test_balanced_stages_are_the_best_of_all(seed: int) -> None:
    """Against brute force, with embeddings and heads, different speeds, layers and memories."""
    rng = Random(seed)
    layers = rng.randint(2, 8)
    n = rng.randint(1, min(4, layers))
    weights = [rng.choice([1.0, 1.0, 2.0, 3.5]) for _ in range(layers)]
    speeds, room = (
        [rng.choice([1.0, 2.0, 3.0]) for _ in range(n)],
        [rng.choice([3.0, 6.0, 20.0]) for _ in range(n)],
    )
    ends = (rng.choice([0.0, 0.5]), rng.choice([0.0, 2.4]))

    def fits(stage: int, begin: int, stop: int) -> bool:
        return sum(weights[begin:stop]) <= room[stage]

    def slowest(stages: tuple[int, ...]) -> float:
        stops = list(itertools.accumulate(stages))
        parts = [(i, stop - stages[i], stop) for i, stop in enumerate(stops)]
        if not all(fits(*part) for part in parts):
            return float("inf")
        return max(
            (sum(weights[a:b]) + ends[0] * (i == 0) + ends[1] * (i == n - 1)) / speeds[i]
            for i, a, b in parts
        )

    best = min(
        slowest(s) for s in itertools.product(range(1, layers + 1), repeat=n) if sum(s) == layers
    )
    found = balanced(weights, speeds, ends=ends, fits=fits)
    assert (best == float("inf")) if found is None else slowest(found) == pytest.approx(best)


SOLVED = """
import itertools, json, sys
from ortools.sat.python import cp_model
weights, speeds, end = json.load(sys.stdin)
n, layers, before = len(speeds), len(weights), [0, *itertools.accumulate(weights)]
model = cp_model.CpModel()
cuts = [model.new_int_var(i, layers - n + i, "") for i in range(n + 1)]
model.add(cuts[0] == 0)
model.add(cuts[n] == layers)
most, ahead = model.new_int_var(0, 2 * before[-1] + 2 * end, ""), [model.new_int_var(0, before[-1], "") for _ in cuts]
for cut, work in zip(cuts, ahead):
    model.add_element(cut, before, work)
for i in range(n):
    model.add(cuts[i + 1] >= cuts[i] + 1)
    model.add(most >= (2 // speeds[i]) * (ahead[i + 1] - ahead[i] + end * (i == n - 1)))
model.minimize(most)
solver = cp_model.CpSolver()
solver.parameters.max_time_in_seconds, solver.parameters.num_workers = 60, 2
assert solver.solve(model) == cp_model.OPTIMAL
print(solver.objective_value / 2)
"""


@pytest.mark.parametrize(("layers", "n"), [pytest.param(48, 8, marks=pytest.mark.slow), (31, 7)])
@pytest.mark.slow
def test_balanced_stages_equal_those_of_a_solver(layers: int, n: int) -> None:
    """OR-Tools' CP-SAT on sizes too large for brute force. It runs in a separate process, since a
    process with both CP-SAT and NIXL (plugins/rdma) crashes."""
    rng = Random(layers)
    weights = [rng.choice([3, 4, 5]) for _ in range(layers)]
    speeds, end = [rng.choice([1, 2]) for _ in range(n)], rng.randint(0, 20)
    best = subprocess.run(
        [sys.executable, "-c", SOLVED],
        input=json.dumps([weights, speeds, end]),
        text=True,
        capture_output=True,
        check=True,
        timeout=100,
    ).stdout
    stages = balanced(weights, speeds, ends=(0, end))
    assert stages is not None
    before, stops = [0, *itertools.accumulate(weights)], [0, *itertools.accumulate(stages)]
    took = max(
        (before[b] - before[a] + end * (i == n - 1)) / speeds[i]
        for i, (a, b) in enumerate(itertools.pairwise(stops))
    )
    assert took == pytest.approx(float(best))


def test_balanced_stages_are_no_slower_than_the_papers() -> None:
    """Yang et al. (Holmes), equation 4 with alpha = 1.05 and the speeds of Table 3, gives 17,
    13 and 19, 17."""
    for layers, speeds, printed in ((30, (197.0, 160.0), (17, 13)), (36, (189.0, 185.0), (19, 17))):
        found = balanced([1.0] * layers, speeds)
        assert found is not None
        assert max(n / s for n, s in zip(found, speeds)) <= max(
            n / s for n, s in zip(printed, speeds)
        )


def test_even_stages_are_chosen_if_they_are_as_fast() -> None:
    assert balanced([1.0] * 10, [1.0] * 4) == (3, 3, 2, 2)
    assert balanced([1.0] * 32, [1.0] * 4, ends=(0, 2.4)) == (8, 9, 9, 6)
    assert balanced([1.0] * 3, [1.0] * 4) is None
