"""TensorPieces: what updates one rank's part of split layers, told in pieces of whole parameters.

The optimizer below knows parameters of the rank's own shape and their flat elements. Here the same
elements stand where they are in the whole parameter, so that snapshots and exchanges need not know
of tensor parallelism, and its degree may change between two starts.

A layer that is split by columns has a short run of each row on each rank. `extents` and `piece`
tell these runs, and ask nobody. `in_order` tells the same in few long pieces, for which the ranks
of a tensor group exchange their columns, a million elements at a time.

What all ranks have alike (norms) is told by each in its part: of t ranks the first tells the first
t-th.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from roadtrain.errors import StoreError
from roadtrain.parallel.pieces import VALUE, Extent, Piece, PieceSource
from roadtrain.parallel.stage_optimizer import StageOptimizer
from roadtrain.parallel.tensor import TensorParallel, device_of
from roadtrain.parallel.tensor_split import TensorSplit

CHUNK_ELEMENTS = 1 << 20  # of one rank, read or exchanged at once


class TensorPieces:
    """A StageOptimizer over `inner`, whose parameters are those of one tensor rank. A step is
    inner's own. Parameters that are not split are inner's as they are."""

    def __init__(
        self, inner: StageOptimizer, split: TensorParallel, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        self.inner = inner
        self.param_groups: list[dict[str, Any]] = inner.param_groups
        self.steps_done = inner.steps_done
        self.split = split
        self.chunk_elements = chunk_elements
        # what was read last of `inner`; of the values that are there now
        self._read: Piece | None = None

    def begin_step(self, backwards: int) -> None:
        self._read = None
        self.inner.begin_step(backwards)

    def sum_squares(self) -> float:
        return self.inner.sum_squares()

    def step(self, scale: float = 1.0) -> None:
        self._read = None
        self.inner.step(scale)
        self.steps_done = self.inner.steps_done

    def close(self) -> None:
        self.inner.close()

    def abandon(self) -> None:
        """See StageOptimizer."""
        self.inner.abandon()

    def settle(self) -> None:
        """See StageOptimizer."""
        self.inner.settle()

    def extents(self) -> list[Extent]:
        """Runs of the whole parameters that this rank tells; a rank's own columns are one run a
        row."""
        return [run for local in self.inner.extents() for run in self._runs(local)]

    def piece(self, extent: Extent) -> Piece:
        """Of (a part of) one of `extents`. Not collective."""
        split = self.split.splits.get(extent.name)
        if split is None:
            return self.inner.piece(extent)
        local = self._local(split, extent)
        if local.numel != extent.numel:
            raise StoreError(
                f"tensor rank {self.split.rank} has {local.numel} of the {extent.numel} elements"
                f" of {extent.name} [{extent.start}:{extent.stop}]"
            )
        read = self._around(local)
        own = slice(local.start - read.extent.start, local.stop - read.extent.start)
        return Piece(extent, {k: x[own].clone() for k, x in read.arrays.items()}, read.scalars)

    def wanted(self) -> list[Extent]:
        """Runs of the whole parameters that hold all that this rank needs; of a layer split by
        columns also the columns of others."""
        return [
            run
            for local in self.inner.wanted()
            for part in self._chunks(local)
            for run in self._around_whole(part)
        ]

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """Collective over the stage's ranks, as inner's is."""
        self._read = None
        self.inner.load(self._locals(pieces), steps_done)
        self.steps_done = self.inner.steps_done

    def in_order(self) -> PieceSource:
        """The same elements in long pieces. `piece` is collective over the tensor group then: all
        its ranks ask for the pieces of all extents, in their order."""
        return _InOrder(self)

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

    def _chunks(self, local: Extent) -> Iterator[Extent]:
        """`local` without padding, in runs of at most a chunk, cut between rows."""
        split = self.split.splits.get(local.name)
        if split is None:
            yield local
            return
        rows = max(1, self.chunk_elements // split.local_row) * split.local_row
        at, stop = local.start, min(local.stop, split.real(self.split.rank))
        while at < stop:
            following = min((at // rows + 1) * rows, stop) if split.outer > 1 else stop
            yield Extent(local.name, at, following)
            at = following

    def _around_whole(self, local: Extent) -> Iterator[Extent]:
        """The run of the whole from the first element of `local` to its last."""
        split = self.split.splits.get(local.name)
        if split is None:
            yield local
        elif local.numel:
            rank = self.split.rank
            last = split.position(rank, local.stop - 1)
            yield Extent(local.name, split.position(rank, local.start), last + 1)

    def _locals(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pieces of the whole as pieces of inner, and zeros for its padding."""
        keys: dict[str, float] = {}
        scalars: dict[str, dict[str, float]] = {}
        for piece in pieces:
            name, split = piece.extent.name, self.split.splits.get(piece.extent.name)
            keys |= dict.fromkeys(piece.arrays, 0.0)
            scalars[name] = dict(piece.scalars)
            if split is None:
                yield piece
                continue
            local = self._local(split, piece.extent)
            if not local.numel:
                continue
            places = split.positions(self.split.rank, local.start, local.stop)
            places -= piece.extent.start
            yield Piece(local, {k: x[places] for k, x in piece.arrays.items()}, piece.scalars)
        any_scalars = next(iter(scalars.values()), {})
        for local in self._padding():
            zeros = {key: torch.zeros(local.numel) for key in keys or {VALUE: 0.0}}
            yield Piece(local, zeros, scalars.get(local.name, any_scalars))

    def _padding(self) -> Iterator[Extent]:
        for local in self.inner.wanted():
            split = self.split.splits.get(local.name)
            real = local.stop if split is None else split.real(self.split.rank)
            if real < local.stop:
                yield Extent(local.name, max(real, local.start), local.stop)


