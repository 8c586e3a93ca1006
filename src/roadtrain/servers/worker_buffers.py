"""The buffers for a worker's parameters and gradients. The key of a slot or a gradient buffer is
its number, and any other buffer is its own key.

On a device, blocks use device buffers, of which a few are enough, and host buffers hold what moves
between device and servers. On the CPU, blocks use the host buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from roadtrain.chunks import PAGE
from roadtrain.device.accelerator import Accelerator, DeviceBuffer, HostBuffer, accelerator_of
from roadtrain.options.budgets import DEVICE_GRADIENTS, DeviceBudgets, WorkerBudgets
from roadtrain.servers.protocol.worker import WorkerSetup


class WorkerBuffers:
    """The buffers of one worker.

    `on_device`: the device buffers; None on the CPU.
    """

    def __init__(self, setup: WorkerSetup, budgets: WorkerBudgets, device: torch.device) -> None:
        root = setup.table.blocks[0]
        pull_bytes, push_bytes = max(root.pull_nbytes, PAGE), max(root.push_nbytes, PAGE)
        accelerator = accelerator_of(device)
        self.slots = [HostBuffer(budgets.slot_bytes, accelerator) for _ in range(setup.slots)]
        self.gradients = [HostBuffer(budgets.push_bytes, accelerator) for _ in range(setup.buffers)]
        self.root = HostBuffer(pull_bytes, accelerator)
        self.root_gradient = HostBuffer(push_bytes, accelerator)
        self.residuals: dict[int, HostBuffer] = {}  # permanent buffers, by residual block
        self.on_device: DeviceBuffers | None = None
        if accelerator is not None:
            assert budgets.device is not None
            self.on_device = DeviceBuffers(accelerator, budgets.device, pull_bytes)

    def __iter__(self) -> Iterator[HostBuffer]:
        yield from (*self.slots, *self.gradients, self.root, self.root_gradient)
        yield from self.residuals.values()

    def slot(self, target: Any) -> HostBuffer:
        """Return the buffer with the key `target`, for the parameters of a pull."""
        return self.slots[target] if isinstance(target, int) else target

    def gradient(self, key: Any) -> HostBuffer:
        return self.gradients[key] if isinstance(key, int) else key

    def key(self, host: HostBuffer) -> Hashable:
        """Return the key of a buffer for gradients."""
        return self.gradients.index(host) if host in self.gradients else host

    def residual(self, block: int, nbytes: int) -> HostBuffer:
        if block not in self.residuals:
            self.residuals[block] = HostBuffer(nbytes)
        return self.residuals[block]

    def close(self) -> None:
        for buffer in self:
            buffer.close()
        if self.on_device is not None:
            self.on_device.close()


class DeviceBuffers:
    """The device memory of one worker. `gradients` are used in turn."""

    def __init__(
        self,
        accelerator: Accelerator,
        budgets: DeviceBudgets,
        root_bytes: int,
    ) -> None:
        self.accelerator, self._budget = accelerator, budgets.total
        accelerator.budgets.append(self._budget)
        self.slots = [DeviceBuffer(budgets.slot_bytes, accelerator) for _ in range(budgets.slots)]
        self.gradients = [
            DeviceBuffer(budgets.gradient_bytes, accelerator) for _ in range(DEVICE_GRADIENTS)
        ]
        self.root = DeviceBuffer(root_bytes, accelerator)
        self._turn = itertools.cycle(self.gradients)

    def next_gradient(self) -> DeviceBuffer:
        """Return the buffer for a gradient whose last use is the longest ago."""
        return next(self._turn)

    def close(self) -> None:
        for buffer in (*self.slots, *self.gradients, self.root):
            buffer.close()
        self.accelerator.budgets.remove(self._budget)
