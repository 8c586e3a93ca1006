"""The device `toy` (tests/support/toy_device.py): what it lacks, and the rooms that look for
devices. test_on_devices.py trains on it. Run by `make test-device`."""

import pytest
import torch

import roadtrain
from roadtrain.device.accelerator import random_state
from roadtrain.errors import ConfigError
from roadtrain.placement.tracked import generators, set_generators
from roadtrain.planner import probe
from tests.support import toy_device
from tests.support.devices import TOYS, active
from tests.support.models import Case, build

pytestmark = pytest.mark.skipif(bool(toy_device.absent()), reason=toy_device.absent())
TOY = torch.device("privateuseone", 0)  # torch's name of such a device until it has its own
LINES = {
    "toy": [],
    "toy, one stream": ["toy:0 has one stream, so copies and computing take turns"],
    "toy, no events": ["toy:0 has no events, so the host waits for every copy"],
}


@pytest.mark.parametrize("states", [0, 1, 3], ids="{} saved states".format)
def test_saved_random_states_of_any_device_are_accepted(states):
    """The first version of the format stored the generators of all CUDA devices."""
    torch.manual_seed(5)
    saved = generators(TOY) | {"cuda": [random_state(TOY)] * states}
    torch.manual_seed(6)
    before = random_state(TOY)
    set_generators(saved, TOY)
    assert torch.equal(random_state(TOY), saved["cuda"][0] if states else before)
    set_generators(saved | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}, TOY)  # of a CUDA device


@pytest.mark.parametrize("device", TOYS)
def test_what_the_device_lacks_is_reported(device, tmp_path):  # Rule 6
    model, optimizer = build(Case())
    with active(device):
        with pytest.raises(ConfigError, match="does not know how much memory toy:0 has") as raised:
            roadtrain.place(model, optimizer, store=tmp_path / "s", device="toy", report=print)
        assert raised.value.hint == "set device_budget" and not any(tmp_path.iterdir())
        lines = []
        options = {"device": "toy", "device_budget": "1GiB", "report": lines.append}
        roadtrain.place(model, optimizer, **options).close()
    assert [line for line in lines if line.startswith("toy:0 has")] == LINES[device]


def test_probe_measures_the_device():
    assert probe.accelerators() == [TOY] and probe.device_name(TOY) == "toy"
    assert min(probe.copies(TOY, 1 << 20)) > 0
    assert probe.products(TOY, torch.float32, (32,))[32] > 0
