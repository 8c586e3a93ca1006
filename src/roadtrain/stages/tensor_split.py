"""TensorSplit: which elements of one parameter each rank of a tensor group has.

The whole parameter is seen as [outer, parts, degree, width, inner]: the split dimension is `parts`
equal parts (queries, keys and values that a layer holds in one matrix), and of each part every rank
has `width`. A rank's elements keep the order that they have in the whole, so that a run of the
flattened whole holds one run of each rank's own.

Rows of a vocabulary need not divide: every rank then has as many rows as the first, and those
beyond the vocabulary are padding of zeros, which no token ever looks up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from roadtrain.errors import ConfigError

Place = TypeVar("Place", int, torch.Tensor)


@dataclass(frozen=True)
class TensorSplit:
    """How a parameter of `shape` is split in dimension `dim` over `degree` ranks. Raises
    ConfigError where that does not divide."""

    shape: tuple[int, ...]
    dim: int
    degree: int
    parts: int = 1  # of the dimension, each split for itself
    padded: bool = False  # the last ranks may have padding; only in dimension 0 and one part

    def __post_init__(self) -> None:
        assert not self.padded or (self.dim == 0 and self.parts == 1)
        if not self.padded and self.size % (self.parts * self.degree):
            raise ConfigError(
                f"{self.size // self.parts} rows or columns cannot be split over tp {self.degree}",
                hint=f"tp divides {self.size // self.parts}",
            )

    @property
    def size(self) -> int:
        """Of the split dimension in the whole."""
        return self.shape[self.dim]

    @property
    def width(self) -> int:
        """Of one part's split dimension on each rank, padding included."""
        return -(-self.size // (self.parts * self.degree))

    @property
    def outer(self) -> int:
        return math.prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of the whole that one index of `outer` has."""
        return self.size * self.inner

    @property
    def local_row(self) -> int:
        """Elements of one rank that one index of `outer` has, padding included."""
        return self.parts * self.width * self.inner

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.parts * self.width, *self.shape[self.dim + 1 :])

    def real(self, rank: int) -> int:
        """Elements that `rank` has without padding; they come before all of its padding."""
        rows = min(max(self.size - rank * self.width, 0), self.width) if self.padded else None
        return self.outer * self.local_row if rows is None else rows * self.inner

    def local_value(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A copy of what `rank` has of `whole`, of local_shape; padding is 0."""
        assert tuple(whole.shape) == self.shape
        if self.padded:
            own = whole[rank * self.width : (rank + 1) * self.width]
            local = whole.new_zeros(self.local_shape)
            local[: len(own)] = own
            return local
        seen = whole.reshape(self.outer, self.parts, self.degree, self.width, self.inner)
        return seen[:, :, rank].clone().reshape(self.local_shape)

    def whole_value(self, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, of what each rank has, in the order of ranks."""
        if self.padded:
            return torch.cat(list(locals_))[: self.size]
        rows = [x.reshape(self.outer, self.parts, self.width, self.inner) for x in locals_]
        return torch.stack(rows, dim=2).reshape(self.shape)

    def before(self, rank: int, position: int) -> int:
        """How many of `rank`'s elements stand before `position` in the flattened whole: the
        local place of the first that does not."""
        rows, rest = divmod(position, self.row)
        parts, rest = divmod(rest, self.row // self.parts)
        own = self.width * self.inner
        inside = min(max(rest - rank * own, 0), own)
        return min(rows * self.local_row + parts * own + inside, self.real(rank))

    def positions(self, rank: int, start: int, stop: int) -> torch.Tensor:
        """Where `rank`'s elements [start, stop) stand in the flattened whole: int64 [stop -
        start], rising. Padding has no place there."""
        assert 0 <= start <= stop <= self.real(rank)
        return self.position(rank, torch.arange(start, stop))

    def position(self, rank: int, place: Place) -> Place:
        """Where `rank`'s element `place` (or each of many) stands in the flattened whole."""
        own = self.width * self.inner
        rows, part, inside = place // self.local_row, place // own % self.parts, place % own
        return rows * self.row + part * (self.row // self.parts) + rank * own + inside
