"""The emulated device finds races, and there are none."""

import functools

import pytest

from benchmarks.device.races import CASES, CHANGES, LATE_S, found_by, train
from roadtrain.lab.emulated_device import EmulatedDevice

pytestmark = pytest.mark.slow


@functools.cache
def on_cpu(**case):
    return train(None, **case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(k for k, v in case.items() if v))
@pytest.mark.parametrize("late_s", [0.003, 0.03])
def test_the_emulated_device_computes_what_the_cpu_computes(case, late_s):  # Rules 1, 6
    device = EmulatedDevice(seed=1, late_s=late_s)
    assert train(device, **case) == on_cpu(**case)
    assert device.races == [] and device.held == 0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(c, id=c.what, marks=[pytest.mark.exhaustive] if c.late_s > LATE_S else [])
        for c in CHANGES
    ],
)
def test_a_missing_wait_is_found(change):  # Rule 6
    assert found_by(change, on_cpu) != ""
