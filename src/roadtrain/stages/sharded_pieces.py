"""ShardedPieces: what one data-parallel rank keeps of a stage, told and taken in pieces: its shares
of the parameters that train, with their state, and an even part of the frozen ones.

Every rank has the frozen parameters whole, and where the gradients' sums are whole all that trains
too: it tells its share of them, and takes all. Does NOT wait or
communicate: whoever calls sees to it that no update is under way, and publishes what was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from roadtrain.chunks import Span
from roadtrain.errors import StoreError
from roadtrain.stages.bucket_state import BucketState
from roadtrain.stages.lacking import Lacking
from roadtrain.stages.pieces import VALUE, Extent, Piece

Hyperparameters = Sequence[tuple[float, ...]]  # of each parameter group


class ShardedPieces:
    """states: of the rank's shares. names: of the parameters that train, as `Span.param` counts
    them. rank, width: in the group; `who`: it is, for errors."""

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
        # of each parameter that trains, where this rank has parts of it: spans of buckets
        self._kept: dict[str, list[tuple[BucketState, int, Extent]]] = {}
        told: dict[str, list[Extent]] = {}
        for state in states:
            for i, span in enumerate(state.spans):
                name = names[span.param]
                self._kept.setdefault(name, []).append((state, i, _extent(name, span)))
            for span in state.share_spans:
                name = names[span.param]
                told.setdefault(name, []).append(_extent(name, span))
        self._told = [extent for extents in told.values() for extent in extents]

    def extents(self) -> list[Extent]:
        """See StageOptimizer."""
        rank, width = self._rank, self._width
        frozen = (
            Extent(name, p.numel() * rank // width, p.numel() * (rank + 1) // width)
            for name, p in self._frozen.items()
        )
        return [*self._told, *(extent for extent in frozen if extent.numel)]

    def wanted(self) -> list[Extent]:
        """See StageOptimizer."""
        frozen = [Extent(name, 0, p.numel()) for name, p in self._frozen.items() if p.numel()]
        own = [extent for kept in self._kept.values() for _, _, extent in kept]
        return [*own, *frozen]

    def piece(self, extent: Extent) -> Piece:
        """See StageOptimizer. Raises StoreError for what this rank does not keep."""
        if (frozen := self._frozen.get(extent.name)) is not None:
            values = frozen.detach().reshape(-1)[extent.start : extent.stop]
            return Piece(extent, {VALUE: values.to("cpu", torch.float32, copy=True)}, {})
        for state, i, kept in self._kept.get(extent.name, ()):
            if kept.start <= extent.start and extent.stop <= kept.stop:
                return state.piece(i, extent.name, extent.start, extent.stop)
        raise StoreError(
            f"{self._who}: elements [{extent.start}, {extent.stop}) of {extent.name!r} are not in"
            " one of its extents"
        )

    @torch.no_grad()
    def take(self, pieces: Iterable[Piece], hypers: Hyperparameters, groups: Sequence[int]) -> None:
        """Masters, state and frozen values of `pieces`. groups: the parameter group of each run.
        Raises StoreError for state that a rule does not keep, and where a part has not come."""
        lacking = Lacking(self.wanted())
        for piece in pieces:
            extent = piece.extent
            lacking.came(extent)
            if (frozen := self._frozen.get(extent.name)) is not None:
                flat = frozen.detach().reshape(-1)  # a copy where it is not contiguous
                flat[extent.start : extent.stop].copy_(piece.arrays[VALUE])
                if not frozen.is_contiguous():
                    frozen.copy_(flat.view(frozen.shape))
            for state, i, _ in self._kept.get(extent.name, ()):
                state.take(i, piece, hypers[groups[state.bucket.run]])
        lacking.check(self._who)


def _extent(name: str, span: Span) -> Extent:
    return Extent(name, span.origin, span.origin + span.stop - span.start)
