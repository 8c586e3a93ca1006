"""Choice of a worker's device, and HostBuffer: host memory with a copy on the device.

On CUDA, the host memory is pinned, and copies run on a separate stream (one per device). Streams
and events always name the buffer's device, because the current device in torch may differ between
threads. Only `wait_unused`, `copy_rate`, `close` and the threads of CopyCallbacks wait for the
device. All other functions may be called with a lock held.
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

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices, not only for the current one


def own_device(
    requested: torch.device | str,
    report: Callable[[str], None] = lambda _: None,
    environ: Mapping[str, str] = os.environ,
) -> torch.device:
    """Return the requested device with an index. Raises ConfigError if the device is missing or not
    supported.

    If `requested` is `cuda` without an index, the first of these rules that applies chooses the
    device, which then becomes torch's current device: torch's current device, if its index is above
    0; the only device, if torch sees only one; the device whose index is the environment variable
    LOCAL_RANK.
    """
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise ConfigError(
            f"`device` cannot be {requested!r}", hint="`device` must be 'cuda', 'cuda:N' or 'cpu'"
        ) from error
    if device.type in ("cpu", "meta"):
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(
            f"device {device} is not supported, only cuda and cpu are supported",
            hint="use device='cuda' or device='cpu'",
        )
    count = torch.accelerator.device_count() if torch.cuda.is_available() else 0
    index = (
        _own_index(count, report, environ) if device.index is None and count else device.index or 0
    )
    if index >= count:
        raise ConfigError(
            f"device cuda:{index} is requested, but torch sees {count} cuda device(s) here",
            hint="check CUDA_VISIBLE_DEVICES, which hides devices, or use device='cpu'",
        )
    if device.index is None:
        torch.accelerator.set_device_index(index)
    elif count > 1:
        rank, workers = local_rank_of(environ)
        # for example if each process of a script calls model.cuda()
        if workers > 1 and rank != index:
            report(
                f"worker {rank} of {workers} on this host computes on cuda:{index}, which another"
                " worker may use, too: device='cuda' gives each worker its own device, and"
                f" torch.cuda.set_device({rank}) sets it for the whole program"
            )
    return torch.device("cuda", index)


def _own_index(count: int, report: Callable[[str], None], environ: Mapping[str, str]) -> int:
    rank, workers = local_rank_of(environ)
    if chosen := torch.accelerator.current_device_index():
        return chosen
    if count == 1:  # perhaps the launcher has made a different device visible to each worker
        if workers > 1:
            report(
                f"this host has {workers} workers and this one sees 1 cuda device, which it uses"
            )
        return 0
    if not 0 <= rank < count:
        raise ConfigError(
            f"there is no cuda:{rank}: torch sees {count} cuda devices, but LOCAL_RANK is {rank}",
            hint="start one worker per device on each host, or name a device (device='cuda:0')",
        )
    return rank


def device_of(
    model: nn.Module, requested: torch.device | str | None, report: Callable[[str], None]
) -> torch.device:
    """Return the device for the blocks of `model`: `requested`, or by default the device of its
    parameters. Raises ConfigError if the device is missing or not supported, and ModelError if the
    parameters are on several devices."""
    if requested is not None:
        return own_device(requested, report)
    found = {p.device for p in model.parameters()} - {torch.device("meta")}
    if len(found) > 1:
        raise ModelError(
            f"the model's parameters are on several devices, {sorted(map(str, found))}",
            hint="move the model to one device",
        )
    device = next(iter(found), torch.device("cpu"))
    if line := idle_accelerator(device):
        report(line)
    return own_device(device, report)


def idle_accelerator(device: torch.device) -> str:
    """Return a warning if the model computes on the CPU of a host with an accelerator, else ""."""
    if device.type != "cpu" or not torch.accelerator.is_available():
        return ""
    kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    return (
        f"the model computes on the CPU, but this host has {count} {kind} device(s): place(...,"
        " device='cuda') or model.to('cuda') uses them, device='cpu' turns this warning off"
    )


class HostBuffer:
    """Host memory with a copy on the device. `view`: page-aligned host bytes. `tensor`: uint8
    tensor on the device; on the CPU, `tensor` and `view` are the same memory."""

    # one copy stream per device, created with its first buffer
    _copy_streams: dict[torch.device, Any] = {}

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.view = Buffer(nbytes).view
        self.nbytes = len(self.view)
        self._host = torch.frombuffer(self.view, dtype=torch.uint8)
        self._device, self._cuda = device, device.type == "cuda"
        self._copied: Any = None  # event after the last copy on the copy stream
        self._used: Any = None  # event after the last compute that reads `tensor`
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
        self.record_use()  # torch may reuse freed memory that queued kernels still read

    def wait_unused(self) -> None:
        """Wait until the last copy to the device has read the host memory, which may then be
        overwritten. Must not be called with a lock held."""
        if self._copied is not None:
            self._copied.synchronize()

    def copying(self) -> Any:
        """Return the event that marks the end of the running copy from host to device, or None if
        none is running."""
        return None if self._copied is None or self._copied.query() else self._copied

    def to_device(self, nbytes: int) -> None:
        """Start a copy of the first `nbytes` bytes to the device, after the last recorded use of
        `tensor`."""
        if self._cuda and nbytes:
            stream = HostBuffer._copy_streams[self._device]
            if self._used is not None:
                stream.wait_event(self._used)
            with torch.cuda.stream(stream):
                self.tensor[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(stream)

    def copy_rate(self) -> float:
        """Measure the copy rate from host to device, in bytes per second; infinite on the CPU."""
        if not self._cuda:
            return math.inf
        self.wait_unused()
        start = time.perf_counter()
        self.to_device(self.nbytes)
        self.wait_unused()
        return self.nbytes / (time.perf_counter() - start)

    def on_device(self) -> torch.Tensor:
        """Return `tensor`, and make the caller's stream wait for the last copy to the device."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self.tensor

    def record_use(self) -> None:
        """Record that the caller's stream contains all reads of `tensor`. The next copy to the
        device waits for these reads."""
        if self._cuda:
            self._used = torch.cuda.Event()
            self._used.record(torch.cuda.current_stream(self._device))

    def from_device(self, nbytes: int) -> Any:
        """Start a copy of the first `nbytes` bytes from the device, after all work on the caller's
        stream. Returns an event to wait for before the host memory is read; None on the CPU."""
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
        del self._host, self.tensor, self.view  # the memory is freed with its last view


class CopyCallbacks:
    """A thread that waits for events of a device, in order, and runs a callback after each event.
    Code that holds a lock thus need not wait. `failed` is called with any exception of the
    thread."""

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
