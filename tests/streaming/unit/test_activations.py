"""Activations kept by the forward: budget, scratch file, sharing, and that nothing is left
behind."""

import gc
import os
import threading
import time

import pytest
import torch

from roadtrain.errors import BudgetError, FullError, GoneError, ModelError, StoreError
from roadtrain.streaming import activations as module
from roadtrain.streaming.activations import Activations
from roadtrain.units import show_bytes

N = 1 << 18  # bytes of a tensor in this file


def tensor(seed, dtype=torch.float32):
    return torch.full((N // dtype.itemsize,), seed, dtype=dtype)


@pytest.fixture(autouse=True)
def nothing_left():
    files = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "roadtrain-activations"]
    assert len(os.listdir("/proc/self/fd")) <= len(files)


def test_under_the_budget_is_a_reference():
    keep = Activations(4 * N, None, "cpu")
    x = tensor(3)
    ticket = keep.save(x)
    assert keep.load(ticket).data_ptr() == x.data_ptr()
    assert (keep.bytes_held, keep.peak_bytes, keep.bytes_spilled) == (N, N, 0)
    keep.check()
    keep.free(ticket)
    assert keep.bytes_held == 0
    keep.close()


def test_over_the_budget_without_a_place():
    keep = Activations(2 * N + 100, None, "cpu")
    tickets = [keep.save(tensor(i)) for i in range(2)]
    with pytest.raises(
        BudgetError, match=r"need 768.0 KiB .* budget is 512.1 KiB\nhint: raise .* by 255.9 KiB"
    ):
        keep.save(tensor(2))
    keep.check()
    for t in tickets:
        keep.free(t)
    keep.save(tensor(2))
    keep.close()


def wait_until_idle(keep, seconds=20):
    """Wait until no write or read is in progress, checking the invariants meanwhile."""
    deadline = time.time() + seconds
    while keep._jobs or any(t.state in ("leaving", "coming") for t in list(keep._live.values())):
        assert time.time() < deadline
        keep.check()
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [None, "pwrite", "preadv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_spilled_and_back(tmp_path, dtype, slow, monkeypatch):
    if slow is not None:
        real = getattr(os, slow)
        monkeypatch.setattr(module.os, slow, lambda *a: (time.sleep(0.005), real(*a))[1])
    keep = Activations(3 * N, tmp_path, "cpu")
    made = [
        torch.randint(0, 2 if dtype == torch.bool else 100, (N // dtype.itemsize,)).to(dtype)
        for _ in range(12)
    ]
    tickets = [keep.save(t.clone()) for t in made]
    assert keep.peak_bytes <= 3 * N
    assert keep.bytes_spilled >= 8 * N
    assert os.listdir(tmp_path) == []
    for want, ticket in reversed(list(zip(made, tickets))):
        assert torch.equal(keep.load(ticket), want)
        keep.free(ticket)
        keep.check()
    wait_until_idle(keep)  # tensors freed during their write are held until its end
    assert keep.bytes_held == 0 and keep.peak_bytes <= 3 * N
    end = keep._end
    for t in [keep.save(t.clone()) for t in made]:  # the file does not grow from step to step
        keep.free(t)
    wait_until_idle(keep)
    assert keep._end <= max(end, 12 * N)
    keep.close()


def test_first_in_first_out_and_loaded_twice(tmp_path):
    keep = Activations(2 * N, tmp_path, "cpu")
    tickets = [keep.save(tensor(i)) for i in range(8)]
    for _ in range(2):
        for i, t in enumerate(tickets):
            assert torch.equal(keep.load(t), tensor(i))
    keep.check()
    keep.close()


def test_strides_survive(tmp_path):
    keep = Activations(N, tmp_path, "cpu")
    base = torch.randn(2, N // 4)
    views = [torch.randn(256, 512).t(), torch.randn(512, 512)[:, :256], base[1]]
    tickets = [keep.save(v) for v in views]
    for v, t in zip(views, tickets):
        got = keep.load(t)
        assert torch.equal(got, v) and got.stride() == v.stride()
    keep.close()


def test_shared_is_kept_once(tmp_path):
    keep = Activations(2 * N, tmp_path, "cpu")
    mask = tensor(7)
    tickets = [keep.save(mask) for _ in range(5)]
    others = [keep.save(tensor(i)) for i in range(5)]
    assert len({id(t) for t in tickets}) == 1
    assert keep.load(tickets[0]).data_ptr() == mask.data_ptr()  # the last to be written
    for t in tickets[:4]:
        keep.free(t)
    assert torch.equal(keep.load(tickets[4]), mask)
    keep.free(tickets[4])
    mask.add_(1)
    again = keep.save(mask)
    assert again is not tickets[0] and torch.equal(keep.load(again), mask)
    for t in others:
        keep.free(t)
    keep.check()
    keep.close()


def test_small_and_expanded_never_leave(tmp_path):
    keep = Activations(100, tmp_path, "cpu")
    small, wide = torch.ones(100), torch.ones(1, 1).expand(1000, 1000)
    tickets = [
        keep.save(small),
        keep.save(wide),
        keep.save(torch.tensor(3)),
        keep.save(torch.empty(0, 4)),
    ]
    assert keep.load(tickets[1]).stride() == (0, 0)
    assert keep.bytes_spilled == 0 and keep.bytes_held < 1000 and keep._thread is None
    keep.close()


def test_changed_in_place(tmp_path):
    keep = Activations(2 * N, tmp_path, "cpu")
    x = tensor(1)
    ticket = keep.save(x)
    x.add_(1)
    with pytest.raises(ModelError, match="changed in place"):
        keep.load(ticket)
    keep.close()


def test_changed_while_leaving(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(module.os, "pwrite", lambda *a: (time.sleep(0.2), real(*a))[1])
    keep = Activations(N, tmp_path, "cpu")
    x = tensor(1)
    ticket = keep.save(x)
    x.add_(1)
    keep.save(tensor(2))
    with pytest.raises(ModelError, match="changed in place"):
        keep.load(ticket)
    keep.close()


def test_full_disk(tmp_path, monkeypatch):
    def full(*a):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", full)
    keep = Activations(N, tmp_path, "cpu")
    words = rf"{tmp_path}: the next block input needs {show_bytes(N)}, but .* are free\s+\(No space"
    with pytest.raises(FullError, match=words):
        for i in range(4):
            keep.save(tensor(i))
    keep.close()


def test_a_flipped_bit_in_the_scratch_file(tmp_path):  # Rule 6
    keep = Activations(3 * N, tmp_path, "cpu")
    tickets = [keep.save(tensor(i)) for i in range(8)]
    wait_until_idle(keep)
    away = next(t for t in tickets if t.state == "away")
    fd = keep._file.fileno()
    byte = os.pread(fd, 1, away.at + 77)[0]
    os.pwrite(fd, bytes([byte ^ 32]), away.at + 77)
    with pytest.raises(StoreError, match="scratch file do not match their checksum"):
        keep.load(away)
    keep.close()


def test_bad_directory(tmp_path):
    (tmp_path / "file").write_text("")
    keep = Activations(N, tmp_path / "file", "cpu")
    with pytest.raises(GoneError, match="cannot make a scratch file"):
        for i in range(3):
            keep.save(tensor(i))
    keep.close()


def test_freed_while_leaving(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(module.os, "pwrite", lambda *a: (time.sleep(0.02), real(*a))[1])
    keep = Activations(2 * N, tmp_path, "cpu")
    for _ in range(5):
        tickets = [keep.save(tensor(i)) for i in range(6)]
        for t in tickets:
            keep.free(t)
    wait_until_idle(keep)
    assert keep.bytes_held == 0
    assert sum(map(len, keep._holes.values())) * N == keep._end  # each hole counted once
    keep.close()


def test_close_during_writes(tmp_path):
    keep = Activations(N, tmp_path, "cpu")
    for i in range(10):
        keep.save(tensor(i))
    keep.close()
