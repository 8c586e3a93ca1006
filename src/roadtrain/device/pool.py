"""A pool of buffers of equal size, for messages and sums."""

from __future__ import annotations

import threading

from roadtrain.device.buffers import Buffer
from roadtrain.errors import DeadlineError, LostError

POOL_S = 600.0  # timeout of waiting for a free buffer


class BufferPool:
    """A pool of buffers of equal size, allocated once. `get` waits until a buffer is free.
    Meanwhile a receiver reads no messages, so the sender slows down."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.buffers = [Buffer(nbytes) for _ in range(count)]
        self._free, self._ready, self._closed = list(self.buffers), threading.Condition(), False

    @property
    def spare(self) -> int:
        return len(self._free)

    def get(self) -> Buffer:
        with self._ready:
            there = self._ready.wait_for(lambda: self._free or self._closed, POOL_S)
            if self._closed:
                raise LostError("there is no free buffer, because the session has ended")
            if not there:
                raise DeadlineError(
                    f"all {len(self.buffers)} buffers of this pool were in use for {POOL_S:.0f} s",
                    hint="find the worker or storage device that hangs",
                )
            return self._free.pop()

    def put(self, buffer: Buffer) -> None:
        with self._ready:
            self._free.append(buffer)
            self._ready.notify()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()
