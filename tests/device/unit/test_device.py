"""The device of each local worker, and that streams and events belong to it, with a fake torch
whose cuda only records calls."""

import ctypes
import faulthandler
import itertools
import mmap
import os
import signal
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from roadtrain.device import accelerator as module
from roadtrain.device import choice
from roadtrain.device.accelerator import (
    Accelerator,
    DeviceBuffer,
    HostBuffer,
    random_state,
    set_random_state,
)
from roadtrain.device.buffers import Buffer
from roadtrain.device.choice import idle_accelerator, own_device
from roadtrain.errors import ConfigError
from roadtrain.kernels import gpu
from roadtrain.kernels.rules import SgdRule

CUDA_1 = torch.device("cuda", 1)


class Event:
    def __init__(self, device=None, *, blocking=False):
        self.stream, self.done, self.waited, self.blocking = None, True, 0, blocking

    def record(self, stream):
        self.stream, self.done = stream, False

    def query(self):
        return self.done

    def synchronize(self):
        self.waited += 1
        self.done = True


class Stream:
    """A stream of a fake device. Like torch.Stream, made for a device or as a copy of another
    stream. cuda: The fake that made it."""

    def __init__(self, cuda, device=None, *, stream_id=None, device_index=None, device_type=None):
        self.cuda, self.waits, self.device_type = cuda, [], "cuda"
        self.device_index = device_index if device is None else device.index
        self.stream_id = next(cuda.ids) if stream_id is None else stream_id
        self.device = torch.device("cuda", self.device_index)

    def __eq__(self, other):
        return self.stream_id == other.stream_id

    __hash__ = None

    def wait_event(self, event):
        self.waits.append(event.stream)

    def wait_stream(self, stream):
        self.waits.append(stream)

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def __enter__(self):
        self.before, self.cuda.compute[self.device_index] = (
            self.cuda.compute[self.device_index],
            self,
        )
        self.cuda.entered.append(self)

    def __exit__(self, *_):
        self.cuda.compute[self.device_index] = self.before


class Cuda:
    """Fake torch.cuda and torch.accelerator with `count` devices; the current device is 0 until it
    is set.

    used: Current device at each registration of host memory. refused: Whether the system refuses
    to pin memory. entered: Streams that were current for a while.
    """

    Event = Event

    def __init__(self, count, kind):
        self.count, self.kind, self.current, self.ids = count, kind, 0, itertools.count()
        self.used, self.registered, self.refused, self.entered = [], {}, False, []
        self.compute = [Stream(self, torch.device("cuda", i)) for i in range(count)]

    def is_available(self):
        return self.count > 0

    def device_count(self):
        return self.count

    def current_accelerator(self):
        return torch.device(self.kind)

    def current_device_index(self):
        return self.current

    def set_device_index(self, index):
        self.current = index

    def Stream(self, device):
        return Stream(self, device)

    def current_stream(self, device=None):
        return self.compute[self.current if device is None else device.index]

    def cudart(self):
        return self

    def cudaHostRegister(self, at, nbytes, flags):
        self.used.append(self.current)
        if self.refused:
            return 2
        self.registered[at] = nbytes
        return 0

    def cudaHostUnregister(self, at):
        del self.registered[at]

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    def stream(self, stream):
        return stream


class Torch:
    """torch with a fake accelerator; tensors on its devices are host tensors."""

    Event = Event

    def __init__(self, count, kind="cuda"):
        self.cuda = self.accelerator = Cuda(count, kind)
        self.Stream = partial(Stream, self.cuda)

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, device=None, pin_memory=False, **options):
        return torch.empty(*args, **options)


@pytest.fixture
def cuda(monkeypatch):
    fake = Torch(2)
    for each in (module, choice):
        monkeypatch.setattr(each, "torch", fake)
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
        ("cpux", launch_environment(0), r"`device` cannot be 'cpux'"),
    ],
)
def test_a_missing_device_is_refused(cuda, requested, environ, message):
    with pytest.raises(ConfigError, match=message):  # Rule 6
        own_device(requested, environ=environ)


def test_a_cuda_device_without_cuda_is_refused():
    with pytest.raises(ConfigError, match=r"cuda:0 is requested, but torch sees 0 cuda device"):
        own_device("cuda", environ=launch_environment(0))


