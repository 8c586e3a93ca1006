"""FetchedParameters: the parameters of one block, which are views of a fetched buffer while the
block runs, and released afterwards. Does NOT fetch.

Released parameters keep shape, dtype and device, take 0 bytes, and raise an error when they are
read (streaming/released.py). A Parameter always stays the same object, because optimizers refer to
it. Assumes that the buffer has the ChunkTable's layout and outlives its views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from roadtrain.chunks import Block, ChunkTable, Run
from roadtrain.streaming.released import released_value, set_fetched, set_released, settle
from roadtrain.streaming.split import DTYPES


@dataclass(frozen=True)
class _Place:
    """The location of a parameter: elements [start, stop) of `run`."""

    index: int  # index in ChunkTable.params
    param: nn.Parameter
    run: Run
    start: int
    stop: int
    released_value: torch.Tensor  # data of the parameter while it is released


class FetchedParameters:
    """The parameters of `block`, and the layout of their gradients in one flat buffer.

    `params` maps indices in `table.params` to parameters. `trainable` has (index, parameter) for
    each parameter whose gradient is pushed to the block source.
    """

    def __init__(
        self,
        table: ChunkTable,
        block: Block,
        params: Mapping[int, nn.Parameter],
        device: torch.device,
    ) -> None:
        self.block, self.device = block, device
        self.places: list[_Place] = []
        for run in block.runs:
            for span in run.spans:
                spec = table.params[span.param]
                empty = released_value(spec.shape, DTYPES[spec.dtype], device)
                self.places.append(
                    _Place(span.param, params[span.param], run, span.start, span.stop, empty)
                )
        self.trainable = [(p.index, p.param) for p in self.places if p.run.trainable]
        others = [p.param for p in self.places if not p.run.trainable]
        self.frozen = [p for p in others if not p.requires_grad]
        placed = {p.index for p in self.places}
        # parameters without elements, which are not fetched
        self.empty = [p for i, p in params.items() if i not in placed]
        self._gaps = {run.index: _gaps(run) for run in block.runs if run.trainable}

    def settle(self) -> None:
        """Move every parameter to the device and release it. The parameters lose their values."""
        for place in self.places:
            settle(place.param, place.released_value)
            set_released(place.param)
        for p in self.empty:
            settle(p, torch.empty(p.shape, dtype=p.dtype, device=self.device))

    @torch.inference_mode(False)
    def point(self, buffer: torch.Tensor) -> None:
        """Make the parameters views of `buffer` (uint8, at least pull_nbytes)."""
        flat = {run.index: _flat(buffer, run.offset, run) for run in self.block.runs}
        for place in self.places:
            set_fetched(place.param)
            values = flat[place.run.index][place.start : place.stop]
            settle(place.param, values.view(place.released_value.shape))

    @torch.inference_mode(False)
    def drop(self) -> None:
        for place in self.places:
            place.param.data = place.released_value
            set_released(place.param)

    @torch.no_grad()
    def lay_out(self, buffer: torch.Tensor, grads: Mapping[int, torch.Tensor]) -> None:
        """Write gradients, by parameter index, to the flat `buffer` in the layout for a push. Other
        elements are set to zero. If the gradients are on a device and `buffer` is in pinned host
        memory, the writes run on the current stream."""
        for run in self.block.runs:
            if not run.trainable:
                continue
            flat = _flat(buffer, run.push_offset, run)
            for start, stop in self._gaps[run.index]:
                flat[start:stop].zero_()
            for span in run.spans:
                grad = grads.get(span.param)
                part = flat[span.start : span.stop]
                if grad is None:
                    part.zero_()
                else:
                    dense = grad.to_dense() if grad.is_sparse else grad
                    part.view(grad.shape).copy_(dense, non_blocking=True)


def _flat(buffer: torch.Tensor, offset: int, run: Run) -> torch.Tensor:
    """Return the elements of `run`, which begin at byte `offset` of `buffer`, as a tensor of the
    run's dtype."""
    dtype = DTYPES[run.dtype]
    return buffer[offset : offset + run.numel * dtype.itemsize].view(dtype)


def _gaps(run: Run) -> list[tuple[int, int]]:
    ends, starts = [0, *(s.stop for s in run.spans)], [*(s.start for s in run.spans), run.numel]
    return [(end, start) for end, start in zip(ends, starts) if end < start]
