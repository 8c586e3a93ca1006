"""Exhaustive exploration of the fan-in's state machines: small scenes of benchmarks/fanin/model.py,
and that it detects broken variants."""

from __future__ import annotations

import pytest

from benchmarks.fanin.explore import Result
from benchmarks.fanin.model import REFUTED, check, check_down, literal_trace
from benchmarks.fanin.upwards import Tree, Variant


def assert_right(result: Result, states: int, exhaustive: bool = True) -> None:
    """Assert that a result is right. states: Least number of states that the exploration must
    reach."""
    assert result.right, f"{result.wrong}: {result.trace}"
    assert result.exhaustive == exhaustive and result.states >= states


@pytest.mark.parametrize(
    "window, numbers, timeouts, states", [(2, 3, False, 10_000), (2, 2, True, 5_000)]
)
@pytest.mark.slow
def test_every_sum_is_right_and_arrives(
    window: int, numbers: int, timeouts: bool, states: int
) -> None:  # Rules 1, 5
    assert_right(check(window=window, numbers=numbers, timeouts=timeouts), states)


@pytest.mark.slow
def test_a_window_of_three() -> None:
    assert_right(check(window=3, numbers=4, eager=True, most_states=10_000), 10_000, False)


@pytest.mark.parametrize("tree, exhaustive", [(((0, 1),), True), (((0, 1), 2), False)], ids=str)
@pytest.mark.slow
def test_switches_below_a_switch(tree: Tree, exhaustive: bool) -> None:
    numbers = 2 if exhaustive else 3
    result = check(tree=tree, numbers=numbers, eager=True, most_states=20_000)
    assert_right(result, 10_000, exhaustive)


@pytest.mark.parametrize("window, numbers", [(2, 3), (3, 4)])
@pytest.mark.slow
def test_broadcasts_reach_all_workers(window: int, numbers: int) -> None:  # Rule 5
    assert_right(check_down(window=window, numbers=numbers, most_states=10_000), 5_000, window == 2)


@pytest.mark.parametrize("variant", REFUTED, ids=lambda variant: variant.name)
def test_broken_variants_are_detected(variant: Variant) -> None:
    result = REFUTED[variant].result()
    assert not result.right and result.wrong and result.trace


def test_the_literal_switch_poisons_a_number() -> None:
    """L10: a packet that arrives twice is added to the sum of another number."""
    *steps, wrong = literal_trace()
    assert wrong == "the sum of 2 is wrong"
    assert steps[-1] == "the end accepts 2: 2 of worker 0 + 0 of worker 1"
    arrivals = [step for step in steps if step.startswith("the switch receives 0 of worker 1")]
    assert len(arrivals) == 2 and len(steps) == 11
