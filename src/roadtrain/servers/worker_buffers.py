"""The buffers for a worker's parameters and gradients. The key of a slot or a gradient buffer is
its number, and any other buffer is its own key.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from roadtrain.chunks import PAGE
from roadtrain.device.copies import HostBuffer
from roadtrain.options.budgets import WorkerBudgets
from roadtrain.servers.protocol.worker import WorkerSetup


class WorkerBuffers:
    """The buffers of one worker."""

    def __init__(self, setup: WorkerSetup, budgets: WorkerBudgets, device: torch.device) -> None:
        root = setup.table.blocks[0]
        self.slots = [HostBuffer(budgets.slot_bytes, device) for _ in range(setup.slots)]
        self.gradients = [HostBuffer(budgets.push_bytes, device) for _ in range(setup.buffers)]
        self.root = HostBuffer(max(root.pull_nbytes, PAGE), device)
        self.root_gradient = HostBuffer(max(root.push_nbytes, PAGE), device)
        self.residuals: dict[int, HostBuffer] = {}  # permanent buffers, by residual block

    def __iter__(self) -> Any:
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

    def with_gradient(self, flat: torch.Tensor) -> HostBuffer:
        """Return the buffer whose tensor is `flat`."""
        pooled = [self.root_gradient, *self.gradients]
        return next(host for host in pooled if host.tensor.data_ptr() == flat.data_ptr())

    def residual(self, block: int, nbytes: int) -> HostBuffer:
        if block not in self.residuals:
            self.residuals[block] = HostBuffer(nbytes, torch.device("cpu"))
        return self.residuals[block]
