"""Activations: keeps the inputs of blocks from the forward to the backward, in host memory up to a
byte budget, and in a scratch file beyond the budget.

A kept tensor of n bytes uses this much of the budget:
    HERE     n bytes: the tensor is in host memory. A CPU tensor is kept by reference. A CUDA tensor
             is copied to pinned memory, and is itself kept until the copy is complete.
    LEAVING  n bytes: the tensor is being written to the scratch file
    AWAY     0 bytes: the tensor is in the file
    COMING   n bytes: the tensor is being read from the file

The oldest tensors are written first, because backward needs the newest first. Kept tensors must not
be changed in place: loading a tensor that was changed raises ModelError. Does NOT keep the autograd
graph of a tensor.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from roadtrain.chunks import PAGE
from roadtrain.errors import BudgetError, DamagedError, FullError, GoneError, ModelError, StoreError
from roadtrain.units import round_up, show_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SMALL = 64 << 10  # bytes; smaller tensors are not written, because the effort would be too high
HERE, LEAVING, AWAY, COMING, FREED = "here", "leaving", "away", "coming", "gone"


class KeptTensor:
    """A kept tensor, returned by `Activations.save` as a ticket for `load` and `free`.

    `users` is the number of calls of `save` that returned this object, minus the number of calls of
    `free`. The lock of Activations guards all fields.
    """

    def __init__(self, tensor: torch.Tensor, serial: int) -> None:
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.nbytes = min(tensor.nbytes, tensor.untyped_storage().nbytes())
        self.movable = tensor.nbytes >= SMALL and 0 not in self.stride
        self.serial, self.users, self.state, self.at = serial, 1, HERE, -1
        self.sum = 0  # xxh3 of the tensor's bytes in the file
        self.data: torch.Tensor | None = None  # the values on the CPU; None while AWAY
        # the saved tensor, as long as it must not change
        self.source: torch.Tensor | None = None
        self.version, self.was_changed = version_of(tensor), False
        self.event: Any = None  # torch.cuda.Event of the device-to-host copy

    def let_go(self) -> None:
        """Drop the reference to the saved tensor, which may then be changed in place."""
        self.was_changed = self.is_changed()
        self.source = None

    def is_changed(self) -> bool:
        return self.was_changed or (
            self.source is not None and version_of(self.source) != self.version
        )


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's count of in-place changes of `tensor`, or -1 for a tensor created under
    inference_mode."""
    return -1 if tensor.is_inference() else tensor._version


