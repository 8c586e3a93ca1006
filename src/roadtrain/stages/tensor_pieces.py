"""TensorPieces: what updates one rank's part of split layers, told in pieces of whole parameters.

The optimizer knows parameters of the rank's own shape and their flat elements. Here the same
elements stand where they are in the whole parameter, so that snapshots and exchanges need not know
of tensor parallelism, and its degree may change between two starts.

A layer that is split by columns has a short run of each row on each rank: its pieces are these
runs, so that nobody has to be asked.

What all ranks have alike (norms) is told by each in its part: of t ranks the first tells the first
t-th.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from roadtrain.stages.pieces import VALUE, Extent, Piece, PieceSource
from roadtrain.stages.tensor import TensorParallel
from roadtrain.stages.tensor_split import TensorSplit

CHUNK_ELEMENTS = 1 << 20  # of one rank, read at once


class LocalPieces(PieceSource, Protocol):
    """What keeps one tensor rank's parameters and their state."""

    def needed(self) -> list[Extent]: ...
    def take(self, pieces: Iterable[Piece], hypers: Sequence[tuple[float, ...]]) -> None: ...


class TensorPieces:
    """The pieces of `inner`, whose parameters are those of one tensor rank, as pieces of whole
    parameters. Those that are not split are inner's as they are."""

    def __init__(
        self, inner: LocalPieces, split: TensorParallel, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        self.inner, self.split, self.chunk_elements = inner, split, chunk_elements
        self._read: Piece | None = None  # what was read last of `inner`, since `extents`

    def extents(self) -> list[Extent]:
        """Runs of the whole parameters that this rank tells; a rank's own columns are one run a
        row. `piece` tells the values that are there now."""
        self._read = None
        return [run for local in self.inner.extents() for run in self._runs(local)]

    def piece(self, extent: Extent) -> Piece:
        """Of (a part of) one of `extents`."""
        split = self.split.splits.get(extent.name)
        if split is None:
            return self.inner.piece(extent)
        local = self._local(split, extent)
        read = self._around(local)
        own = slice(local.start - read.extent.start, local.stop - read.extent.start)
        return Piece(extent, {k: x[own].clone() for k, x in read.arrays.items()}, read.scalars)

    def needed(self) -> list[Extent]:
        """Runs of the whole parameters that hold all that this rank needs; of a layer split by
        columns also the columns of others."""
        return [run for local in self.inner.needed() for run in self._around_whole(local)]

    def take(self, pieces: Iterable[Piece], hypers: Sequence[tuple[float, ...]]) -> None:
        """As inner's, of whole parameters."""
        self.inner.take(self._locals(pieces), hypers)

    def _runs(self, local: Extent) -> Iterator[Extent]:
        """Where the elements of `local`, of inner, stand in the whole."""
        name, rank, degree = local.name, self.split.rank, self.split.degree
        split = self.split.splits.get(name)
        if split is None:
            bounds = [local.start + local.numel * j // degree for j in (rank, rank + 1)]
            if bounds[0] < bounds[1]:
                yield Extent(name, bounds[0], bounds[1])
            return
        own = split.width * split.inner  # elements that follow each other in the whole
        at, stop = local.start, min(local.stop, split.real(rank))
        while at < stop:
            following = min((at // own + 1) * own, stop)
            start = split.position(rank, at)
            yield Extent(name, start, start + following - at)
            at = following

    def _local(self, split: TensorSplit, extent: Extent) -> Extent:
        """This rank's elements of a run of the whole."""
        rank = self.split.rank
        return Extent(
            extent.name, split.before(rank, extent.start), split.before(rank, extent.stop)
        )

    def _around(self, local: Extent) -> Piece:
        """What inner has of `local`, and of what comes after it, up to a chunk."""
        read = self._read
        if read is None or not _inside(local, read.extent):
            home = next(e for e in self.inner.extents() if _inside(local, e))
            stop = max(local.stop, min(home.stop, local.start + self.chunk_elements))
            read = self._read = self.inner.piece(Extent(local.name, local.start, stop))
        return read

    def _around_whole(self, local: Extent) -> Iterator[Extent]:
        """The run of the whole from the first element of `local` to its last that is no padding;
        none where all of it is."""
        rank, split = self.split.rank, self.split.splits.get(local.name)
        if split is None:
            yield local
        elif local.start < (stop := min(local.stop, split.real(rank))):
            first, last = split.position(rank, local.start), split.position(rank, stop - 1)
            yield Extent(local.name, first, last + 1)

    def _locals(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pieces of the whole as pieces of inner, and zeros for its padding."""
        came: dict[str, tuple[list[str], dict[str, float]]] = {}
        for piece in pieces:
            name, split = piece.extent.name, self.split.splits.get(piece.extent.name)
            came[name] = list(piece.arrays), dict(piece.scalars)
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
            # a rank with nothing but padding gets no piece, and begins with a first step's state
            keys, scalars = came.get(local.name, ([VALUE], {}))
            yield Piece(local, {key: torch.zeros(local.numel) for key in keys}, scalars)

    def _padding(self) -> Iterator[Extent]:
        for local in self.inner.needed():
            split = self.split.splits.get(local.name)
            real = local.stop if split is None else split.real(self.split.rank)
            if real < local.stop:
                yield Extent(local.name, max(real, local.start), local.stop)


def _inside(extent: Extent, other: Extent) -> bool:
    return extent.name == other.name and other.start <= extent.start and extent.stop <= other.stop
