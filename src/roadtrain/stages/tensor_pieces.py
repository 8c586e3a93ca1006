"""TensorPieces: convert pieces (values and optimizer state of ranges of elements) of one tensor
rank's parameters to pieces of whole parameters, and vice versa, so that the degree of tensor
parallelism may change between two starts. Does NOT communicate.

If a layer is split by columns, a rank's elements of each row are a piece. Parameters that all t
tensor ranks have (norms) are divided among them: the first rank provides the first 1/t of the
elements, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from roadtrain.stages.pieces import VALUE, Extent, Piece, PieceSource
from roadtrain.stages.tensor import TensorParallel
from roadtrain.stages.tensor_split import TensorSplit

CHUNK_ELEMENTS = 1 << 20  # number of elements that are read from the inner source at once


class LocalPieces(PieceSource, Protocol):
    """A source of the pieces of one tensor rank's parameters, which can also load them."""

    def needed(self) -> list[Extent]: ...
    def take(self, pieces: Iterable[Piece], hypers: Sequence[tuple[float, ...]]) -> None: ...


class TensorPieces:
    """The pieces of one tensor rank's parameters (`inner`), converted to pieces of whole
    parameters."""

    def __init__(
        self, inner: LocalPieces, split: TensorParallel, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        self.inner, self.split, self.chunk_elements = inner, split, chunk_elements
        # the piece that was last read from `inner`; `extents` clears it
        self._read: Piece | None = None

    def extents(self) -> list[Extent]:
        """Return the ranges of elements of whole parameters that this rank provides: one per row if
        a layer is split by columns. Also clears the cache, so that `piece` returns current
        values."""
        self._read = None
        return [run for local in self.inner.extents() for run in self._runs(local)]

    def piece(self, extent: Extent) -> Piece:
        """Return a copy of the values and optimizer state of an extent, which must lie inside one
        of `extents`."""
        split = self.split.splits.get(extent.name)
        if split is None:
            return self.inner.piece(extent)
        local = self._local(split, extent)
        read = self._around(local)
        own = slice(local.start - read.extent.start, local.stop - read.extent.start)
        return Piece(extent, {k: x[own].clone() for k, x in read.arrays.items()}, read.scalars)

    def needed(self) -> list[Extent]:
        """Return ranges of elements of whole parameters that include all elements of this rank, and
        between them perhaps elements of others."""
        return [run for local in self.inner.needed() for run in self._around_whole(local)]

    def take(self, pieces: Iterable[Piece], hypers: Sequence[tuple[float, ...]]) -> None:
        """Load pieces of whole parameters. hypers: the hyperparameters of each parameter group."""
        self.inner.take(self._locals(pieces), hypers)

    def _runs(self, local: Extent) -> Iterator[Extent]:
        """Yield the ranges of the whole parameter that this rank provides for its own extent
        `local`."""
        name, rank, degree = local.name, self.split.rank, self.split.degree
        split = self.split.splits.get(name)
        if split is None:
            bounds = [local.start + local.numel * j // degree for j in (rank, rank + 1)]
            if bounds[0] < bounds[1]:
                yield Extent(name, bounds[0], bounds[1])
            return
        # number of elements that follow each other in the whole parameter
        own = split.width * split.inner
        at, stop = local.start, min(local.stop, split.real(rank))
        while at < stop:
            following = min((at // own + 1) * own, stop)
            start = split.position(rank, at)
            yield Extent(name, start, start + following - at)
            at = following

    def _local(self, split: TensorSplit, extent: Extent) -> Extent:
        """Return the range of this rank's elements that lie in a range of the whole parameter."""
        rank = self.split.rank
        return Extent(
            extent.name, split.before(rank, extent.start), split.before(rank, extent.stop)
        )

    def _around(self, local: Extent) -> Piece:
        """Return a piece that contains `local`, from the cache or with up to `chunk_elements`
        elements."""
        read = self._read
        if read is None or not _inside(local, read.extent):
            home = next(e for e in self.inner.extents() if _inside(local, e))
            stop = max(local.stop, min(home.stop, local.start + self.chunk_elements))
            read = self._read = self.inner.piece(Extent(local.name, local.start, stop))
        return read

    def _around_whole(self, local: Extent) -> Iterator[Extent]:
        """Yield the range of the whole parameter from the first to the last element of `local`
        without padding, if any."""
        rank, split = self.split.rank, self.split.splits.get(local.name)
        if split is None:
            yield local
        elif local.start < (stop := min(local.stop, split.real(rank))):
            first, last = split.position(rank, local.start), split.position(rank, stop - 1)
            yield Extent(local.name, first, last + 1)

    def _locals(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Convert pieces of whole parameters to this rank's pieces, and add zeros for padding."""
        layouts: dict[str, tuple[list[str], dict[str, float]]] = {}
        for piece in pieces:
            name, split = piece.extent.name, self.split.splits.get(piece.extent.name)
            layouts[name] = list(piece.arrays), dict(piece.scalars)
            if split is None:
                yield piece
                continue
            local = self._local(split, piece.extent)
            if not local.numel:
                continue
            places = split.positions(self.split.rank, local.start, local.stop)
            places -= piece.extent.start
            yield Piece(local, {k: x[places] for k, x in piece.arrays.items()}, piece.scalars)
        for local in self._padding():
            # a rank that has only padding receives no piece, and starts with the initial state
            keys, scalars = layouts.get(local.name, ([VALUE], {}))
            yield Piece(local, {key: torch.zeros(local.numel) for key in keys}, scalars)

    def _padding(self) -> Iterator[Extent]:
        for local in self.inner.needed():
            split = self.split.splits.get(local.name)
            real = local.stop if split is None else split.real(self.split.rank)
            if real < local.stop:
                yield Extent(local.name, max(real, local.start), local.stop)


def _inside(extent: Extent, other: Extent) -> bool:
    return extent.name == other.name and other.start <= extent.start and extent.stop <= other.stop
