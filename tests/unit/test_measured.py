"""bench/measured.py: rows become plans; the constants in the package keep their accuracy on public runs."""

from __future__ import annotations

import pytest

from roadtrain.bench.measured import FAMILIES, closed_form, constant_efficiency, errors, predicted, runs
from roadtrain.sim.compute import constants


def test_every_run_has_its_plan() -> None:
    found = {family: [one for one in runs() if one.family == family] for family in FAMILIES}
    assert {family: len(own) for family, own in found.items()} == {
        "vtrain-multi": 23, "vtrain-single": 14, "foundry-a100": 29, "foundry-h100": 12}
    one = next(one for one in runs() if one.id == "vtrain-multi-0049")
    assert (one.plan.layout.dp, one.plan.layout.tp, one.plan.layout.pp, one.plan.micros) == (8, 4, 16, 96)
    assert one.model.tokens == 2048 and one.model.params / 1e9 == pytest.approx(39.1, rel=0.01)
    assert one.plan.layout.devices == one.cluster.device_count == 512


@pytest.mark.parametrize(("family", "most"), [("foundry-h100", 0.045), ("vtrain-single", 0.09)])
def test_public_runs(family: str, most: float) -> None:
    """What README states, with half a per cent to spare; and never worse than the baselines."""
    own = [one for one in runs() if one.family == family]
    of = constants(FAMILIES[family])
    ours = errors([(predicted(one, of), one.seconds) for one in own])
    for make in (closed_form, constant_efficiency):
        form = make(own)
        assert ours["MAPE"] < errors([(form(one), one.seconds) for one in own])["MAPE"]
    assert ours["MAPE"] <= most


def test_errors() -> None:
    found = errors([(1.1, 1.0), (0.9, 1.0), (1.0, 1.0), (1.2, 1.0)])
    assert found == pytest.approx({"MAPE": 0.1, "median": 0.1, "P90": 0.2, "bias": 0.05})
