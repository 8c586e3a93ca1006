"""TorchStage: torch.distributed.pipelining's PipelineStage as we drive it. It holds a segment's
micro-batches between their forward and their backward, and the buffers that messages of the stages
beside it arrive in.

The order is `protocol.pipeline`'s, which the simulator drives too (Rule 7), and messages go where
that machine says, over a process group for each boundary and direction: so torch's schedules and
its one pipeline group are not used. As many micro-batches as the order holds at once have a slot;
buffers are used again (Rule 4).

Assumes torch 2.13: `_prepare_forward_infra` and `_prepare_backward_infra` are what torch's own
schedules call, and not public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode

from roadtrain.errors import ModelError, RoadtrainError
from roadtrain.stages.cuts import Segment
from roadtrain.stages.protocol.pipeline import FORWARD
from roadtrain.stages.stage_model import MicroBatch, RandomStart, StageModel
from roadtrain.streaming.leaves import distinct, flatten

LossFunction = Callable[[Any, MicroBatch], torch.Tensor]  # of the model's result: a scalar


class SegmentModule(nn.Module):
    """A segment as a function from what crossed the cut before it to what crosses the cut behind
    it, or to the micro-batch's loss.

    wire_dtype: what activations of wider floating dtypes travel as, and so their gradients; None:
    as they are (Rule 2: 16 bits are a choice).
    """

    def __init__(
        self,
        stage_model: StageModel,
        segment: Segment,
        loss: LossFunction,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # a list hides the model from this module's own parameters
        self._stage_model = [stage_model]
        self.segment, self._loss, self._wire_dtype = segment, loss, wire_dtype
        cuts = stage_model.cuts
        self.arrives: tuple[torch.Tensor, ...] = ()
        self.leaves: tuple[torch.Tensor, ...] = (torch.empty((), device="meta"),)  # the loss
        if segment.begin:
            self.arrives = cuts.crossing(segment.begin)
        if segment.stop < len(cuts.blocks):
            self.leaves = cuts.crossing(segment.stop)
        self._last = cuts.blocks[segment.stop - 1]
        own = (stage_model.whole[name] for name in cuts.parameters(segment))
        # whether a gradient has to come back from what leaves
        self._trains = segment.begin > 0 or any(p.requires_grad for p in own)
        if segment.stop < len(cuts.blocks):
            self._trains = self._trains and any(x.requires_grad for x in self.leaves)

    def on_wire(self, shapes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """`shapes` as they travel."""
        return tuple(
            torch.empty(
                x.shape, dtype=narrowed(x.dtype, self._wire_dtype), device="meta"
            ).requires_grad_(x.requires_grad)
            for x in shapes
        )

    def forward(
        self, *received: torch.Tensor, batch: MicroBatch, random: RandomStart | None = None
    ) -> Any:
        own = [x.to(shape.dtype) for x, shape in zip(received, self.arrives, strict=True)]
        ended, value = self._stage_model[0].run(self.segment, own, batch, random)
        if ended:
            loss = self._loss(value, batch)
            self._check_gradient([loss], "the loss")
            return loss
        tensors, _ = distinct(flatten(value)[0])
        self._check_shapes(tensors)
        self._check_gradient(tensors, f"what block {self._last!r} returned")
        return tuple(x.to(narrowed(x.dtype, self._wire_dtype)) for x in tensors)

    def _check_shapes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises ModelError for what the next stage has no buffers for."""
        told, recorded = (
            ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in many)
            for many in (tensors, self.leaves)
        )
        if told != recorded:
            raise ModelError(
                f"block {self._last!r} returned {told}, and {recorded} for the example micro-batch",
                hint="micro-batches have the example's shapes; a dtype in the options stands for"
                " autocast",
            )

    def _check_gradient(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Raises ModelError where the segment would silently not be trained."""
        if torch.is_grad_enabled() and self._trains and not any(x.requires_grad for x in tensors):
            raise ModelError(
                f"{what} has no gradient: {self.segment} would not be trained",
                hint="checkpoints with use_reentrant=False; no detach() or no_grad()",
            )


def narrowed(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """What tensors of `dtype` travel as."""
    wider = wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize
    return wire if wider and wire is not None else dtype


class TorchStage(PipelineStage):
    """One segment on this rank, with `slots` micro-batches between forward and backward."""

    def __init__(
        self,
        segment: SegmentModule,
        number: int,
        count: int,
        slots: int,
        device: torch.device,
        alone: distributed.ProcessGroup,
    ) -> None:
        """number, count: of all segments in the model's order. alone: a group of this rank only,
        since torch's stage wants one."""
        super().__init__(
            segment,
            number,
            count,
            device,
            input_args=segment.on_wire(segment.arrives),
            output_args=segment.on_wire(segment.leaves),
            group=alone,
        )
        self._inference_mode = InferenceMode.STATIC
        self.has_backward = True
        self._prepare_forward_infra(slots, (), {}, has_backward=True)
        self._prepare_backward_infra(slots)
        self.free = list(range(slots))

    def buffers(self, what: str, slot: int) -> list[torch.Tensor]:
        """The buffers of what arrives: FORWARD, what crosses the cut before the segment; BACKWARD,
        the gradients of what left over the cut behind it that have any."""
        infos = self.args_recv_info[slot] if what == FORWARD else self.grad_recv_info[slot]
        return [info.buffer for info in infos if info.buffer is not None]

    def run_forward(
        self, slot: int, batch: MicroBatch, random: RandomStart | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Return what leaves over the cut behind the segment, or the loss. random: as
        `StageModel.run`."""
        kwargs = {"batch": batch, "random": random}
        with _own_errors():
            out = self.forward_one_chunk(slot, (), kwargs, save_forward_output=False)
        return out if isinstance(out, torch.Tensor) and self.is_last else [x.detach() for x in out]

    def run_backward(self, slot: int, loss: torch.Tensor | None, last: bool) -> list[torch.Tensor]:
        """Gradients of what came over the cut before the segment; the slot is free then. last:
        of the step's micro-batches on this rank."""
        with _own_errors():
            self.backward_one_chunk(slot, loss=loss, full_backward=True, last_backward=last)
        gradients = self.bwd_cache.pop(slot)
        if self.is_first:
            return []
        wanted = self._stage_meta.input_grads or ()
        return [
            torch.zeros_like(here) if grad is None else grad
            for here, grad, meta in zip(self.buffers(FORWARD, slot), gradients, wanted, strict=True)
            if meta is not None
        ]

    def drop(self) -> None:
        """Forget all micro-batches under way."""
        self.clear_runtime_states()
        self.fwd_cache.clear()
        self.bwd_cache.clear()


@contextmanager
def _own_errors() -> Iterator[None]:
    """Torch's stage wraps what a forward or backward raises; our own errors come out."""
    try:
        yield
    except RuntimeError as wrapped:
        cause: BaseException | None = wrapped
        while cause is not None and not isinstance(cause, RoadtrainError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None
