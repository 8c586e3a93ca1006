"""Simulated seconds, bytes and joules, the planner's picks, and the papers' rows, to the last
bit of their floats."""

from __future__ import annotations

import cases
import fixtures
import pytest

KEPT = fixtures.load_packed("simulated.json.gz")


@pytest.mark.parametrize("words", cases.simulations(), ids=" ".join)
def test_simulated(words: list[str]) -> None:
    assert cases.simulated(words) == KEPT[" ".join(words)]


@pytest.mark.parametrize("paper", ["byteps", "holmes"])
def test_papers(paper: str) -> None:
    assert cases.reproduced(paper) == KEPT[paper]
