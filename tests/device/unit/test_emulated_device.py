"""Training on an emulated device: its memory, its rates, and what a system refuses."""

import time

import pytest
import torch

from roadtrain.device.accelerator import DeviceBuffer, HostBuffer
from roadtrain.lab.emulated_device import EmulatedDevice
from roadtrain.units import MIB
from tests.support.models import Case, contents, place, run


def trained(case, store=None, **options):
    model, placed, scaler = place(case, store, **options)
    with placed:
        losses = run(case, model, placed, scaler, placed.steps_done, 3)
        return losses, {name: value.tobytes() for name, value in contents(model, placed).items()}


def test_memory_that_cannot_be_pinned_is_reported_once_and_used():  # Rule 6
    lines, device = [], EmulatedDevice(pinnable_bytes=3 * MIB)
    with device.active():
        got = trained(Case(), report=lines.append)
    assert got == trained(Case()) and device.races == []
    [line] = [line for line in lines if "pin" in line]
    assert line.startswith("copies are slower than they could be: the emulated system refused")
    assert line.endswith("at most 3.0 MiB can be pinned\nhint: lower host_budget")


def test_the_default_budget_is_the_free_memory_without_a_reserve():  # Rules 4, 6
    lines, device = [], EmulatedDevice(memory_bytes=400 * MIB)
    with device.active():
        trained(Case(), report=lines.append)
    assert any(
        line.startswith("device_budget: 300.0 MiB, which is the free memory of cpu, 400.0 MiB")
        for line in lines
    )


def test_both_directions_of_the_bus_are_used_at_once():
    device = EmulatedDevice(into_rate=20 * MIB, out_rate=20 * MIB, late_s=0.0)
    with device.active():
        buffers = [DeviceBuffer(4 * MIB, device) for _ in range(2)]
        hosts = [HostBuffer(4 * MIB, device) for _ in range(2)]
        began = time.monotonic()
        hosts[0].copy_to(buffers[0], 4 * MIB)
        hosts[1].copy_from(buffers[1], 4 * MIB)
        for host in hosts:
            host.wait()
        seconds = time.monotonic() - began
        for buffer in (*hosts, *buffers):
            buffer.close()
    assert 0.2 <= seconds < 0.4


def test_more_than_the_memory_of_the_device_is_refused():
    device = EmulatedDevice(memory_bytes=6 * MIB)
    with device.active():
        buffer = DeviceBuffer(4 * MIB, device)
        with pytest.raises(torch.OutOfMemoryError, match=r"6.0 MiB.* 4.0 MiB are in use"):
            DeviceBuffer(4 * MIB, device)
        buffer.close()
        DeviceBuffer(4 * MIB, device).close()
