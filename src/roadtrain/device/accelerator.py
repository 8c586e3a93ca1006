"""Accelerator: the copies between host memory and one device. Works with any device of
torch.accelerator.

Copies run on two streams, one per direction, so that both directions of the bus are used at once.
A copy into a buffer waits until the work that uses the buffer is done, and work that uses a buffer
calls `ready`, which waits for the last copy. All these waits are waits of streams. Only `wait` and
the thread of AfterCopies wait for the device themselves; do not call them with a lock held.

Streams and events name their device, because the current device may differ between threads. A
device with a single stream copies on this stream. On a device without events, the host waits for
all work whenever an event is recorded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from roadtrain.device.buffers import Buffer
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.units import show_bytes

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices, not only for the current one


class _Settled(torch.Stream):
    """The stream of a device without events, and all its events. Their work has always ended."""

    def record(self, stream: Any) -> None:
        torch.accelerator.synchronize(self.device)

    def wait_event(self, event: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Accelerator:
    """The streams, events and memory of `device`. Use `accelerator_of` to get the instance of a
    device.

    Attributes:
        into: The stream of all copies to the device.
        out: The stream of all copies from the device.
        held: Bytes of device memory in buffers and kept inputs of blocks.
        peak: The maximum of `held` so far.
        budgets: The device budget of each open session.
        report: A function that is called with a sentence if host memory cannot be pinned.
        is_refused: Whether the system has refused to pin host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.held, self.peak = device, 0, 0
        self.budgets: list[int] = []
        self.report: Callable[[str], None] = print
        self.is_refused = False
        self.into, self.out = self.new_stream(), self.new_stream()

    # Streams and events of torch.cuda cannot be mixed with torch.Stream in all versions of torch.

    def new_stream(self) -> Any:
        if self.is_cuda:
            return torch.cuda.Stream(self.device)
        now = torch.accelerator.current_stream(self.device)
        try:
            torch.Event(self.device).record(now)
        except RuntimeError:  # the device has no events
            return _Settled(now.stream_id, now.device_index, now.device_type)
        try:
            return torch.Stream(self.device)
        except RuntimeError:  # the device has one stream
            return now

    def new_event(self) -> Any:
        """Return an event whose `synchronize` sleeps, where the device supports that."""
        if isinstance(self.into, _Settled):
            return self.into
        return torch.cuda.Event(blocking=True) if self.is_cuda else torch.Event(self.device)

    def current(self) -> Any:
        """Return the stream of the calling thread."""
        if isinstance(self.into, _Settled):
            return self.into
        of = torch.cuda if self.is_cuda else torch.accelerator
        return of.current_stream(self.device)

    def lacks(self) -> str:
        """Return a sentence about what the device lacks, or ""."""
        if isinstance(self.into, _Settled):
            return f"{self.device} has no events, so the host waits for every copy"
        if self.into == self.out:
            return f"{self.device} has one stream, so copies and computing take turns"
        return ""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the current stream of the calling thread."""
        if self.is_cuda:
            return torch.cuda.stream(stream)
        # A torch.Stream keeps the previous stream in itself, so threads must not share the object.
        ids = ("stream_id", "device_index", "device_type")
        return torch.Stream(**{name: getattr(stream, name) for name in ids})

    def reaches(self, event: Any, timeout_s: float) -> bool:
        """Wait until `event` has happened. Return False if that takes longer than `timeout_s`."""
        if event.query():
            return True
        happened = threading.Event()

        def wait() -> None:  # torch's waits for events have no timeout, and its queries would poll
            self.set_current()
            event.synchronize()
            happened.set()

        threading.Thread(target=wait, name="wait for the device", daemon=True).start()
        return happened.wait(timeout_s)

    def set_current(self) -> None:
        """Make this device the current device of the calling thread."""
        torch.accelerator.set_device_index(self.device.index)

    def count(self, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to `held`. Raises BudgetError if the open sessions
        would hold more than their budgets."""
        budget = sum(self.budgets)
        if nbytes > 0 and self.budgets and self.held + nbytes > budget:
            raise BudgetError(
                f"roadtrain would hold {show_bytes(self.held + nbytes)} of memory of {self.device},"
                f" but device_budget is {show_bytes(budget)}",
                hint="please report this: every buffer belongs to the budget",
            )
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def pin(self, memory: torch.Tensor) -> None:
        """Pin host memory at its exact size. Raises BudgetError if the system refuses."""
        if not self.is_cuda:
            return
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
        if code:
            raise BudgetError(
                f"the system refused to pin {show_bytes(memory.nbytes)} of host memory for"
                f" {self.device}: cudaHostRegister returned {code}",
                hint="lower host_budget, or raise the limit of locked memory (ulimit -l)",
            )

    def try_pin(self, memory: torch.Tensor) -> bool:
        """Pin host memory, and return whether the system allowed it. The first refusal is reported.
        Copies of memory that is not pinned are slower, because the driver copies them twice, and
        the caller waits for them."""
        try:
            self.pin(memory)
        except BudgetError as error:
            if not self.is_refused:
                self.report(f"copies are slower than they could be: {error}")
            self.is_refused = True
            return False
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        if self.is_cuda:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(memory.data_ptr())

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of device memory. Raises ConfigError if torch does
        not know them."""
        try:
            free, total = torch.accelerator.get_memory_info(self.device)
        except (AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"torch does not know how much memory {self.device} has", hint="set device_budget"
            ) from error
        return free, total


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's random generator as a uint8 tensor on the host."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*_of(device))
    return state


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_of(device))


def _of(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps supports one device


accelerators: dict[torch.device, Accelerator] = {}  # by device
_lock = threading.Lock()


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the Accelerator of `device`, or None for the CPU, whose memory is host memory."""
    with _lock:
        if device not in accelerators and device.type != "cpu":
            accelerators[device] = Accelerator(device)
        return accelerators.get(device)


