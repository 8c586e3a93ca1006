"""Losses, norms and contents of many placements are, bit for bit, what they were (Rule 1)."""

from __future__ import annotations

from pathlib import Path

import cases
import fixtures
import pytest

AS_TORCH = ("sgd", "lion")  # whose updates have torch's own bits in fp32


# Each combines what two of the others have apart.
MORE = {
    "ram, small chunks",
    "ram, eager",
    "accumulated",
    "bf16, ram",
    "bf16, two servers",
    "late, ram",
    "gradients in fp16",
    "server, late",
    "sgd, ram",
    "lion, bf16",
    "momentum, server",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in MORE else ())
        for name in cases.LOSSES
    ],
)
def test_the_bits_that_were(name: str, tmp_path: Path) -> None:
    case = cases.LOSSES[name]
    found = cases.train(case, tmp_path, 0, cases.STEPS)
    check_by_torch(case, found["losses"])
    fixtures.same_arithmetic(case.variant)
    assert found == fixtures.load("losses.json")[name]


def check_by_torch(case: cases.Case, losses: list[str]) -> None:
    """Against plain torch on this machine, whatever it is; a first loss has no update behind it
    yet."""
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
    """What is kept itself says that exact placements of one training have the same bits."""
    kept, first = fixtures.load("losses.json"), dict[cases.Variant, object]()
    assert kept.keys() == cases.LOSSES.keys()
    for name, case in cases.LOSSES.items():
        if case.exact:
            assert first.setdefault(case.variant, kept[name]) == kept[name], name
