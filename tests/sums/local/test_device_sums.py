"""Sums of tensors on a device: copies run beside the work of the device, on the device's two streams
of copies, and no access is unordered (an emulated device finds races)."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import roadtrain
from roadtrain.lab.emulated_device import EmulatedDevice
from tests.support import world

WIDTH, STEPS = 64, 4


def ddp_losses(rank, hook):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    model = nn.parallel.DistributedDataParallel(net)
    if hook is not None:
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(2 * step + rank)
        loss = model(torch.randn(16, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hooked(rank):
    dist.init_process_group("gloo")
    expected, copies = ddp_losses(rank, None), []
    with EmulatedDevice(seed=rank).active() as device:
        begin, names = device.begin_copy, {device.out: "out", device.into: "into"}
        device.begin_copy = lambda stream, *of: copies.append(names[stream]) or begin(stream, *of)
        with roadtrain.Summation(budget="64MiB", deadline_s=20) as sums:
            losses = ddp_losses(rank, (sums, roadtrain.sum_hook))
    return losses == expected, device.races, sorted(copies), device.pinned


def test_the_hook_copies_beside_the_device_and_changes_no_bit():  # Rules 1 and 6
    copies = ["into"] * STEPS + ["out"] * STEPS  # the model has one bucket
    assert world.run(2, hooked) == [(True, [], copies, {})] * 2


def begin_and_wait(dtype, rank):
    """Sum tensors over slow links of the device. Returns the shortest time of a call, the results,
    and the races. The tensors are freed at once, so that their memory could be used again."""
    dist.init_process_group("gloo")
    device, took, results = EmulatedDevice(late_s=0.0, out_rate=1e4, into_rate=1e4), [], []
    with device.active(), roadtrain.Summation(budget="64MiB", deadline_s=20) as sums:
        for value in (rank + 1.0, rank + 2.0):
            then = time.monotonic()
            under_way = sums.sum(
                1, "a tensor", torch.full((5000 // dtype.itemsize,), value).to(dtype)
            )
            took.append(time.monotonic() - then)
            found = under_way.wait()
            results.append((found.dtype, found.min().item(), found.max().item()))
    return min(took), results, device.races


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_begins_without_waiting_for_the_copy(dtype):
    for took, results, races in world.run(2, partial(begin_and_wait, dtype)):
        assert took < 0.4, "the copy from the device takes 0.5 s"
        assert results == [(dtype, 3.0, 3.0), (dtype, 5.0, 5.0)]
        assert races == []


def disagree(rank):
    """Begin sums that differ, and sums after them while the first ones are still being copied."""
    dist.init_process_group("gloo")
    slow = EmulatedDevice(late_s=0.0, out_rate=8000, into_rate=8000)
    with slow.active() as device, roadtrain.Summation(budget="64MiB", deadline_s=20) as sums:
        abandoned = [sums.sum(n, f"tensor {n}", torch.ones(2000 + rank)) for n in range(2)]
        assert abandoned[1].ticket.agreed.wait(10)
        sums.resume()  # as DDP's hook does in the next backward
        copying = not abandoned[0].future.done()
        total = sums.sum(1, "tensor 1", torch.full((2000,), 1.0 + rank)).wait().max()
        errors = []
        for each in abandoned:
            with pytest.raises(roadtrain.RoadtrainError) as caught:
                each.wait()
            errors.append(caught.typename)
    return copying, float(total), errors, device.races, device.pinned


def test_buffers_of_abandoned_sums_are_freed_after_their_copies():  # Rule 6
    expected = (True, 3.0, ["DifferError"] * 2, [], {})
    assert world.run(2, disagree) == [expected] * 2


def fail_on_the_way_back(rank):
    dist.init_process_group("gloo")
    with (
        EmulatedDevice().active() as device,
        roadtrain.Summation(budget="64MiB", deadline_s=20) as sums,
    ):
        begin = device.begin_copy
        device.begin_copy = lambda stream, *of: (
            begin(stream, *of) if stream is device.out else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            sums.sum(1, "a tensor", torch.ones(9)).wait()
    return "raised"


def test_an_error_of_the_device_ends_the_sum():  # Rule 5
    assert world.run(2, fail_on_the_way_back, wait_s=40) == ["raised"] * 2
