"""EmulatedDevice: an Accelerator whose device memory is host memory, to find races without a
device.

Within `EmulatedDevice.active()`, models on the CPU compute on the emulated device:

- A copy of another stream than the compute stream ends late, in a thread of its stream, and takes
  at least as long as the rate of its direction allows. Until then, its destination is filled with
  bytes that are NaN in every floating-point dtype.
- torch's own CUDA sanitizer (torch.cuda._sanitizer, which needs no CUDA) keeps clocks of what
  happens before what, and reports accesses to device memory that no event orders.
- Host memory that changes while it is copied, and memory that is freed or no longer pinned while it
  is copied, are reported as well.

Kernels of the compute stream run at once, in the thread that launches them. If the compute stream
waits for an event, this thread waits (see `ahead` for a compute stream of its own).
"""

from __future__ import annotations

import itertools
import math
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import xxhash
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from roadtrain.device.accelerator import Accelerator, accelerators
from roadtrain.errors import BudgetError
from roadtrain.units import show_bytes

POISON = 0xFF  # in every byte, this is NaN in every floating-point dtype
CPU = torch.device("cpu")


class EmulatedDevice(Accelerator):
    """An emulated device.

    Attributes:
        races: A sentence for each race that was found.
        pinned: The sizes of pinned host memory in bytes, by address.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        late_s: float = 0.003,
        into_rate: float = math.inf,
        out_rate: float = math.inf,
        memory_bytes: int = 1 << 40,
        pinnable_bytes: int = 1 << 40,
        checked: bool = True,
        ahead: bool = False,
    ) -> None:
        """Create an emulated device.

        Args:
            seed: Seed of the random delays.
            late_s: The longest random delay of a copy, in seconds.
            into_rate: Bytes per second of copies to the device.
            out_rate: Bytes per second of copies from the device.
            memory_bytes: Device memory. Allocating more raises torch.OutOfMemoryError.
            pinnable_bytes: Host memory that the system allows to be pinned. Copies of other host
                memory are not asynchronous.
            checked: Whether races are looked for. If not, only the rates and the memory limit of a
                device are emulated.
            ahead: Whether the compute stream has a thread, too, so that the host runs ahead of it.
                Kernels of torch compute at once nevertheless; only work that is `put` in the stream
                takes time there. Only if not `checked`.
        """
        assert not (ahead and checked), "kernels that compute at once would be reported"
        self.late_s, self.memory_bytes, self.checked = late_s, memory_bytes, checked
        self.pinnable_bytes = pinnable_bytes
        self._pageable: set[int] = set()  # addresses of host memory that could not be pinned
        self.races: list[str] = []
        self._random, self._ids = random.Random(seed), itertools.count(1)
        self._lock = threading.RLock()  # guards all attributes
        self._clocks = EventHandler()
        self._names: dict[int, str] = {}  # address of tracked device memory -> its name
        self.pinned: dict[int, int] = {}  # address of pinned host memory -> its bytes
        self._pending: Counter[int] = Counter()  # address -> number of copies that have not ended
        self._local = threading.local()
        self.compute = _Stream(self, "compute", math.inf if ahead else None)
        super().__init__(CPU)
        self.into.rate, self.out.rate = into_rate, out_rate

    @contextmanager
    def active(self) -> Iterator[EmulatedDevice]:
        """Make this device the accelerator of all models on the CPU that are placed meanwhile, and
        watch the kernels of the calling thread."""
        assert CPU not in accelerators
        accelerators[CPU] = self
        try:
            with _Watch(self) if self.checked else nullcontext():
                yield self
        finally:
            del accelerators[CPU]
            for stream in {self.into, self.out, self.compute}:
                stream.end()

    # Accelerator

    def new_stream(self) -> Any:
        return _Stream(self, f"stream {next(self._ids)}", math.inf)

    def new_event(self) -> Any:
        return _Event(self)

    def current(self) -> Any:
        return getattr(self._local, "stream", self.compute)

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        try:
            with _Copies(stream):
                yield
        finally:
            self._local.stream = before

    def set_current(self) -> None:
        pass

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.held + nbytes > self.memory_bytes:
            raise torch.OutOfMemoryError(
                f"the emulated device has {show_bytes(self.memory_bytes)}, of which"
                f" {show_bytes(self.held)} are in use, and {show_bytes(nbytes)} were requested"
            )
        tensor = super().allocate(nbytes).fill_(POISON)
        with self._lock:
            self._track(tensor, f"device buffer {next(self._ids)}")
        return tensor

    def pin(self, memory: torch.Tensor) -> None:
        with self._lock:
            self.pinned[_address(memory)] = memory.nbytes
            if sum(self.pinned.values()) <= self.pinnable_bytes:
                self._pageable.discard(_address(memory))
                return
            del self.pinned[_address(memory)]
            self._pageable.add(_address(memory))
        raise BudgetError(
            f"the emulated system refused to pin {show_bytes(memory.nbytes)} of host memory: at"
            f" most {show_bytes(self.pinnable_bytes)} can be pinned",
            hint="lower host_budget",
        )

    def unpin(self, memory: torch.Tensor) -> None:
        with self._lock:
            del self.pinned[_address(memory)]
            if self._pending[_address(memory)]:
                self.races.append("host memory was unpinned while it was copied")

    def memory(self) -> tuple[int, int]:
        return self.memory_bytes - self.held, self.memory_bytes

    # accesses

    def _track(self, tensor: torch.Tensor, name: str) -> None:
        address = _address(tensor)
        if not address:
            return
        if address in self._names:  # the memory of a tensor that was freed
            self._clocks._handle_memory_deallocation(address)
        self._names[address] = name
        self._clocks._handle_memory_allocation(address)

    def allocated(self, tensor: torch.Tensor, operator: str) -> None:
        """Report the output of a kernel, which is in memory of its own."""
        with self._lock:
            self._track(tensor, f"a tensor of shape {tuple(tensor.shape)} of {operator}")
        self.accessed(self.current(), set(), self.addresses(tensor), operator)

    def accessed(self, stream: _Stream, reads: set[int], writes: set[int], operator: str) -> None:
        """Report a kernel or a copy on `stream` to the clocks. `reads` and `writes` are addresses
        of tracked memory."""
        with self._lock:
            names = {at: [self._names[at]] for at in reads | writes}
            found: Any = self._clocks._handle_kernel_launch(
                stream.number, reads - writes, writes, set(), operator, names
            )
            for race in found:
                self.races.append(
                    f"{operator} on {stream.name} and {race.previous_access.operator} access"
                    f" {self._names[race.data_ptr]} in no fixed order"
                )

    def addresses(self, *tensors: torch.Tensor) -> set[int]:
        """Return the addresses of those tensors that are in tracked device memory."""
        return {at for at in map(_address, tensors) if at in self._names}

    def begin_copy(self, stream: _Stream, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on `stream`."""
        into, source, begun = into.detach(), source.detach(), time.monotonic()
        check = self._check_copy(stream, into, source) if self.checked else _unchecked

        def copy() -> None:
            with check() as verify, torch.no_grad():
                delay = max(self._random.random() * self.late_s, source.nbytes / stream.rate)
                stream.free_at = max(begun, stream.free_at) + delay
                time.sleep(max(0.0, stream.free_at - time.monotonic()))
                verify()
                into.copy_(source)

        stream.put(copy)
        if not self._pageable.isdisjoint((_address(into), _address(source))):
            done = threading.Event()
            stream.put(done.set)
            done.wait()

    def _check_copy(
        self, stream: _Stream, into: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], AbstractContextManager[Callable[[], None]]]:
        """Poison the destination of a copy. Returns a context for the time of the copy, whose value
        is a function to call directly before the bytes are copied."""
        both, to = (_address(into), _address(source)), into.data_ptr()
        with self._lock:
            for tensor, at in zip((into, source), both):
                if at not in self.pinned and at not in self._pageable | self._names.keys():
                    self._track(tensor, f"a tensor of shape {tuple(tensor.shape)}")
            self.accessed(stream, self.addresses(source), self.addresses(into), "a copy")
            source_digest = _digest(source)
            # An earlier copy of this stream to the same memory may still be running.
            into_digest = None if to in stream.destinations else _poison(into)
            self._pending.update(both)
            stream.destinations[to] += 1

        @contextmanager
        def during() -> Iterator[Callable[[], None]]:
            digests = (into_digest or _poison(into), source_digest)

            def verify() -> None:
                for tensor, what, digest in zip((into, source), ("destination", "source"), digests):
                    if _digest(tensor) != digest:
                        self.races.append(f"the {what} of a copy changed before the copy ended")
                    if _is_freed(tensor) and _address(tensor) not in self.pinned:
                        self.races.append(f"the {what} of a copy was freed before the copy ended")

            yield verify
            with self._lock:
                self._pending.subtract(both)
                stream.destinations -= Counter([to])  # drops zeros

        return during


