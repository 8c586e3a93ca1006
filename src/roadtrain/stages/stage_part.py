"""StagePart: a segment (consecutive blocks) of the model as a function of the tensors that cross
the cut before it. It keeps the tensors of each micro-batch from its forward to its backward. Does
NOT decide the order of forwards and backwards (protocol/pipeline.py).

The number of micro-batches in flight is limited, and later micro-batches reuse the receive buffers
of earlier ones (Rule 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roadtrain.errors import ModelError
from roadtrain.stages.cuts import Segment
from roadtrain.stages.protocol.pipeline import FORWARD
from roadtrain.stages.stage_model import MicroBatch, RandomStart, StageModel
from roadtrain.streaming.leaves import distinct, flatten

LossFunction = Callable[[Any, MicroBatch], torch.Tensor]  # (the model's result, batch) -> a scalar


@dataclass
class _Slot:
    """The buffers and results of one micro-batch. A later micro-batch reuses the buffers."""

    arriving: list[torch.Tensor]  # buffers for the tensors that cross the cut before the segment
    gradients: list[torch.Tensor]  # buffers for the gradients of results that require them
    # results of the forward, with their graph, until the backward
    results: Sequence[torch.Tensor] = ()


class StagePart:
    """A segment (consecutive blocks) of the stage, with the micro-batches in flight.

    wire_dtype: the dtype in which wider activations and their gradients are sent; None: unchanged.
    A dtype of 16 bits is lossy, so only the user may choose it (Rule 2). slots: the number of
    micro-batches that are held at once.
    """

    def __init__(
        self,
        stage_model: StageModel,
        segment: Segment,
        loss: LossFunction,
        wire_dtype: torch.dtype | None = None,
        slots: int = 1,
    ) -> None:
        self._stage_model, self.segment = stage_model, segment
        self._loss, self._wire_dtype = loss, wire_dtype
        cuts = stage_model.cuts
        self.is_last = segment.stop == len(cuts.blocks)
        self._last = cuts.blocks[segment.stop - 1]
        self._arrives = cuts.crossing(segment.begin) if segment.begin else ()
        self._leaves = () if self.is_last else cuts.crossing(segment.stop)
        own = (stage_model.whole[name] for name in cuts.parameters(segment))
        # whether the segment's results must have gradients
        self._trains = segment.begin > 0 or any(p.requires_grad for p in own)
        if not self.is_last:
            self._trains = self._trains and any(x.requires_grad for x in self._leaves)
        self._free = [
            _Slot(
                [self._buffer(x).requires_grad_(x.requires_grad) for x in self._arrives],
                [self._buffer(x) for x in self._leaves if x.requires_grad],
            )
            for _ in range(slots)
        ]
        self._held: dict[int, _Slot] = {}  # micro-batch -> its slot

    @property
    def message_nbytes(self) -> int:
        """The size in bytes of a micro-batch's larger message: that into the segment, or that out
        of it."""
        slot = self._free[0]
        leaving = (self._buffer(x, "meta") for x in self._leaves)
        return max(sum(x.nbytes for x in many) for many in (slot.arriving, leaving))

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def holds(self, micro: int) -> bool:
        return micro in self._held

    def buffers(self, what: str, micro: int) -> list[torch.Tensor]:
        """Reserve a slot for a micro-batch, and return its receive buffers: for `what` FORWARD, for
        the tensors that cross the cut before the segment; for BACKWARD, for the gradients of the
        results that require gradients."""
        slot = self._slot(micro)
        return slot.arriving if what == FORWARD else slot.gradients

    def run_forward(
        self, micro: int, batch: MicroBatch, random: RandomStart | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Run the forward. Return the loss if this is the last segment of the model, otherwise the
        tensors that cross the cut after the segment. random: the seeds of random numbers; None:
        torch is not seeded."""
        slot = self._slot(micro)
        own = [x.to(shape.dtype) for x, shape in zip(slot.arriving, self._arrives, strict=True)]
        ended, value = self._stage_model.run(self.segment, own, batch, random)
        if ended:
            loss = self._loss(value, batch)
            self._check_gradient([loss], "the loss")
            return loss
        tensors, _ = distinct(flatten(value)[0])
        self._check_shapes(tensors)
        self._check_gradient(tensors, f"the result of block {self._last!r}")
        slot.results = [x.to(self._on_wire(x.dtype)) for x in tensors]
        return [x.detach() for x in slot.results]

    def run_backward(self, micro: int, loss: torch.Tensor | None) -> list[torch.Tensor]:
        """Run the backward, and free the slot. Return the gradients of the tensors that crossed the
        cut before the segment. loss: the micro-batch's loss on the last segment of the model,
        otherwise None."""
        slot = self._held.pop(micro)
        if loss is None:
            leaving = zip(slot.results, self._leaves, strict=True)
            results = [x for x, shape in leaving if shape.requires_grad]
            pairs = list(zip(results, slot.gradients, strict=True))
        else:
            pairs = [(loss, torch.ones_like(loss))]
        if pairs := [(x, gradient) for x, gradient in pairs if x.requires_grad]:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
        found = []
        for x in slot.arriving:
            if x.requires_grad:
                found.append(torch.zeros_like(x) if x.grad is None else x.grad)
                x.grad = None
        slot.results = ()
        self._free.append(slot)
        return found

    def drop(self) -> None:
        """Discard all micro-batches in flight."""
        for slot in self._held.values():
            slot.results = ()
        self._free += self._held.values()
        self._held.clear()

    def _slot(self, micro: int) -> _Slot:
        if micro not in self._held:
            self._held[micro] = self._free.pop()
        return self._held[micro]

    def _buffer(self, x: torch.Tensor, device: str | None = None) -> torch.Tensor:
        return torch.empty(
            x.shape, dtype=self._on_wire(x.dtype), device=device or self._stage_model.device
        )

    def _on_wire(self, dtype: torch.dtype) -> torch.dtype:
        wire = self._wire_dtype
        if wire is None or not dtype.is_floating_point or dtype.itemsize <= wire.itemsize:
            return dtype
        return wire

    def _check_shapes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ModelError if `tensors`, results of a micro-batch, differ in shape or dtype from
        the results of the example micro-batch. The next stage's buffers fit no other shapes."""
        found, recorded = (
            ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in many)
            for many in (tensors, self._leaves)
        )
        if found != recorded:
            raise ModelError(
                f"block {self._last!r} returned {found}, but {recorded} for the example batch",
                hint="use micro-batches of the example's shapes, and a dtype in the options instead"
                " of autocast",
            )

    def _check_gradient(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Raise ModelError if the segment has parameters to train, but none of `tensors` requires a
        gradient. what: a name for `tensors` in the message."""
        if torch.is_grad_enabled() and self._trains and not any(x.requires_grad for x in tensors):
            raise ModelError(
                f"{what} has no gradient: {self.segment} would not be trained",
                hint="use checkpointing with use_reentrant=False, and no detach() or no_grad()",
            )


def own_loss(result: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the loss that the model itself has computed: `result.loss`, or `result` if it is a
    scalar tensor. Raises ModelError if there is no loss."""
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, torch.Tensor) and result.dim() == 0:
        loss = result
    if not isinstance(loss, torch.Tensor):
        raise ModelError(
            f"the model returned a {type(result).__name__} without a loss",
            hint="pass parallelize(loss=...), a function of the result and the micro-batch",
        )
    return loss
