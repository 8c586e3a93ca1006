"""Losses, norms and contents of many placements equal the kept ones bit for bit (Rule 1)."""

from __future__ import annotations

from pathlib import Path

import cases
import fixtures
import pytest

AS_TORCH = ("sgd", "lion")  # their fp32 updates equal torch's bit for bit


@pytest.mark.parametrize("name", cases.LOSSES)
def test_losses_norms_and_contents_are_unchanged(name: str, tmp_path: Path) -> None:
    case = cases.LOSSES[name]
    found = cases.train(case, tmp_path, 0, cases.STEPS)
    check_by_torch(case, found["losses"])
    fixtures.same_arithmetic(case.variant)
    assert found == fixtures.load("losses.json")[name]


def check_by_torch(case: cases.Case, losses: list[str]) -> None:
    """Compare with plain torch on this machine, whatever its arithmetic. The first loss precedes
    any update."""
    plain = cases.plain_losses(case.variant)[: cases.STEPS]
    assert losses[0] == plain[0]
    if not case.exact or case.variant.dtype != "fp32":
        return
    if case.variant.optimizer in AS_TORCH:
        assert losses == list(plain)
    assert [float.fromhex(x) for x in losses] == pytest.approx(
        [float.fromhex(x) for x in plain], rel=1e-5
    )


def test_kept_placements_agree() -> None:
    """In the kept values exact placements of the same training have equal bits."""
    kept, first = fixtures.load("losses.json"), dict[cases.Variant, object]()
    assert kept.keys() == cases.LOSSES.keys()
    for name, case in cases.LOSSES.items():
        if case.exact:
            assert first.setdefault(case.variant, kept[name]) == kept[name], name
