"""Block inputs of an emulated device: on the device within its budget, else in host memory or in the
scratch file."""

import time

import pytest
import torch

from roadtrain.errors import BudgetError, ModelError
from roadtrain.lab.emulated_device import EmulatedDevice
from roadtrain.streaming.activations import HERE, ON_DEVICE, Activations

N = 1 << 18  # bytes of a tensor


@pytest.fixture
def device():
    with EmulatedDevice().active() as device:
        yield device
        assert device.races == []


def tensors(count):
    return [torch.full((N // 4,), float(i)) for i in range(count)]


@pytest.mark.parametrize("room", [1, 2, 6])
@pytest.mark.parametrize("host", [2, 6])
def test_what_was_saved_is_loaded(device, room, host, tmp_path):  # Rules 1, 4
    keep = Activations(host * N, tmp_path, "cpu", room * N)
    kept = [keep.save(tensor) for tensor in tensors(6)]
    keep.check()
    for i in reversed(range(6)):
        assert torch.equal(keep.load(kept[i]), torch.full((N // 4,), float(i)))
        assert torch.equal(keep.load(kept[i]), torch.full((N // 4,), float(i))), "a second time"
        keep.free(kept[i])
    keep.check()
    while keep.bytes_held:  # a freed tensor is still being written
        time.sleep(0.001)
    assert keep.on_device.held == 0
    assert keep.on_device.accelerator.peak == min(room, 6) * N and keep.peak_bytes <= host * N
    # one more tensor than needed leaves early
    assert keep.bytes_spilled > 0 or room + host >= 6
    assert keep.bytes_spilled == 0 or room + host <= 7
    keep.close()


def test_the_oldest_leave_first_and_come_back_ahead(device):
    keep = Activations(8 * N, None, "cpu", 3 * N)
    kept = [keep.save(tensor) for tensor in tensors(5)]
    assert [t.state for t in kept] == [HERE] * 3 + [ON_DEVICE] * 2
    for ticket in reversed(kept[3:]):
        keep.load(ticket)
        keep.free(ticket)
    assert not kept[2].at_device.came_back, "there was no room yet"
    keep.load(kept[2])
    assert kept[1].at_device.came_back, "copied while the block of the next one computes"
    keep.close()


@pytest.mark.parametrize("shape", [(64, 1024), (1024, 64)])
def test_strides_are_kept(device, shape, tmp_path):  # Rule 1
    """Dense strides on the host too; the gaps of others are not copied."""
    for at, (first, to_file) in enumerate([(N, False), (0, True)]):
        keep = Activations(N + first, tmp_path / str(at), "cpu", N)
        whole = torch.randn(shape[0], 2 * shape[1])
        for tensor in (torch.randn(shape).t(), whole[:, : shape[1]]):
            kept = keep.save(tensor)
            others = [keep.save(t) for t in tensors(3)]
            assert not to_file or kept.state != ON_DEVICE
            loaded = keep.load(kept)
            assert torch.equal(loaded, tensor) and loaded.stride() == tensor.stride()
            for ticket in (kept, *others):
                keep.free(ticket)
        keep.close()


def test_no_thread_waits_for_the_device_with_the_lock(device, monkeypatch):
    keep, locked = Activations(8 * N, None, "cpu", N), []
    event = type(device.new_event())
    synchronize = event.synchronize

    def waits(self):
        locked.append(keep._lock.locked())  # noqa: SLF001
        synchronize(self)

    monkeypatch.setattr(event, "synchronize", waits)
    for tensor in tensors(4):
        keep.save(tensor)
    assert locked and not any(locked), "others can save and free meanwhile"
    keep.close()


def test_a_changed_input_is_refused(device):  # Rule 6
    keep = Activations(8 * N, None, "cpu", 4 * N)
    [tensor] = tensors(1)
    kept = keep.save(tensor)
    tensor.add_(1)
    with pytest.raises(ModelError, match="changed in place between forward and backward"):
        keep.load(kept)
    keep.close()


def test_refusals_name_both_numbers(device):  # Rule 6
    keep = Activations(8 * N, None, "cpu", N - 4096)
    with pytest.raises(BudgetError, match=r"needs 256.0 KiB of device memory.* 252.0 KiB") as error:
        keep.save(*tensors(1))
    assert "raise device_budget by 4.0 KiB" in error.value.hint
    keep.close()
    keep = Activations(N, None, "cpu", N)
    with pytest.raises(BudgetError, match=r"need 512.0 KiB of host memory.* 256.0 KiB"):
        for tensor in tensors(3):
            keep.save(tensor)
    keep.close()


def test_host_memory_of_another_size_is_given_back(device):  # Rule 4
    keep, leave = Activations(4 * N, None, "cpu", 2 * N), []
    for times in (1, 2):
        kept = [keep.save(torch.ones(times * N // 4)) for _ in range(3)]
        leave.append(sum(ticket.at_device.host is not None for ticket in kept))
        for ticket in kept:
            keep.free(ticket)
    assert leave == [2, 2]
    assert sum(device.pinned.values()) == 4 * N
    keep.close()
    assert not device.pinned