def _unchecked() -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, or 0 if the tensor has no memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass without memory, such as PlacedGrad
        return 0


def _is_freed(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is the only reference to its memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor and `storage`


def _poison(into: torch.Tensor) -> int:
    """Poison the destination of a copy, and return its digest."""
    with torch.no_grad(), _disable_current_modes():
        integer = POISON if into.dtype is torch.uint8 else -1
        into.fill_(math.nan if into.is_floating_point() else integer)
    return _digest(into)


def _digest(tensor: torch.Tensor) -> int:
    with torch.no_grad(), _disable_current_modes():
        flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(flat)


class _Stream:
    """A stream. The compute stream runs its work at once, all others in a thread of their own."""

    def __init__(self, device: EmulatedDevice, name: str, rate: float | None) -> None:
        self.number, self.name, self.device = next(device._ids), name, device
        self.rate, self.free_at = rate or math.inf, 0.0
        self.destinations = Counter[int]()  # addresses of the destinations of queued copies
        self._work: queue.SimpleQueue[Callable[[], object] | None] | None = None
        with device._lock:
            device._clocks._handle_stream_creation(self.number)
        if rate is not None:
            self._work = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._work,), daemon=True, name=name).start()

    def _run(self, work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while (item := work.get()) is not None:
            item()
            del item

    def put(self, work: Callable[[], object]) -> None:
        if self._work is None:
            work()
        else:
            self._work.put(work)

    def end(self) -> None:
        if self._work is not None:
            self._work.put(None)

    def wait_event(self, event: _Event) -> None:
        with self.device._lock:
            self.device._clocks._handle_event_wait(event.number, self.number)
        self.put(event.done.wait)


class _Event:
    def __init__(self, device: EmulatedDevice) -> None:
        self.device, self.number = device, next(device._ids)
        self.done = threading.Event()
        self.done.set()  # an event that was not recorded yet has happened, as in torch
        with device._lock:
            device._clocks._handle_event_creation(self.number)

    def record(self, stream: _Stream) -> None:
        self.done = done = threading.Event()
        with self.device._lock:
            self.device._clocks._handle_event_record(self.number, stream.number)
        stream.put(done.set)

    def query(self) -> bool:
        if not self.done.is_set():
            return False
        self._seen()
        return True

    def synchronize(self) -> None:
        self.done.wait()
        self._seen()

    def _seen(self) -> None:
        with self.device._lock:
            self.device._clocks._handle_event_synchronization(self.number)


class _Copies(TorchDispatchMode):
    """Within the context of a stream, copies are queued."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._stream.device.compute is not self._stream:
            self._stream.device.begin_copy(self._stream, args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Reports the accesses of the kernels of a thread."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self._device
        reads, writes = set[int](), set[int]()
        for argument, value in zip(func._schema.arguments, args):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    alias = argument.alias_info
                    written = alias is not None and alias.is_write
                    (writes if written else reads).update(device.addresses(tensor))
        is_view = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if (reads or writes) and not is_view:
            device.accessed(device.current(), reads, writes, str(func))
        out = func(*args, **kwargs)
        results = out if isinstance(out, list | tuple) else (out,)
        for result, kind in zip(results, func._schema.returns):
            if isinstance(result, torch.Tensor) and kind.alias_info is None:
                device.allocated(result, str(func))
        return out
