"""The device of each local worker, and that streams and events belong to it, with a fake torch
whose cuda only records calls."""

import ctypes
import faulthandler
import mmap
import os
import signal

import numpy as np
import pytest
import torch

from roadtrain.device import copies as module
from roadtrain.device.buffers import Buffer
from roadtrain.device.copies import HostBuffer, idle_accelerator, own_device
from roadtrain.errors import ConfigError
from roadtrain.kernels import gpu
from roadtrain.kernels.rules import SgdRule
from roadtrain.streaming import activations

CUDA_1 = torch.device("cuda", 1)


class Event:
    def __init__(self):
        self.stream, self.done, self.waited = None, False, 0

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.done

    def synchronize(self):
        self.waited += 1
        self.done = True


class Stream:
    def __init__(self, device):
        self.device, self.waits = device, []

    def wait_event(self, event):
        self.waits.append(event.stream)

    def wait_stream(self, stream):
        self.waits.append(stream)

    def record_event(self):
        event = Event()
        event.record(self)
        return event


class Cuda:
    """Fake torch.cuda with `count` devices; the current device is 0 until it is set. used: Current
    device at each copy, registration and launch."""

    Event = Event

    def __init__(self, count):
        self.count, self.current, self.used, self.registered = count, 0, [], {}
        self.compute = [Stream(torch.device("cuda", i)) for i in range(count)]
        self.entered = []

    def is_available(self):
        return self.count > 0

    def Stream(self, device):
        return Stream(device)

    def current_stream(self, device=None):
        return self.compute[self.current if device is None else device.index]

    def cudart(self):
        return self

    def cudaHostRegister(self, at, nbytes, flags):
        self.used.append(self.current)
        self.registered[at] = nbytes
        return 0

    def cudaHostUnregister(self, at):
        del self.registered[at]

    def device(self, device):
        return self._Inside(self, device)

    def stream(self, stream):
        return self._Inside(self, stream.device, stream)

    class _Inside:
        def __init__(self, cuda, device, stream=None):
            self.cuda, self.device, self.now = cuda, device, stream

        def __enter__(self):
            self.before = self.cuda.current, list(self.cuda.compute)
            self.cuda.current = self.device.index
            if self.now is not None:
                self.cuda.compute[self.device.index] = self.now
                self.cuda.entered.append(self.now)

        def __exit__(self, *_):
            self.cuda.current, self.cuda.compute = self.before


class Torch:
    """torch with the fake cuda; tensors on its devices are host tensors."""

    def __init__(self, count):
        self.cuda = self.accelerator = Cuda(count)
        self.cuda.device_count = lambda: count
        self.cuda.current_device_index = lambda: self.cuda.current
        self.cuda.current_accelerator = lambda: torch.device("cuda")
        self.cuda.set_device_index = lambda index: setattr(self.cuda, "current", index)

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, device=None, pin_memory=False, **options):
        return torch.empty(*args, **options)

    def empty_strided(self, *args, device=None, pin_memory=False, **options):
        return torch.empty_strided(*args, **options)


@pytest.fixture
def cuda(monkeypatch):
    fake = Torch(2)
    monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(activations, "torch", fake)
    monkeypatch.setattr(HostBuffer, "_copy_streams", {})
    return fake.cuda


def launch_environment(rank, workers=1):
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}


def test_a_local_worker_computes_on_the_device_of_its_rank(cuda):
    assert own_device("cuda", environ=launch_environment(1, 2)) == CUDA_1
    assert cuda.current == 1  # so that the program's own .to("cuda") uses the same device
    assert own_device("cuda:0", environ=launch_environment(1, 2)) == torch.device("cuda", 0)


def test_a_worker_on_the_device_of_another_is_reported(cuda):
    lines = []
    assert own_device("cuda:0", lines.append, launch_environment(1, 2)) == torch.device("cuda", 0)
    # Rule 6
    assert lines[0].startswith(
        "worker 1 of 2 on this host computes on cuda:0, which another worker may use"
    )
    own_device("cuda:1", lines.append, launch_environment(1, 2))
    own_device("cuda:0", lines.append, launch_environment(0, 1))
    assert len(lines) == 1


def test_a_device_that_the_program_set_is_kept(cuda):
    cuda.current = 1
    assert own_device("cuda", environ=launch_environment(0, 2)) == CUDA_1


@pytest.mark.parametrize(
    ("requested", "environ", "message"),
    [
        (
            "cuda",
            launch_environment(2, 3),
            r"no cuda:2: torch sees 2 cuda devices, but LOCAL_RANK is 2",
        ),
        ("cuda", launch_environment("x"), r"LOCAL_RANK is not an integer"),
        ("cuda:5", launch_environment(0), r"cuda:5 is requested, but torch sees 2"),
        ("xpu", launch_environment(0), r"xpu is not supported, only cuda and cpu are"),
    ],
)
def test_a_missing_device_is_refused(cuda, requested, environ, message):
    with pytest.raises(ConfigError, match=message):  # Rule 6
        own_device(requested, environ=environ)


def test_a_cuda_device_without_cuda_is_refused():
    with pytest.raises(ConfigError, match=r"cuda:0 is requested, but torch sees 0 cuda device"):
        own_device("cuda", environ=launch_environment(0))


