"""BucketState: one rank's memory of a bucket (a range of a stage's flat parameters, see
flat_layout.py), and the optimizer update. ShardedPieces: a stage's parameters and optimizer state
as pieces (pieces.py). Does NOT communicate.

With d ranks and an optimizer rule that keeps k arrays, a parameter element needs these bytes on
each rank: the size of the compute dtype for the value, 4 for the gradient, 4 k/d for the rule's
arrays, and 4/d for the fp32 master copy (0 for fp32 values on the device of the update, which are
their own masters). If `whole` is set, every rank updates all elements, and d is 1 in these
formulas.

Masters and the rule's arrays are where the update runs: on the GPU if the rule has a GPU kernel,
otherwise on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from roadtrain.chunks import Span
from roadtrain.errors import StoreError
from roadtrain.kernels import gpu
from roadtrain.kernels import sum as sums
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.rules import AdamRule, SgdRule
from roadtrain.stages.flat_layout import Bucket
from roadtrain.stages.pieces import VALUE, Extent, Piece, even_shares
from roadtrain.stages.transfers import check_covered
from roadtrain.streaming.split import NAMES

HOST = torch.device("cpu")


def update_device(rule: Rule, device: torch.device) -> torch.device:
    """Return the device of an update of values on `device`: the same device if it is a GPU and
    `rule` has a GPU kernel, otherwise the CPU."""
    has_kernel = device.type == "cuda" and gpu.available()
    return device if has_kernel and isinstance(rule, AdamRule | SgdRule) else HOST


class BucketState:
    """The memory of a bucket on one rank, and the bucket's optimizer update.

    values: the bucket's values, [numel] in the compute dtype. grads: the bucket's gradients, fp32
    [numel]. Both are views of larger memory. whole: whether this rank keeps the optimizer state of
    the complete bucket instead of its share only. `spans`: the positions of the parameters within
    the elements whose state this rank keeps. `share_spans`, `share_grads`: the positions of the
    parameters in this rank's share, and its gradients; norms and snapshots use them, because shares
    of different ranks are disjoint.
    """

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        values: torch.Tensor,
        grads: torch.Tensor,
        rule: Rule,
        *,
        whole: bool = False,
    ) -> None:
        self.bucket, self.values, self.grads, self.rule = bucket, values, grads, rule
        self.share_spans: tuple[Span, ...] = bucket.spans_of(rank)
        self.share_grads = grads[bucket.of_rank(rank)]
        self.spans = bucket.spans if whole else self.share_spans
        self.dtype = NAMES[values.dtype]
        kept = slice(0, bucket.numel) if whole else bucket.of_rank(rank)
        self.own_values, self.own_grads = values[kept], grads[kept]
        self.where = update_device(rule, values.device)
        # if values are fp32 and the update runs on their device, the values are the masters
        in_place = self.dtype == "fp32" and self.where == values.device
        self.master = (
            self.own_values if in_place else torch.empty(len(self.own_values), device=self.where)
        )
        self.arrays = [torch.zeros(len(self.own_values), device=self.where) for _ in rule.arrays]
        self.rows = np.zeros((len(self.spans), len(rule.scalars)))

    def begin(self, hyper: Sequence[float], masters: Mapping[int, torch.Tensor]) -> None:
        """Set the fp32 masters and the optimizer state to their initial values.

        masters: the initial masters of some parameters, as flat fp32 tensors by parameter index.
        Other masters start from the parameters' current values.
        """
        if self.master is not self.own_values:
            self.master.copy_(self.own_values)
        for i, span in enumerate(self.spans):
            if (flat := masters.get(span.param)) is not None:
                stop = span.origin + span.stop - span.start
                self.master[span.start : span.stop].copy_(flat[span.origin : stop])
            self._start(i, slice(span.start, span.stop), hyper)

    def _start(self, span: int, part: slice, hyper: Sequence[float]) -> None:
        """Reset the optimizer state of some elements. span: the index in `spans` of their span.
        part: their range among the elements whose state this rank keeps."""
        arrays = [torch.zeros(part.stop - part.start) for _ in self.arrays]
        self.rows[span] = 0
        master = self.master[part].cpu().numpy()
        self.rule.start(master, [array.numpy() for array in arrays], self.rows[span], hyper)
        for array, started in zip(self.arrays, arrays):
            array[part].copy_(started)

    def sum_squares(self, counts: Sequence[bool]) -> float:
        """Return the float64 sum of the squares of the summed gradients in this rank's share.
        counts: for each parameter of the stage, whether its gradient counts."""
        parts = [self.share_grads[s.start : s.stop] for s in self.share_spans if counts[s.param]]
        if self.share_grads.device.type != "cpu":
            return float(sum(part.double().square().sum() for part in parts))
        return sum(sums.sum_squares(part.numpy(), "fp32") for part in parts)

    def update(
        self, hyper: Sequence[float], scale: float, has_gradient: Callable[[int], bool]
    ) -> None:
        """Update the masters, the optimizer state and the values of this rank's elements.

        hyper: the rule's hyperparameters. scale: the factor by which gradients are multiplied.
        has_gradient: returns whether the parameter with a given index has a gradient; other
        parameters are not updated.
        """
        spans = [i for i, span in enumerate(self.spans) if has_gradient(span.param)]
        if self.where == self.values.device:
            copy = None if self.master is self.own_values else self.own_values
            self._apply(spans, self.own_grads, hyper, scale, copy)
            return
        host = torch.empty_like(self.own_values, device=HOST)
        copy = host if self.dtype != "fp32" else None
        if copy is not None:
            copy.copy_(self.own_values)  # parameters without a gradient keep these values
        self._apply(spans, self.own_grads.to(HOST), hyper, scale, copy)
        self.own_values.copy_(self.master if copy is None else copy)

    def publish(self) -> None:
        """Set the values of this rank's elements to the masters, rounded to the compute dtype."""
        if self.master is not self.own_values:
            self.own_values.copy_(self.master)

    def _apply(
        self,
        spans: Sequence[int],
        grads: torch.Tensor,
        hyper: Sequence[float],
        scale: float,
        copy: torch.Tensor | None,
    ) -> None:
        """Update the masters and optimizer state of the spans with these indices. copy: a tensor
        that receives the new values in the compute dtype, or None."""
        for i in spans:
            part = slice(self.spans[i].start, self.spans[i].stop)
            master, grad, row = self.master[part], grads[part], self.rows[i]
            arrays = [array[part] for array in self.arrays]
            out = None if copy is None else copy[part]
            if self.where.type != "cpu":
                gpu.apply(self.rule, master, grad, arrays, row, hyper, scale, out)
                continue
            self.rule.apply(
                master.numpy(),
                grad.numpy(),
                "fp32",
                [array.numpy() for array in arrays],
                row,
                hyper,
                scale,
                None if out is None else out.view(torch.uint16).numpy(),
                None if out is None else self.dtype,
            )

    def piece(self, span: int, name: str, start: int, stop: int) -> Piece:
        """Return a copy of the elements [start, stop) of the parameter `name`. All of these
        elements must be in the span with the index `span`."""
        at = self.spans[span].start + start - self.spans[span].origin
        part = slice(at, at + stop - start)
        arrays = {VALUE: self.master, **dict(zip(self.rule.arrays, self.arrays))}
        copies = {key: array[part].to(HOST, copy=True) for key, array in arrays.items()}
        scalars = dict(zip(self.rule.scalars, map(float, self.rows[span])))
        return Piece(Extent(name, start, stop), copies, scalars)

    def take(self, span: int, piece: Piece, hyper: Sequence[float]) -> None:
        """Load the elements that `piece` and a span have in common. Both must belong to the same
        parameter. span: the index of the span. Raises ForeignError if the piece has the state of
        another rule."""
        mine, extent = self.spans[span], piece.extent
        start = max(extent.start, mine.origin)
        stop = min(extent.stop, mine.origin + mine.stop - mine.start)
        if stop <= start:
            return
        here = slice(mine.start + start - mine.origin, mine.start + stop - mine.origin)
        there = slice(start - extent.start, stop - extent.start)
        has_state = piece.has_state(self.rule)
        self.master[here].copy_(piece.arrays[VALUE][there])
        if not has_state:
            self._start(span, here, hyper)
            return
        for key, array in zip(self.rule.arrays, self.arrays):
            array[here].copy_(piece.arrays[key][there])
        self.rows[span] = [piece.scalars[key] for key in self.rule.scalars]


