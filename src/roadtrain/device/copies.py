"""Which device a worker computes on, and HostBuffer: bytes that a server writes or reads, and their
device copy on it.

On the CPU the two are the same memory. On CUDA the host side is registered as pinned memory of
exactly its size (torch's pinned allocator rounds up to powers of two), copies run on one side
stream a device, and events order them against compute. Every stream and event is asked of the
buffer's own device: threads that deliver messages have another current device than the one that
trains.

Does NOT wait for an event, but in `wait_unused`, `copy_rate` and `close`, and on the threads of
AfterCopies: the rest may be called with a lock.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from roadtrain.device.buffers import Buffer
from roadtrain.environment import local_rank_of
from roadtrain.errors import ConfigError, ModelError

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not for the current one alone


def own_device(
    asked: torch.device | str,
    report: Callable[[str], None] = lambda _: None,
    environ: Mapping[str, str] = os.environ,
) -> torch.device:
    """`asked` with its index. `cuda` without one is this process's own device: the current one
    where the program chose it (torch.cuda.set_device), else that of LOCAL_RANK, which becomes
    the current one. Raises ConfigError for a device that is not there."""
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ConfigError(
            f"`device` cannot be {asked!r}", hint="`device` must be 'cuda', 'cuda:N' or 'cpu'"
        ) from error
    if device.type in ("cpu", "meta"):
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(
            f"device {device}: blocks run on cuda or on the cpu",
            hint="device='cuda' or device='cpu'",
        )
    count = torch.accelerator.device_count() if torch.cuda.is_available() else 0
    index = (
        _own_index(count, report, environ) if device.index is None and count else device.index or 0
    )
    if index >= count:
        raise ConfigError(
            f"device cuda:{index} is asked for, torch sees {count} cuda device(s) here",
            hint="CUDA_VISIBLE_DEVICES hides devices; device='cpu' computes on the processors",
        )
    if device.index is None:
        torch.accelerator.set_device_index(index)
    elif count > 1:
        rank, workers = local_rank_of(environ)
        # as where a script says model.cuda() in each of its processes
        if workers > 1 and rank != index:
            report(
                f"worker {rank} of the {workers} of this host computes on cuda:{index}, which"
                " another one may use: device='cuda' gives each its own,"
                f" torch.cuda.set_device({rank}) does for the whole program"
            )
    return torch.device("cuda", index)


def _own_index(count: int, report: Callable[[str], None], environ: Mapping[str, str]) -> int:
    rank, workers = local_rank_of(environ)
    if chosen := torch.accelerator.current_device_index():
        return chosen
    if count == 1:  # a launcher may show each worker a device of its own
        if workers > 1:
            report(
                f"this host has {workers} workers and each sees 1 cuda device: it computes on the"
                " one that it sees"
            )
        return 0
    if not 0 <= rank < count:
        raise ConfigError(
            f"LOCAL_RANK is {rank}, torch sees {count} cuda devices here",
            hint=(
                "start as many workers a host as it has devices, or name a device (device='cuda:0')"
            ),
        )
    return rank


def device_of(
    model: nn.Module, asked: torch.device | str | None, report: Callable[[str], None]
) -> torch.device:
    """Where the blocks of `model` run: on `asked`, else where the model is. Raises ConfigError,
    ModelError."""
    if asked is not None:
        return own_device(asked, report)
    found = {p.device for p in model.parameters()} - {torch.device("meta")}
    if len(found) > 1:
        raise ModelError(
            f"the model's parameters are on {sorted(map(str, found))}", hint="put it on one device"
        )
    device = next(iter(found), torch.device("cpu"))
    if line := idle_accelerator(device):
        report(line)
    return own_device(device, report)


def idle_accelerator(device: torch.device) -> str:
    """A line for people where a model computes on the CPU of a host that has an accelerator,
    else nothing."""
    if device.type != "cpu" or not torch.accelerator.is_available():
        return ""
    kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    return (
        f"the model computes on the CPU, and this host has {count} {kind} device(s): place(...,"
        " device='cuda') or model.to('cuda') uses them, device='cpu' says that the CPU is meant"
    )


class HostBuffer:
    """`view`: host bytes, page-aligned. `tensor`: uint8 on the compute device. On CPU `tensor`
    is `view`."""

    # one side stream a device, made at its first buffer
    _copy_streams: dict[torch.device, Any] = {}

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.view = Buffer(nbytes).view
        self.nbytes = len(self.view)
        self._host = torch.frombuffer(self.view, dtype=torch.uint8)
        self._device, self._cuda = device, device.type == "cuda"
        self._copied: Any = None  # event: the last copy on the side stream
        self._used: Any = None  # event: the last compute that reads `tensor`
        if not self._cuda:
            self.tensor = self._host
            return
        with torch.cuda.device(device):
            cudart: Any = torch.cuda.cudart()
            code = cudart.cudaHostRegister(self._host.data_ptr(), self.nbytes, PORTABLE)
            if int(code) != 0:
                raise RuntimeError(
                    f"cudaHostRegister of {self.nbytes} bytes failed with code {int(code)}"
                )
            self.tensor = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            if device not in HostBuffer._copy_streams:
                HostBuffer._copy_streams[device] = torch.cuda.Stream(device)
        self.record_use()  # the memory may be one that compute still reads, freed a moment ago

    def wait_unused(self) -> None:
        """Before the host side is written: the last copy to the device must have read it. Not to
        be called with a lock: `copying` says what to wait for."""
        if self._copied is not None:
            self._copied.synchronize()

    def copying(self) -> Any:
        """The event of a copy that still reads the host side, None where there is none."""
        return None if self._copied is None or self._copied.query() else self._copied

    def to_device(self, nbytes: int) -> None:
        """Host -> device on the side stream, after the last compute that used the device side."""
        if self._cuda and nbytes:
            stream = HostBuffer._copy_streams[self._device]
            if self._used is not None:
                stream.wait_event(self._used)
            with torch.cuda.stream(stream):
                self.tensor[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(stream)

    def copy_rate(self) -> float:
        """Bytes a second from host to device, measured now; infinite where the two sides are
        one."""
        if not self._cuda:
            return math.inf
        self.wait_unused()
        start = time.perf_counter()
        self.to_device(self.nbytes)
        self.wait_unused()
        return self.nbytes / (time.perf_counter() - start)

    def on_device(self) -> torch.Tensor:
        """The device side, ordered after its copy on the caller's stream."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self.tensor

    def record_use(self) -> None:
        """The caller's stream has launched its last read of the device side."""
        if self._cuda:
            self._used = torch.cuda.Event()
            self._used.record(torch.cuda.current_stream(self._device))

    def from_device(self, nbytes: int) -> Any:
        """Device -> host on the side stream, after what the caller's stream has launched.
        Returns an event to synchronise on before the host side is read, None where the two sides
        are one."""
        if not self._cuda:
            return None
        stream = HostBuffer._copy_streams[self._device]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host[:nbytes].copy_(self.tensor[:nbytes], non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done

    def close(self) -> None:
        if self._cuda:
            self.wait_unused()
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self._host.data_ptr())
        del self._host, self.tensor, self.view  # the memory goes with the last view of it


class CopyCallbacks:
    """A thread that waits for events of a device, one after the other, and does after each what
    was to come after it: so that nobody waits for a device with a lock. `failed` hears what goes
    wrong."""

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._todo: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: Any, then: Callable[[], None]) -> None:
        self._todo.put((event, then))

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            event, then = item
            try:
                event.synchronize()
                then()
            except BaseException as error:
                self._failed(error)

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()