class Activations:
    """The kept block inputs.

    Args:
        budget_bytes: Host memory for kept tensors in bytes.
        scratch_dir: Directory of the scratch file. If None, a tensor beyond the budget raises
            BudgetError.
        device: The device of the blocks.

    Attributes:
        bytes_held: Host memory in use in bytes.
        peak_bytes: The maximum of `bytes_held` so far.
        bytes_spilled: Total number of bytes written to the scratch file.
    """

    def __init__(
        self,
        budget_bytes: int,
        scratch_dir: str | os.PathLike[str] | None,
        device: torch.device | str,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.device = torch.device(device)
        self.bytes_held = self.peak_bytes = self.bytes_spilled = 0
        # free() never blocks on the lock, because the garbage collector may call it anywhere
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._dead: deque[KeptTensor] = deque()  # tickets of `free` that `_sweep` has not handled
        self._live: dict[int, KeptTensor] = {}  # serial -> ticket with users > 0, oldest first
        # id(tensor) -> (the tensor, its ticket), while both exist
        self._shared: dict[int, tuple[weakref.ref[torch.Tensor], KeptTensor]] = {}
        self._jobs: deque[KeptTensor] = deque()  # tickets to write (LEAVING) or to read (COMING)
        self._serial = 0
        self._file: Any = None
        self._end = 0  # size of the scratch file, including free regions
        self._holes: dict[int, list[int]] = {}  # size -> offsets of free regions in the file
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._needed = 0  # size of the tensor whose write or read has failed
        self._closed = False
        # device of a kept tensor -> stream for its copies
        self._streams: dict[torch.device, Any] = {}

    # -- save, load, free

    def save(self, tensor: torch.Tensor) -> KeptTensor:
        """Keep `tensor`, and wait until it fits in the budget. Raises BudgetError if it cannot fit,
        and FullError if the scratch disk is full."""
        with self._lock:
            self._sweep()
            shared = self._shared.get(id(tensor))
            if (
                shared is not None
                and shared[0]() is tensor
                and shared[1].version == version_of(tensor)
            ):
                shared[1].users += 1
                return shared[1]
            ticket = KeptTensor(tensor, self._serial)
            self._serial += 1
            if ticket.movable:
                self._make_room(ticket.nbytes)
            self._take(tensor.detach(), ticket)
            self._live[ticket.serial] = ticket
            self._shared[id(tensor)] = (weakref.ref(tensor), ticket)
            self._count(ticket.nbytes)
            # write early: the next tensor probably has the same size
            if ticket.movable and self.scratch_dir is not None:
                self._send_away(self.bytes_held + ticket.nbytes - self.budget_bytes)
            return ticket

    def load(self, ticket: KeptTensor) -> torch.Tensor:
        """Return the values of the tensor that was saved, on the device of that tensor. The values
        must not be changed. The ticket stays valid until it is freed."""
        with self._lock:
            self._sweep()
            self._check_failure()
            assert ticket.users > 0, "the ticket was freed"
            if ticket.state == AWAY:
                self._ask(ticket, COMING)
            while ticket.state == COMING:
                self._wait("reading a block input back")
            copied = ticket.event
        if copied is not None:
            copied.synchronize()  # without the lock, so other threads can save and free meanwhile
        with self._lock:
            self._settle(ticket)
            if ticket.is_changed():
                raise ModelError(
                    f"an input of the block, of shape {tuple(ticket.shape)}, was changed in place"
                    " between forward and backward",
                    hint="change a copy of the input instead (x = x + y instead of x += y)",
                )
            data = ticket.data
            assert data is not None
            self._read_ahead(ticket)
        return data if data.device.type == ticket.device.type else self._to_device(ticket, data)

    def free(self, ticket: KeptTensor) -> None:
        """Undo one `save` that returned this ticket. May be called by a finalizer."""
        self._dead.append(ticket)
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Drop all kept tensors, end the thread and close the file."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._sweep()
            for ticket in self._live.values():
                ticket.data = ticket.source = None
                ticket.state = FREED
            self._live.clear()
            self._shared.clear()
            self.bytes_held = 0
            if self._file is not None:
                self._file.close()

    def check(self) -> None:
        """Assert the invariants of the class."""
        with self._lock:
            self._sweep()
            held = [t for t in self._live.values() if t.state in (HERE, LEAVING, COMING)]
            assert self.bytes_held == sum(t.nbytes for t in held)
            assert all(t.users > 0 or t.state in (LEAVING, COMING) for t in self._live.values())
            assert list(self._live) == sorted(self._live)

    # -- under the lock

    def _sweep(self) -> None:
        while self._dead:
            ticket = self._dead.popleft()
            ticket.users -= 1
            if ticket.users == 0 and ticket.state in (HERE, AWAY):
                self._forget(ticket)
        for key in [k for k, (ref, t) in self._shared.items() if ref() is None or t.users == 0]:
            del self._shared[key]

    def _forget(self, ticket: KeptTensor) -> None:
        del self._live[ticket.serial]
        if ticket.state == HERE:
            self.bytes_held -= ticket.nbytes
        if ticket.at >= 0:
            self._holes.setdefault(round_up(ticket.nbytes, PAGE), []).append(ticket.at)
        ticket.data = ticket.source = ticket.event = None
        ticket.state = FREED
        self._changed.notify_all()

    def _count(self, nbytes: int) -> None:
        self.bytes_held += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_held)

    def _take(self, tensor: torch.Tensor, ticket: KeptTensor) -> None:
        ticket.source = tensor
        if tensor.device.type != "cuda" or not ticket.movable:
            ticket.data = tensor
            return
        stream = self._stream_of(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            ticket.data = torch.empty_strided(
                ticket.shape, ticket.stride, dtype=ticket.dtype, pin_memory=True
            )
            ticket.data.copy_(tensor, non_blocking=True)
            ticket.event = stream.record_event()
        for other in list(self._live.values()):  # drop device tensors whose copies are complete
            if other.event is not None and other.event.query():
                self._settle(other)

    def _stream_of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _settle(self, ticket: KeptTensor) -> None:
        """Drop the reference to the saved device tensor. Called when the copy to host memory is
        complete."""
        if ticket.event is None:
            return
        ticket.event = None
        ticket.let_go()

    def _make_room(self, nbytes: int) -> None:
        """Wait until a tensor of `nbytes` fits in the budget, or until no kept tensor can be
        written to the file."""
        while (over := self.bytes_held + nbytes - self.budget_bytes) > 0:
            self._check_failure()
            if self.scratch_dir is None:
                raise BudgetError(
                    f"block inputs need {show_bytes(self.bytes_held + nbytes)} of host memory, but"
                    f" the activation budget is {show_bytes(self.budget_bytes)}",
                    hint=f"raise the activation budget by {show_bytes(over)}, set a scratch"
                    " directory, or use a smaller batch",
                )
            self._send_away(over)
            if not any(t.state in (LEAVING, COMING) for t in self._live.values()):
                return
            self._wait("writing block inputs")

    def _send_away(self, nbytes: int) -> None:
        nbytes -= sum(t.nbytes for t in self._live.values() if t.state == LEAVING)
        here = [t for t in self._live.values() if t.state == HERE and t.movable]
        # tensors that are inputs of several blocks are written last
        for ticket in sorted(here, key=lambda t: (t.users > 1, t.serial)):
            if nbytes <= 0:
                return
            nbytes -= ticket.nbytes
            self._ask(ticket, LEAVING)

    def _read_ahead(self, ticket: KeptTensor) -> None:
        earlier = [t for t in self._live.values() if t.serial < ticket.serial and t.state == AWAY]
        if earlier and self.bytes_held + earlier[-1].nbytes <= self.budget_bytes:
            self._ask(earlier[-1], COMING)

    def _ask(self, ticket: KeptTensor, state: str) -> None:
        """Queue the ticket for writing (LEAVING) or reading (COMING)."""
        if self._thread is None:
            self._open()
            name = "roadtrain-activations"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
        ticket.state = state
        if state == COMING:
            self._count(ticket.nbytes)
            self._jobs.appendleft(ticket)  # reads first: a caller may wait for them
        else:
            self._jobs.append(ticket)
        self._changed.notify_all()

    def _open(self) -> None:
        assert self.scratch_dir is not None
        try:
            self.scratch_dir.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.scratch_dir, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise GoneError(f"cannot make a scratch file in {self.scratch_dir}: {error}") from error

    def _wait(self, what: str) -> None:
        if not self._changed.wait(timeout=300):
            raise StoreError(f"{what} in {self.scratch_dir} made no progress for 300 s")
        self._sweep()
        self._check_failure()

    def _check_failure(self) -> None:
        if isinstance(self._failure, OSError) and self._failure.errno in _FULL:
            assert self.scratch_dir is not None
            free = shutil.disk_usage(self.scratch_dir).free
            raise FullError(
                f"no space for block inputs in {self.scratch_dir}: the next block input needs"
                f" {show_bytes(self._needed)}, but {show_bytes(free)} are free"
                f" ({self._failure.strerror}); block inputs already use {show_bytes(self._end)}",
                hint="free space on this disk, or raise host_budget to keep more inputs in RAM",
            ) from self._failure
        if self._failure is not None:
            where = f"block inputs in {self.scratch_dir}"
            raise StoreError(f"{where}: {self._failure}") from self._failure

    # -- the thread

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                ticket = self._jobs.popleft()
            try:
                (self._write if ticket.state == LEAVING else self._read)(ticket)
            except BaseException as error:
                with self._lock:
                    self._failure, self._needed = error, ticket.nbytes
                    self._changed.notify_all()
                return
            del ticket

    def _write(self, ticket: KeptTensor) -> None:
        data, copied = ticket.data, ticket.event
        assert data is not None
        if copied is not None:
            copied.synchronize()
        if ticket.users > 0 and ticket.at < 0:
            size = round_up(ticket.nbytes, PAGE)
            with self._lock:
                holes = self._holes.get(size)
                ticket.at = holes.pop() if holes else self._end
                self._end = max(self._end, ticket.at + size)
            ticket.sum = self._move(os.pwrite, data.contiguous(), ticket.at)
            self.bytes_spilled += ticket.nbytes
        with self._lock:
            self._settle(ticket)
            ticket.let_go()
            ticket.data = None
            self.bytes_held -= ticket.nbytes
            self._moved(ticket, AWAY)

    def _read(self, ticket: KeptTensor) -> None:
        pinned = ticket.device.type == "cuda"
        data = torch.empty(ticket.shape, dtype=ticket.dtype, pin_memory=pinned)
        found = self._move(lambda file, left, at: os.preadv(file, [left], at), data, ticket.at)
        if found != ticket.sum:
            raise DamagedError(
                f"{ticket.nbytes} bytes at offset {ticket.at} of the scratch file do not match"
                " their checksum"
            )
        if data.stride() != ticket.stride:  # kernels may round differently by stride (Rule 1)
            data = torch.empty_strided(
                ticket.shape, ticket.stride, dtype=ticket.dtype, pin_memory=data.is_pinned()
            ).copy_(data)
        with self._lock:
            ticket.data = data
            self._moved(ticket, HERE)

    def _move(
        self, transfer: Callable[[int, memoryview, int], int], tensor: torch.Tensor, at: int
    ) -> int:
        """Write `tensor` to the file at offset `at`, or read it from there, and return the xxh3
        hash of its bytes."""
        left = whole = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while left:
            done = transfer(self._file.fileno(), left, at)
            if done == 0:
                raise OSError(f"the scratch file ends too early, at offset {at}")
            left, at = left[done:], at + done
        return xxhash.xxh3_64_intdigest(whole)

    def _moved(self, ticket: KeptTensor, state: str) -> None:
        ticket.state = state
        if ticket.users == 0:  # freed meanwhile
            self._forget(ticket)
        self._sweep()
        self._changed.notify_all()

    def _to_device(self, ticket: KeptTensor, data: torch.Tensor) -> torch.Tensor:
        stream = self._stream_of(ticket.device)
        with torch.cuda.stream(stream):
            out = torch.empty_strided(
                ticket.shape, ticket.stride, dtype=ticket.dtype, device=ticket.device
            )
            out.copy_(data, non_blocking=True)
        current = torch.cuda.current_stream(ticket.device)
        current.wait_stream(stream)
        out.record_stream(current)
        return out