@dataclass(frozen=True)
class _Rows:
    """Whole rows, of which every rank of the group has its columns at `local`. Rank j tells
    those from bounds[j] to bounds[j + 1] of them (in rows of the whole)."""

    split: TensorSplit
    local: Extent
    bounds: tuple[int, ...]

    def told(self, rank: int) -> Extent:
        row = self.split.row
        return Extent(self.local.name, self.bounds[rank] * row, self.bounds[rank + 1] * row)


class _InOrder:
    """Invariant: `_exchanged` is of the rows `_of`, as they are now."""

    def __init__(self, pieces: TensorPieces) -> None:
        self._pieces = pieces
        self._split = pieces.split
        # parameter -> what this rank tells of it, and of which rows where they are exchanged
        self._plan: dict[str, list[tuple[Extent, _Rows | None]]] = {}
        for local in pieces.inner.extents():
            for part in pieces._chunks(local):
                self._plan.setdefault(local.name, []).extend(self._told(part))
        self._of: _Rows | None = None
        self._exchanged: Piece | None = None
        self._check_alike()

    def extents(self) -> list[Extent]:
        return [extent for told in self._plan.values() for extent, _ in told]

    def piece(self, extent: Extent) -> Piece:
        rows = next(rows for told, rows in self._plan[extent.name] if _inside(extent, told))
        if rows is None:
            return self._pieces.piece(extent)
        if self._exchanged is None or self._of is not rows:
            self._of, self._exchanged = rows, self._exchange(rows)
        whole = self._exchanged
        own = slice(extent.start - whole.extent.start, extent.stop - whole.extent.start)
        return Piece(extent, {k: x[own].clone() for k, x in whole.arrays.items()}, whole.scalars)

    def _told(self, local: Extent) -> Iterator[tuple[Extent, _Rows | None]]:
        """What this rank tells of a chunk: whole rows are exchanged where each rank gets one."""
        split, degree = self._split.splits.get(local.name), self._split.degree
        if split is None or split.outer == 1:
            for run in self._pieces._runs(local):
                yield run, None
            return
        row = split.local_row
        first, last = -(-local.start // row), local.stop // row
        if last - first < degree:
            first = last = -(-local.stop // row)  # none
        bounds = tuple(first + (last - first) * j // degree for j in range(degree + 1))
        inside = Extent(local.name, min(first * row, local.stop), min(last * row, local.stop))
        for run in self._pieces._runs(Extent(local.name, local.start, inside.start)):
            yield run, None
        if inside.numel:
            rows = _Rows(split, inside, bounds)
            yield rows.told(self._split.rank), rows
        for run in self._pieces._runs(Extent(local.name, inside.stop, local.stop)):
            yield run, None

    def _exchange(self, rows: _Rows) -> Piece:
        """The rows that this rank tells, of the columns of all."""
        own = self._pieces.inner.piece(rows.local)
        arrays = {key: self._rows(rows, own.arrays[key]) for key in sorted(own.arrays)}
        return Piece(rows.told(self._split.rank), arrays, own.scalars)

    def _rows(self, rows: _Rows, own: torch.Tensor) -> torch.Tensor:
        split, mesh, rank = rows.split, self._split.mesh, self._split.rank
        counts = [b - a for a, b in zip(rows.bounds, rows.bounds[1:])]
        device = device_of(mesh)
        sent = own.to(device)
        got = sent.new_empty(split.degree * counts[rank] * split.local_row)
        dist.all_to_all_single(
            got,
            sent,
            [counts[rank] * split.local_row] * split.degree,
            [count * split.local_row for count in counts],
            group=mesh.get_group(),
        )
        seen = got.reshape(split.degree, counts[rank], split.parts, split.width, split.inner)
        return seen.permute(1, 2, 0, 3, 4).reshape(-1).cpu()

    def _check_alike(self) -> None:
        """Raise StoreError where the ranks of the group would exchange different rows."""
        own = [rows.local for told in self._plan.values() for _, rows in told if rows is not None]
        all_: list[list[Extent] | None] = [None] * self._split.degree
        dist.all_gather_object(all_, own, group=self._split.mesh.get_group())
        if any(other != own for other in all_):
            raise StoreError(
                "the ranks of a tensor group keep different parts of the layers that they split",
                hint="give all ranks of a stage the same optimizer",
            )


def _inside(extent: Extent, other: Extent) -> bool:
    return extent.name == other.name and other.start <= extent.start and extent.stop <= other.stop
