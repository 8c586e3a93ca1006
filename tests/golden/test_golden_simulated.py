"""Simulated seconds, bytes and joules, the planner's picks, and the rows of the papers are
unchanged to the last bit."""

from __future__ import annotations

import cases
import fixtures
import pytest

KEPT = fixtures.load_packed("simulated.json.gz")


@pytest.mark.parametrize("words", cases.simulations(), ids=" ".join)
def test_simulated_results_are_unchanged(words: list[str]) -> None:
    assert cases.simulated(words) == KEPT[" ".join(words)]


@pytest.mark.parametrize("paper", ["byteps", "holmes"])
def test_rows_of_the_papers_are_unchanged(paper: str) -> None:
    assert cases.reproduced(paper) == KEPT[paper]
