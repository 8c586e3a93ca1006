"""RootBlock: the parameters that are in no other block, and their gradients.

Root parameters stay on the device. After a step, they are fetched again before their next use.
Their gradients are ordinary tensors in `p.grad`, pushed by step(), or, with several workers, after
each backward pass. The root must be block 0.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from roadtrain.chunks import ChunkTable
from roadtrain.errors import LoopError
from roadtrain.servers.worker import Worker
from roadtrain.streaming.fetched import FetchedParameters
from roadtrain.streaming.grads import PlacedGrad
from roadtrain.streaming.released import (
    check_unchanged,
    is_stale,
    set_fetched,
    set_released,
    set_stale,
)
from roadtrain.streaming.split import ModulePart


class RootBlock:
    def __init__(self, part: ModulePart, table: ChunkTable, worker: Worker) -> None:
        self.params = part.params
        self.specs = table.params[: len(part.params)]
        self.trained = [(i, p) for i, (_, p) in enumerate(part.params) if p.requires_grad]
        self.layout: FetchedParameters | None = None  # layout of the gradients, set by start()
        # With several workers: handles of this step's gradients that were pushed.
        self.handles: dict[nn.Parameter, PlacedGrad] = {}
        self._worker = worker
        self._versions: list[int] = []  # tensor versions at the last fetch

    def push_gradients(self) -> None:
        """Push the tensors in `p.grad` of all root parameters. Raises LoopError if gradients of the
        last step were not cleared."""
        grads = {
            i: p.grad
            for i, p in self.trained
            if self.specs[i].trainable and p.grad is not None and not isinstance(p.grad, PlacedGrad)
        }
        if not grads:
            return
        assert self.layout is not None
        buffer = self._worker.lay_out(0, partial(self.layout.lay_out, grads=grads))
        if self.handles and not self._worker.blocks[0].held:
            raise LoopError(
                "the root block got a gradient, but its gradient of the last step was not cleared",
                hint="call optimizer.zero_grad() once per step",
            )
        self._worker.push_block(0, buffer, list(grads), fresh=not self.handles)

    def pass_ended(self) -> None:
        """With several workers: push the gradients after a backward pass, and put handles
        (PlacedGrad) into `p.grad`."""
        self.push_gradients()
        for i, p in self.trained:
            if p.grad is not None:
                spec = self.specs[i]
                self.handles.setdefault(p, PlacedGrad(p, i, self._worker, spec.name))
            if p in self.handles:
                p.grad = self.handles[p]

    def pass_begins(self) -> None:
        """Remove the handles (PlacedGrad) from `p.grad`, so that backward creates tensors."""
        for p in self.handles:
            p.grad = None

    def refresh(self) -> None:
        """Fetch the parameters if a step has changed them."""
        if self._versions and not self._worker.root_is_old:
            return
        self.check_unchanged()
        fetched = self._worker.refresh_root()
        for _, p in self.params:
            set_fetched(p)
            if fetched:
                torch.autograd.graph.increment_version(p)
        self._versions = [p._version for _, p in self.params]

    def refresh_when_read(self) -> None:
        """Arrange that all parameters are fetched when one of them is first used."""
        for _, p in self.params:
            set_stale(p, self.refresh)

    def check_unchanged(self) -> None:
        """Raise LoopError if a parameter was modified in place since it was fetched."""
        if self._versions:
            check_unchanged(self.params, self._versions)

    def close(self) -> None:
        """Make parameters unreadable if they were not fetched since the last step."""
        for _, p in self.params:
            if is_stale(p):
                set_released(p)
