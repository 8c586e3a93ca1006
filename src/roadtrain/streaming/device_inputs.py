"""DeviceInputs: the kept block inputs that are in device memory, and their copies to host memory
and back. Activations decides what is copied.

A tensor that is being copied to the host stays in device memory until the copy is complete. A
tensor that is copied back is allocated on the caller's stream, because torch gives freed memory
only to work of the stream that allocated it.
"""

from __future__ import annotations

from typing import Any

import torch

from roadtrain.chunks import PAGE
from roadtrain.device.accelerator import Accelerator, HostBuffer
from roadtrain.units import round_up


class DeviceInput:
    """A kept tensor of a device.

    Attributes:
        form: A tensor on the meta device with the shape, strides and dtype.
        stream: The stream whose work uses `tensor`.
        tensor: The values in device memory; None if they are only in host memory.
        host: The host memory of the values; None if they are only in device memory.
        came_back: Whether `tensor` is a copy of `host`.
    """

    def __init__(self, tensor: torch.Tensor, stream: Any) -> None:
        self.form = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        self.stream = stream
        self.tensor: torch.Tensor | None = tensor
        self.host: HostBuffer | None = None
        self.came_back = False

    def host_bytes(self) -> torch.Tensor:
        """Return the bytes in host memory, as a uint8 tensor."""
        assert self.host is not None
        return self.host.tensor[: self.form.nbytes]

    def wait(self) -> None:
        """Wait until no copy uses the host memory."""
        assert self.host is not None
        self.host.wait()

    def host_tensor(self) -> torch.Tensor:
        """Return a view of `host` with the shape and dtype of the tensor, and with its strides if
        there are no gaps between the elements."""
        form = self.form
        flat = self.host_bytes().view(form.dtype)
        steps = zip(form.shape, form.stride())
        if form.numel() == 1 + sum((size - 1) * stride for size, stride in steps):
            return flat.as_strided(form.shape, form.stride())
        return flat.view(form.shape)


class DeviceInputs:
    """The kept block inputs of one session on a device. Not thread-safe.

    Args:
        accelerator: The device.
        budget_bytes: Device memory for kept tensors.

    Attributes:
        held: Bytes of device memory in use.
    """

    def __init__(self, accelerator: Accelerator, budget_bytes: int) -> None:
        self.accelerator, self.budget_bytes = accelerator, budget_bytes
        self.held = 0
        self._spare: list[HostBuffer] = []  # host memory that no kept tensor uses

    def fits(self, nbytes: int) -> bool:
        return self.held + nbytes <= self.budget_bytes

    def keep(self, tensor: torch.Tensor) -> DeviceInput:
        self._count(tensor.nbytes)
        return DeviceInput(tensor, self.accelerator.current())

    # copies

    def copy_out(self, kept: DeviceInput, host_bytes: int) -> torch.Tensor:
        """Start a copy of the values to host memory, and return the host tensor. For `host_bytes`
        see `take_host`."""
        assert kept.tensor is not None
        self.take_host(kept, host_bytes)
        assert kept.host is not None
        data = kept.host_tensor()
        with kept.host.copies_on(self.accelerator.out):
            data.copy_(kept.tensor, non_blocking=True)
        return data

    def leaving(self, kept: DeviceInput) -> Any:
        """Return the event after the running copy to host memory, or None if none is running. If
        the copy is complete, the device tensor is dropped."""
        if kept.host is None or kept.tensor is None or kept.came_back:
            return None
        if (copying := kept.host.copying()) is None:
            self._drop(kept)
        return copying

    def copy_in(self, kept: DeviceInput) -> None:
        """Start a copy of the host tensor to a new device tensor."""
        assert kept.host is not None and kept.tensor is None
        form, kept.stream = kept.form, self.accelerator.current()
        kept.tensor = torch.empty_strided(
            form.shape, form.stride(), dtype=form.dtype, device=self.accelerator.device
        )
        # torch may give out memory that queued kernels of the caller's stream still use
        with kept.host.copies_on(self.accelerator.into):
            kept.tensor.copy_(kept.host_tensor(), non_blocking=True)
        kept.came_back = True
        self._count(kept.tensor.nbytes)

    def take(self, kept: DeviceInput) -> torch.Tensor:
        """Return the device tensor that `copy_in` made, which is then no longer kept. The caller's
        stream waits for the copy."""
        assert kept.tensor is not None and kept.host is not None
        tensor = kept.tensor
        self.accelerator.current().wait_event(kept.host.copied)
        self._drop(kept)
        return tensor

    def forget(self, kept: DeviceInput) -> None:
        """Drop the values, on the device and on the host."""
        if kept.tensor is not None:
            self.drop_tensor(kept)
        self.drop_host(kept)

    def drop_tensor(self, kept: DeviceInput) -> None:
        """Drop the device tensor. The next user of its memory waits for running copies."""
        if kept.host is not None:
            kept.stream.wait_event(kept.host.copied)
        self._drop(kept)

    def _drop(self, kept: DeviceInput) -> None:
        assert kept.tensor is not None
        self._count(-kept.tensor.nbytes)
        kept.tensor, kept.came_back = None, False

    def _count(self, nbytes: int) -> None:
        self.accelerator.count(nbytes)
        self.held += nbytes

    # host memory

    def take_host(self, kept: DeviceInput, host_bytes: int) -> None:
        """Set `kept.host`. Copies of the old contents may still be running. Keeps at most
        `host_bytes` bytes in this buffer and those that are not in use, if possible."""
        size = round_up(kept.form.nbytes, PAGE)
        same = [host for host in self._spare if host.nbytes == size]
        if same:
            self._spare.remove(same[0])
            kept.host = same[0]
            return
        for host in [host for host in self._spare if host.copying() is None]:
            if sum(spare.nbytes for spare in self._spare) + size <= host_bytes:
                break
            self._spare.remove(host)
            host.close()
        kept.host = HostBuffer(size, self.accelerator)

    def drop_host(self, kept: DeviceInput) -> None:
        if kept.host is not None:
            self._spare.append(kept.host)
            kept.host = None

    def close(self) -> None:
        while self._spare:
            self._spare.pop().close()