class DeviceBuffer:
    """Memory of a device. `tensor`: its bytes, as a uint8 tensor."""

    def __init__(self, nbytes: int, accelerator: Accelerator) -> None:
        self.accelerator, self.nbytes = accelerator, nbytes
        self.tensor = accelerator.allocate(nbytes)
        accelerator.count(nbytes)
        self._copied, self._used = accelerator.new_event(), accelerator.new_event()
        self.record_use()  # torch may reuse freed memory that queued kernels still use

    def ready(self) -> torch.Tensor:
        """Return `tensor`, and make the caller's stream wait for the last copy."""
        self.accelerator.current().wait_event(self._copied)
        return self.tensor

    def record_use(self) -> None:
        """Record that the caller's stream contains all uses of `tensor`. The next copy waits for
        them."""
        self._used.record(self.accelerator.current())

    def close(self) -> None:
        self.ready()  # torch may give the memory to kernels of the caller's stream
        del self.tensor
        self.accelerator.count(-self.nbytes)


class HostBuffer:
    """Page-aligned host memory, which is pinned if `accelerator` is not None.

    Attributes:
        view: The bytes.
        nbytes: The number of bytes.
        tensor: The same memory as a uint8 tensor.
        copied: The event after the last copy, if `accelerator` is not None.
    """

    def __init__(self, nbytes: int, accelerator: Accelerator | None = None) -> None:
        self.view = Buffer(nbytes).view
        self.nbytes = len(self.view)
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        self._accelerator = accelerator
        if accelerator is not None:
            self._is_pinned = accelerator.try_pin(self.tensor)
            self.copied, self._begun = accelerator.new_event(), accelerator.new_event()

    @contextmanager
    def copies_on(self, stream: Any, after: Any = None) -> Iterator[None]:
        """While the context is active, copies from or to this memory are added to `stream`. They
        begin after the event `after`, by default after all work on the caller's stream, and after
        earlier copies of this memory."""
        assert self._accelerator is not None
        if after is None:
            after = self._begun
            after.record(self._accelerator.current())
        stream.wait_event(after)
        stream.wait_event(self.copied)
        with self._accelerator.on(stream):
            yield
        self.copied.record(stream)

    def copy_to(self, target: DeviceBuffer, nbytes: int) -> None:
        """Start a copy of the first `nbytes` bytes to `target`, after the last recorded use of
        `target`."""
        stream = target.accelerator.into
        with self.copies_on(stream, target._used):
            target.tensor[:nbytes].copy_(self.tensor[:nbytes], non_blocking=True)
        target._copied.record(stream)

    def copy_from(self, source: DeviceBuffer, nbytes: int) -> None:
        """Start a copy of the first `nbytes` bytes of `source`, after all work on the caller's
        stream."""
        stream = source.accelerator.out
        source.record_use()
        with self.copies_on(stream, source._used):
            self.tensor[:nbytes].copy_(source.tensor[:nbytes], non_blocking=True)
        source._copied.record(stream)

    def copy_from_tensor(self, source: torch.Tensor) -> Any:
        """Start to copy a flat tensor of the device, after all work on the caller's stream. Return
        the event of the copy's end, until which `source` must live and keep its values."""
        assert self._accelerator is not None
        with self.copies_on(self._accelerator.out):
            self.tensor[: source.nbytes].view(source.dtype).copy_(source, non_blocking=True)
        return self.copied

    def copy_to_tensor(self, target: torch.Tensor) -> Any:
        """Start to copy to a flat tensor that the device does not use now. Return the event of the
        copy's end, until which `target` must live."""
        assert self._accelerator is not None
        with self.copies_on(self._accelerator.into, self.copied):
            source = self.tensor[: target.nbytes].view(target.dtype)
            target.copy_(source, non_blocking=True)
        return self.copied

    def copying(self) -> Any:
        """Return the event after the running copy, or None if no copy is running."""
        if self._accelerator is None or self.copied.query():
            return None
        return self.copied

    def wait(self) -> None:
        """Wait until no copy reads or writes this memory."""
        if self._accelerator is not None:
            self.copied.synchronize()

    def close(self) -> None:
        self.wait()
        if self._accelerator is not None and self._is_pinned:
            self._accelerator.unpin(self.tensor)
        del self.tensor, self.view  # the memory is freed with its last view


class AfterCopies:
    """A thread that waits for events of a device, in order, and calls a function after each event.
    Code that holds a lock thus need not wait. `failed` is called with any exception of the
    thread."""

    def __init__(
        self, name: str, accelerator: Accelerator, failed: Callable[[BaseException], None]
    ) -> None:
        self._todo: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._accelerator, self._failed = accelerator, failed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: Any, then: Callable[[], None]) -> None:
        """Call `then` once `event` has happened, and all earlier calls have returned. `event` may
        be None."""
        self._todo.put((event, then))

    def _run(self) -> None:
        self._accelerator.set_current()
        while (item := self._todo.get()) is not None:
            event, then = item
            try:
                if event is not None:
                    event.synchronize()
                then()
            except BaseException as error:
                self._failed(error)
            del item, event, then  # they may refer to memory, which must not be kept while waiting

    def close(self) -> None:
        self._todo.put(None)
        if threading.current_thread() is not self._thread:  # it may free the last user of this
            self._thread.join()