def test_any_accelerator_of_torch_is_chosen_like_cuda(monkeypatch):
    monkeypatch.setattr(choice, "torch", fake := Torch(2, "xpu"))
    lines = []
    assert own_device("xpu", environ=launch_environment(1, 2)) == torch.device("xpu", 1)
    fake.accelerator.current = 0
    assert own_device(None, environ=launch_environment(1, 2)) == torch.device("xpu", 1)
    own_device("xpu:0", lines.append, launch_environment(1, 2))
    assert "computes on xpu:0" in lines[0] and "device='xpu' gives each worker its own" in lines[0]
    assert "device='xpu') or model.to('xpu')" in idle_accelerator(torch.device("cpu"))
    with pytest.raises(ConfigError, match="xpu:5 is requested, but torch sees 2 xpu") as raised:
        own_device("xpu:5", environ=launch_environment(0))
    assert raised.value.hint == "use device='cpu'"  # CUDA_VISIBLE_DEVICES does not matter
    with pytest.raises(ConfigError, match="cuda is not supported, only xpu and cpu are"):
        own_device("cuda", environ=launch_environment(0))
    monkeypatch.setattr(choice, "torch", Torch(0, "xpu"))
    assert own_device() == torch.device("cpu")


def test_workers_that_each_see_one_device_are_reported(monkeypatch):
    monkeypatch.setattr(choice, "torch", Torch(1))
    lines = []
    assert own_device("cuda", lines.append, launch_environment(3, 4)) == torch.device("cuda", 0)
    assert lines == ["this host has 4 workers and this one sees 1 cuda device, which it uses"]


def test_a_model_on_the_cpu_beside_an_accelerator_is_reported(cuda, monkeypatch):
    assert "this host has 2 cuda device(s)" in idle_accelerator(torch.device("cpu"))  # Rule 6
    assert not idle_accelerator(CUDA_1)
    monkeypatch.setattr(choice, "torch", torch)
    assert torch.accelerator.is_available() or not idle_accelerator(torch.device("cpu"))


@pytest.fixture
def buffers(cuda):
    accelerator = Accelerator(CUDA_1)
    host, device = HostBuffer(4096, accelerator), DeviceBuffer(4096, accelerator)
    yield host, device
    host.close()
    device.close()
    assert not cuda.registered and not accelerator.held


def test_a_buffer_uses_the_streams_and_events_of_its_device(cuda, buffers):
    """Even if the thread's current device is another, as in a thread that delivers messages."""
    host, device = buffers
    into, out, compute = device.accelerator.into, device.accelerator.out, cuda.compute[1]
    assert cuda.used == [1] and cuda.current == 0  # pinned for its device
    assert into != out and into.device == out.device == CUDA_1
    assert device._used.stream is compute and device._used.blocking  # a wait for it sleeps
    host.copy_to(device, 4096)
    assert host.copied.stream == device._copied.stream == into and into.waits == [compute, None]
    device.ready()
    assert compute.waits == [into] and not cuda.compute[0].waits
    host.copy_from(device, 4096)
    assert host.copied.stream == device._copied.stream == out and out.waits == [compute, into]
    assert cuda.entered == [into, out]
    with host.copies_on(out):
        pass
    assert cuda.entered[2:] == [out] and out.waits[2:] == [compute, out]
    assert cuda.compute == [cuda.compute[0], compute] and compute.waits == [into]


def test_every_device_has_its_own_streams(cuda, monkeypatch):
    monkeypatch.setattr(module, "accelerators", {})
    of = [module.accelerator_of(torch.device("cuda", i)) for i in (0, 1, 1)]
    assert of[1] is of[2] and of[0].into.device.index == 0 and of[1].into.device.index == 1
    assert module.accelerator_of(torch.device("cpu")) is None


def test_querying_a_copy_does_not_wait(buffers):
    host, device = buffers
    assert host.copying() is None
    host.copy_to(device, 4096)
    event = host.copying()
    assert event is host.copied and not event.waited
    event.done = True
    assert host.copying() is None and not event.waited


def test_a_system_that_refuses_to_pin_memory_is_named(cuda):  # Rule 6
    cuda.refused, lines, accelerator = True, [], Accelerator(CUDA_1)
    accelerator.report = lines.append
    for _ in range(2):
        HostBuffer(4096, accelerator).close()
    [line] = lines
    assert "refused to pin 4.0 KiB of host memory for cuda:1: cudaHostRegister returned 2" in line
    assert "raise the limit of locked memory (ulimit -l)" in line


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu"])
def test_random_states_of_any_device(kind, monkeypatch):
    """torch.mps has one device, so its functions take no device."""
    device, state = torch.device(kind, 0), torch.zeros(16, dtype=torch.uint8)
    at, seen = [] if kind in ("cpu", "mps") else [device], []
    functions = torch if kind == "cpu" else torch.get_device_module(kind)
    monkeypatch.setattr(functions, "get_rng_state", lambda *on: seen.append([*on]) or state)
    monkeypatch.setattr(functions, "set_rng_state", lambda *words: seen.append([*words]))
    set_random_state(random_state(device), device)
    assert seen == [at, [state, *at]]


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