class ShardedPieces:
    """The parameters of a stage and their optimizer state, as pieces.

    A rank saves its shares of the trainable parameters, and an equal share of each frozen
    parameter. A rank loads all frozen parameters, and the trainable parameters whose state it
    keeps. The caller must make sure that no update is in progress. After `take`, the caller must
    call `publish` of each BucketState.

    names: the names of the trainable parameters, by parameter index. rank: this rank's index in the
    group. width: the number of ranks of the group. who: the name of this rank in errors.
    """

    def __init__(
        self,
        states: Sequence[BucketState],
        names: Sequence[str],
        frozen: Mapping[str, nn.Parameter],
        rank: int,
        width: int,
        who: str,
    ) -> None:
        self._frozen, self._rank, self._width, self._who = frozen, rank, width, who
        # name of a trainable parameter -> the spans of it that this rank keeps, each as (state of
        # the bucket, index of the span, extent)
        self._kept: dict[str, list[tuple[BucketState, int, Extent]]] = {}
        shares: dict[str, list[Extent]] = {}
        for state in states:
            for i, span in enumerate(state.spans):
                name = names[span.param]
                self._kept.setdefault(name, []).append((state, i, _extent(name, span)))
            for span in state.share_spans:
                name = names[span.param]
                shares.setdefault(name, []).append(_extent(name, span))
        self._shares = [extent for extents in shares.values() for extent in extents]

    def extents(self) -> list[Extent]:
        """Return the extents (ranges of a parameter's elements) that this rank saves."""
        frozen = ((name, p.numel()) for name, p in self._frozen.items())
        return [*self._shares, *even_shares(frozen, self._rank, self._width)]

    def needed(self) -> list[Extent]:
        """Return the extents (ranges of a parameter's elements) that this rank loads. `take` must
        receive all of them."""
        frozen = [Extent(name, 0, p.numel()) for name, p in self._frozen.items() if p.numel()]
        own = [extent for kept in self._kept.values() for _, _, extent in kept]
        return [*own, *frozen]

    def piece(self, extent: Extent) -> Piece:
        """Return a copy of the values and optimizer state of an extent. Raises StoreError if this
        rank does not keep all elements of the extent."""
        if (frozen := self._frozen.get(extent.name)) is not None:
            values = frozen.detach().reshape(-1)[extent.start : extent.stop]
            return Piece(extent, {VALUE: values.to("cpu", torch.float32, copy=True)}, {})
        for state, i, kept in self._kept.get(extent.name, ()):
            if kept.start <= extent.start and extent.stop <= kept.stop:
                return state.piece(i, extent.name, extent.start, extent.stop)
        raise StoreError(
            f"{self._who} cannot read elements [{extent.start}, {extent.stop}) of parameter"
            f" {extent.name!r}, which are not kept on this rank"
        )

    @torch.no_grad()
    def take(self, pieces: Iterable[Piece], hypers: Sequence[tuple[float, ...]]) -> None:
        """Load masters, optimizer state and frozen values from `pieces`. hypers: the
        hyperparameters of each parameter group. Raises ForeignError if a piece has the state of
        another rule, and StoreError if elements are missing."""
        loaded = list[Extent]()
        for piece in pieces:
            extent = piece.extent
            loaded.append(extent)
            if (frozen := self._frozen.get(extent.name)) is not None:
                flat = frozen.detach().reshape(-1)  # a copy if it is not contiguous
                flat[extent.start : extent.stop].copy_(piece.arrays[VALUE])
                if not frozen.is_contiguous():
                    frozen.copy_(flat.view(frozen.shape))
            for state, i, _ in self._kept.get(extent.name, ()):
                state.take(i, piece, hypers[state.bucket.group])
        check_covered(loaded, self.needed(), self._who)


def _extent(name: str, span: Span) -> Extent:
    return Extent(name, span.origin, span.origin + span.stop - span.start)