def test_workers_that_each_see_one_device_are_reported(monkeypatch):
    monkeypatch.setattr(module, "torch", Torch(1))
    lines = []
    assert own_device("cuda", lines.append, launch_environment(3, 4)) == torch.device("cuda", 0)
    assert lines == ["this host has 4 workers and this one sees 1 cuda device, which it uses"]


def test_a_model_on_the_cpu_beside_an_accelerator_is_reported(cuda, monkeypatch):
    assert "this host has 2 cuda device(s)" in idle_accelerator(torch.device("cpu"))  # Rule 6
    assert not idle_accelerator(CUDA_1)
    monkeypatch.setattr(module, "torch", torch)
    assert torch.accelerator.is_available() or not idle_accelerator(torch.device("cpu"))


def test_a_buffer_uses_the_streams_and_events_of_its_device(cuda):
    """Even if the thread's current device is another, as in a thread that delivers messages."""
    buffer = HostBuffer(4096, CUDA_1)
    side = HostBuffer._copy_streams[CUDA_1]
    assert cuda.used == [1] and side.device == CUDA_1 and cuda.current == 0
    assert buffer._used.stream is cuda.compute[1]
    buffer.to_device(4096)
    assert buffer._copied.stream is side and side.waits == [cuda.compute[1]]
    buffer.on_device()
    assert cuda.compute[1].waits == [side] and not cuda.compute[0].waits
    buffer.record_use()
    assert buffer._used.stream is cuda.compute[1]
    done = buffer.from_device(4096)
    assert done.stream is side and side.waits[-1] is cuda.compute[1]
    assert [stream.device for stream in cuda.entered] == [CUDA_1, CUDA_1]
    buffer.close()
    assert not cuda.registered


def test_every_device_has_its_own_side_stream(cuda):
    buffers = [HostBuffer(4096, torch.device("cuda", i)) for i in (0, 1, 1)]
    for buffer in buffers:
        buffer.to_device(4096)
    assert [buffer._copied.stream.device.index for buffer in buffers] == [0, 1, 1]
    assert buffers[1]._copied.stream is buffers[2]._copied.stream
    for buffer in buffers:
        buffer.close()


def test_querying_a_copy_does_not_wait(cuda):
    buffer = HostBuffer(4096, CUDA_1)
    assert buffer.copying() is None
    buffer.to_device(4096)
    event = buffer.copying()
    assert event is buffer._copied and not event.waited
    event.done = True
    assert buffer.copying() is None and not event.waited
    buffer.close()


class OnDevice(torch.Tensor):
    """A tensor that claims to be on cuda:1."""

    @property
    def device(self):
        return CUDA_1


def test_block_inputs_are_copied_on_their_own_device_and_waited_for_without_the_lock(
    cuda, monkeypatch
):
    keep = activations.Activations(1 << 20, None, "cuda:1")
    locked = []
    monkeypatch.setattr(Event, "synchronize", lambda self: locked.append(keep._lock.locked()))
    tensor = torch.full((1 << 16,), 3.0).as_subclass(OnDevice)
    ticket = keep.save(tensor)
    assert ticket.event.stream is keep._streams[CUDA_1] and keep._streams[CUDA_1].waits == [
        cuda.compute[1]
    ]
    ticket.device = torch.device("cpu")  # copying it back is not tested here
    assert torch.equal(keep.load(ticket), torch.full((1 << 16,), 3.0))
    assert locked == [False]  # others can save and free during the wait
    keep.close()


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device."""
    inside, seen = [], []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            inside.append(self.tensor)

        def __exit__(self, *_):
            inside.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append(list(inside))

    monkeypatch.setattr(gpu.torch.cuda, "device_of", Guard)
    monkeypatch.setattr(gpu, "triton", object())
    monkeypatch.setattr(gpu, "_sgd", Kernel())
    x = torch.ones(3)
    hyper = (0.1, 0.0, 0.0, 0.0, 0.0, 0.0)
    gpu.apply(SgdRule(), x, torch.ones(3), [], np.zeros(1), hyper)
    assert len(seen) == 1 and seen[0][0] is x


def advised(address):
    """The kernel's flags of the memory mapping that contains `address`."""
    with open("/proc/self/smaps") as file:
        here = False
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                here = begin <= address < end
            elif here and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("nbytes", [1, 5 << 20])
def test_a_forked_child_cannot_touch_buffers_of_direct_io(nbytes):
    """Note fork in device/buffers.py: the kernel must not copy a page for the parent while a device
    reads into it."""
    buffer = Buffer(nbytes)
    buffer.view[:] = bytes([7]) * len(buffer.view)
    at = ctypes.addressof(ctypes.c_char.from_buffer(buffer.view))
    # a forked child gets no bytes of it
    assert "wf" in advised(at) and "wf" in advised(at + len(buffer.view) - 1)
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            ctypes.string_at(at, 1)  # SIGSEGV: the child may not touch it
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
    assert bytes(buffer.view[:3]) == b"\7\7\7"


def test_freeing_a_buffer_in_a_forked_child_leaves_other_mappings_intact():
    """A DataLoader worker garbage-collects inherited buffers: mappings that it made itself must
    survive."""
    inherited = [Buffer(1 << 20) for _ in range(20)]
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            own = [
                mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for _ in range(100)
            ]
            for memory in own:
                memory[:3] = b"own"
            inherited.clear()
            os._exit(0 if all(memory[:3] == b"own" for memory in own) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert status == 0
