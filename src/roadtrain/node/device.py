"""HostBuffer: bytes that a server writes or reads, and their twin on the compute device.

On the CPU the two are the same memory. On CUDA the host side is registered as pinned memory of exactly its size
(torch's pinned allocator rounds up to powers of two), copies run on one side stream, and events order them against
compute.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from roadtrain.store.buffers import Buffer


class HostBuffer:
    """`view`: host bytes, page-aligned. `tensor`: uint8 on the compute device. On CPU `tensor` is `view`."""

    _copy_stream: Any = None  # one side stream a process, made at the first CUDA buffer

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.view = Buffer(nbytes).view
        self.nbytes = len(self.view)
        self.pending = 0  # chunks that servers have yet to write or read; counted by its owner
        self._host = torch.frombuffer(self.view, dtype=torch.uint8)
        self._cuda = device.type == "cuda"
        self._copied: Any = None  # event: the last copy on the side stream
        self._used: Any = None  # event: the last compute that reads `tensor`
        if self._cuda:
            cudart: Any = torch.cuda.cudart()
            code = cudart.cudaHostRegister(self._host.data_ptr(), self.nbytes, 0)
            if int(code) != 0:
                raise RuntimeError(f"cudaHostRegister of {self.nbytes} bytes failed with code {int(code)}")
            self.tensor = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            if HostBuffer._copy_stream is None:
                HostBuffer._copy_stream = torch.cuda.Stream(device)
        else:
            self.tensor = self._host

    def wait_unused(self) -> None:
        """Before the host side is written: the last copy to the device must have read it."""
        if self._copied is not None:
            self._copied.synchronize()

    def to_device(self, nbytes: int) -> None:
        """Host -> device on the side stream, after the last compute that used the device side."""
        if self._cuda and nbytes:
            stream = HostBuffer._copy_stream
            if self._used is not None:
                stream.wait_event(self._used)
            with torch.cuda.stream(stream):
                self.tensor[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(stream)

    def copy_rate(self) -> float:
        """Bytes a second from host to device, measured now; infinite where the two sides are one."""
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
            torch.cuda.current_stream().wait_event(self._copied)
        return self.tensor

    def record_use(self) -> None:
        """The caller's stream has launched its last read of the device side."""
        if self._cuda:
            self._used = torch.cuda.Event()
            self._used.record(torch.cuda.current_stream())

    def from_device(self, nbytes: int) -> Any:
        """Device -> host on the side stream, after what the caller's stream has launched. Returns an event to
        synchronise on before the host side is read, None where the two sides are one."""
        if not self._cuda:
            return None
        stream = HostBuffer._copy_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host[:nbytes].copy_(self.tensor[:nbytes], non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done

    def close(self) -> None:
        if self._cuda:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self._host.data_ptr())
        del self._host, self.tensor, self.view  # the memory goes with the last view of it
