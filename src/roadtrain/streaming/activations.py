"""Activations: keeps the inputs of blocks from the forward to the backward, in host memory up to a
byte budget, and in a scratch file beyond the budget.

A kept tensor of n bytes uses this much of the budget:
    ON_DEVICE  0 bytes: the tensor is in the memory of a device
    HERE       n bytes: the tensor is in host memory. A CPU tensor is kept by reference. The copy of
               a tensor of a device may still be running.
    LEAVING    n bytes: the tensor is being written to the scratch file
    AWAY       0 bytes: the tensor is in the file
    COMING     n bytes: the tensor is being read from the file

Device memory has a budget of its own. The oldest tensors leave first, from the device to host
memory and from there to the file, because backward needs the newest first. Kept tensors must not be
changed in place: loading a tensor that was changed raises ModelError. Does NOT keep the autograd
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
from roadtrain.device.accelerator import accelerator_of
from roadtrain.errors import BudgetError, DamagedError, FullError, GoneError, ModelError, StoreError
from roadtrain.streaming.device_inputs import DeviceInput, DeviceInputs
from roadtrain.units import round_up, show_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SMALL = 64 << 10  # bytes; smaller tensors are not written, because the effort would be too high
ON_DEVICE, HERE, LEAVING, AWAY = "on the device", "here", "leaving", "away"
COMING, FREED = "coming", "gone"


class KeptTensor:
    """A kept tensor, returned by `Activations.save` as a ticket for `load` and `free`.

    `users` is the number of calls of `save` that returned this object, minus the number of calls of
    `free`. The lock of Activations guards all fields.
    """

    def __init__(self, tensor: torch.Tensor, serial: int) -> None:
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.dtype = tensor.dtype
        self.nbytes = min(tensor.nbytes, tensor.untyped_storage().nbytes())
        self.movable = tensor.nbytes >= SMALL and 0 not in self.stride
        self.serial, self.users, self.state, self.at = serial, 1, HERE, -1
        self.sum = 0  # xxh3 of the tensor's bytes in the file
        # the values in host memory; None while ON_DEVICE or AWAY
        self.data: torch.Tensor | None = None
        # the saved tensor, as long as it must not change
        self.source: torch.Tensor | None = None
        self.version, self.was_changed = version_of(tensor), False
        # the values on the device; None for a tensor that Activations does not copy to the host
        self.at_device: DeviceInput | None = None

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
        device_bytes: Device memory for kept tensors in bytes. Not used on the CPU.

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
        device_bytes: int = 0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.device = torch.device(device)
        accelerator = accelerator_of(self.device)
        self.on_device = None if accelerator is None else DeviceInputs(accelerator, device_bytes)
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
            # Tensors leave early: the next tensor probably has the same size.
            if ticket.movable and self.on_device is not None and tensor.device == self.device:
                self._make_device_room(self.on_device, ticket.nbytes)
                ticket.source, ticket.state = tensor.detach(), ON_DEVICE
                ticket.at_device = self.on_device.keep(ticket.source)
                self._live[ticket.serial] = ticket
                self._leave_device(self.on_device, ticket.nbytes, wait=False)
            else:
                if ticket.movable:
                    self._make_room(ticket.nbytes)
                ticket.data = ticket.source = tensor.detach()
                self._live[ticket.serial] = ticket
                self._count(ticket.nbytes)
            if ticket.movable and self.scratch_dir is not None:
                self._send_away(self.bytes_held + ticket.nbytes - self.budget_bytes)
            self._shared[id(tensor)] = (weakref.ref(tensor), ticket)
            return ticket

    def load(self, ticket: KeptTensor) -> torch.Tensor:
        """Return the values of the tensor that was saved, on the device of that tensor. The values
        must not be changed. The ticket stays valid until it is freed."""
        with self._lock:
            self._sweep()
            self._check_failure()
            assert ticket.users > 0, "the ticket was freed"
            self._wait_readable(ticket)
            if ticket.is_changed():
                raise ModelError(
                    f"an input of the block, of shape {tuple(ticket.shape)}, was changed in place"
                    " between forward and backward",
                    hint="change a copy of the input instead (x = x + y instead of x += y)",
                )
            data = ticket.data if ticket.source is None else ticket.source
            if ticket.source is None and ticket.at_device is not None:
                assert self.on_device is not None
                data = self.on_device.take(ticket.at_device)
            assert data is not None
            self._read_ahead(ticket)
            return data

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
            for ticket in [*self._live.values()]:
                self._forget(ticket)
            self._shared.clear()
            self.bytes_held = 0
            if self._file is not None:
                self._file.close()
        if self.on_device is not None:
            self.on_device.close()

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
            if ticket.users == 0 and ticket.state in (ON_DEVICE, HERE, AWAY):
                self._forget(ticket)
        for key in [k for k, (ref, t) in self._shared.items() if ref() is None or t.users == 0]:
            del self._shared[key]

    def _forget(self, ticket: KeptTensor) -> None:
        del self._live[ticket.serial]
        if ticket.state == HERE:
            self.bytes_held -= ticket.nbytes
        if ticket.at >= 0:
            self._holes.setdefault(round_up(ticket.nbytes, PAGE), []).append(ticket.at)
        ticket.data = ticket.source = None
        if ticket.at_device is not None and self.on_device is not None:
            self.on_device.forget(ticket.at_device)
        ticket.state = FREED
        self._changed.notify_all()

    def _count(self, nbytes: int) -> None:
        self.bytes_held += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_held)

    def _wait_readable(self, ticket: KeptTensor) -> None:
        """Wait until the tensor itself is there, or its values in host memory. Begins the copy to
        the device, if there is one."""
        device, kept = self.on_device, ticket.at_device
        while ticket.source is None:
            if ticket.state == AWAY:
                self._ask(ticket, COMING)
            if ticket.state == COMING:
                self._wait("reading a block input back")
            elif kept is None or device is None or kept.tensor is not None:
                return
            elif device.fits(ticket.nbytes):
                device.copy_in(kept)
            else:  # the ticket may be written to the file while this thread waits
                self._make_device_room(device, ticket.nbytes)

    def _make_device_room(self, device: DeviceInputs, nbytes: int) -> None:
        """Wait until a tensor of `nbytes` bytes fits in device memory."""
        while not device.fits(nbytes):
            event = None
            if nbytes <= device.budget_bytes:
                event = self._leave_device(device, nbytes, wait=True)
            if event is not None:
                self._lock.release()  # other threads can save and free meanwhile
                try:
                    event.synchronize()
                finally:
                    self._lock.acquire()
                continue
            for ticket in self._live.values():  # copies that have come back are not needed yet
                if ticket.at_device is not None and ticket.at_device.came_back:
                    device.drop_tensor(ticket.at_device)
            if not device.fits(nbytes):
                over = device.held + nbytes - device.budget_bytes
                raise BudgetError(
                    f"a block input needs {show_bytes(nbytes)} of device memory, but device_budget"
                    f" leaves {show_bytes(device.budget_bytes)} for block inputs",
                    hint=f"raise device_budget by {show_bytes(over)}, or use a smaller batch",
                )

    def _leave_device(self, device: DeviceInputs, nbytes: int, *, wait: bool) -> Any:
        """Copy the oldest tensors to host memory, so that `nbytes` bytes will be free on the
        device. Returns the event after the first copy that is running, or None. `wait`: whether to
        wait for room in host memory, instead of copying less."""
        events, room = [], device.budget_bytes - device.held
        for ticket in self._live.values():
            if ticket.at_device is not None and (event := self._leaving(device, ticket)):
                events.append(event)
                room += ticket.nbytes
        room = max(room, device.budget_bytes - device.held)
        here = [t for t in self._live.values() if t.state == ON_DEVICE]
        # tensors that are inputs of several blocks are copied last
        for ticket in sorted(here, key=lambda t: (t.users > 1, t.serial)):
            if room >= nbytes:
                break
            if wait:
                self._make_room(ticket.nbytes)
            elif self.bytes_held + ticket.nbytes > self.budget_bytes:
                break
            assert ticket.at_device is not None
            ticket.data = device.copy_out(ticket.at_device, self.budget_bytes - self.bytes_held)
            ticket.state = HERE
            self._count(ticket.nbytes)
            events.append(self._leaving(device, ticket))
            room += ticket.nbytes
        return next((event for event in events if event is not None), None)

    def _leaving(self, device: DeviceInputs, ticket: KeptTensor) -> Any:
        """Return the event after the running copy of the tensor to host memory, or None if no copy
        is running. Lets go of a tensor that has been copied."""
        assert ticket.at_device is not None
        event = device.leaving(ticket.at_device)
        if ticket.at_device.tensor is None:
            ticket.let_go()
        return event

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
        here = [t for t in here if t.at_device is None or not t.at_device.came_back]
        # tensors that are inputs of several blocks are written last
        for ticket in sorted(here, key=lambda t: (t.users > 1, t.serial)):
            if nbytes <= 0:
                return
            nbytes -= ticket.nbytes
            self._ask(ticket, LEAVING)

    def _read_ahead(self, ticket: KeptTensor) -> None:
        """Start to read and to copy to the device the tensors that backward needs next."""
        earlier = [t for t in self._live.values() if t.serial < ticket.serial]
        away = [t for t in earlier if t.state == AWAY]
        if away and self.bytes_held + away[-1].nbytes <= self.budget_bytes:
            self._ask(away[-1], COMING)
        here = [t.at_device for t in earlier if t.state == HERE and t.at_device is not None]
        device = self.on_device
        if device and here and here[-1].tensor is None and device.fits(here[-1].form.nbytes):
            device.copy_in(here[-1])

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
        assert ticket.data is not None
        if ticket.at_device is None:
            data = ticket.data.contiguous()
        else:
            ticket.at_device.wait()
            data = ticket.at_device.host_bytes()
        if ticket.users > 0 and ticket.at < 0:
            size = round_up(ticket.nbytes, PAGE)
            with self._lock:
                holes = self._holes.get(size)
                ticket.at = holes.pop() if holes else self._end
                self._end = max(self._end, ticket.at + size)
            ticket.sum = self._move(os.pwrite, data, ticket.at)
            self.bytes_spilled += ticket.nbytes
        with self._lock:
            if ticket.at_device is not None and self.on_device is not None:
                self._leaving(self.on_device, ticket)
                self.on_device.drop_host(ticket.at_device)
            ticket.let_go()
            ticket.data = None
            self.bytes_held -= ticket.nbytes
            self._moved(ticket, AWAY)

    def _read(self, ticket: KeptTensor) -> None:
        kept = ticket.at_device
        if kept is None:
            data = torch.empty(ticket.shape, dtype=ticket.dtype)
        else:
            with self._lock:
                assert self.on_device is not None
                room = self.budget_bytes - self.bytes_held + ticket.nbytes
                self.on_device.take_host(kept, room)
            kept.wait()
            data = kept.host_bytes()
        found = self._move(lambda file, left, at: os.preadv(file, [left], at), data, ticket.at)
        if found != ticket.sum:
            raise DamagedError(
                f"{ticket.nbytes} bytes at offset {ticket.at} of the scratch file do not match"
                " their checksum"
            )
        if kept is not None:
            data = kept.host_tensor()
        elif data.stride() != ticket.stride:  # kernels may round differently by stride (Rule 1)
            data = torch.empty_strided(ticket.shape, ticket.stride, dtype=ticket.dtype).copy_(data)
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
