"""TensorSplit: the division of one parameter's elements among the ranks of a tensor group.

The whole parameter is viewed as [outer, parts, degree, width, inner]. The split dimension consists
of `parts` equal parts (such as queries, keys and values in one matrix), of which each rank has
`width` indices. A rank's elements keep their order.

If the degree does not divide a vocabulary, the last ranks have rows of padding, which are zero and
which no token looks up.
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
    """The split of a parameter of this shape in its dimension `dim` over `degree` ranks. Raises
    ConfigError if the dimension cannot be divided."""

    shape: tuple[int, ...]
    dim: int
    degree: int
    parts: int = 1  # number of equal parts of the dimension; each is split separately
    # whether the last ranks may have padding; only for dim 0 and a single part
    padded: bool = False

    def __post_init__(self) -> None:
        assert not self.padded or (self.dim == 0 and self.parts == 1)
        if not self.padded and self.size % (self.parts * self.degree):
            raise ConfigError(
                f"{self.size // self.parts} rows or columns cannot be split over tp {self.degree}",
                hint=f"set tp to a divisor of {self.size // self.parts}",
            )

    @property
    def size(self) -> int:
        """The length of the split dimension in the whole parameter."""
        return self.shape[self.dim]

    @property
    def width(self) -> int:
        """The number of indices that each rank has in each of the dimension's equal parts, with
        padding."""
        return -(-self.size // (self.parts * self.degree))

    @property
    def outer(self) -> int:
        return math.prod(self.shape[: self.dim])

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """The product of the lengths of the dimensions from `dim` on, in the whole parameter."""
        return self.size * self.inner

    @property
    def local_row(self) -> int:
        """The product of the lengths of a rank's dimensions from `dim` on, with padding."""
        return self.parts * self.width * self.inner

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.parts * self.width, *self.shape[self.dim + 1 :])

    def real(self, rank: int) -> int:
        """Return the number of elements of `rank` before its padding."""
        rows = min(max(self.size - rank * self.width, 0), self.width) if self.padded else None
        return self.outer * self.local_row if rows is None else rows * self.inner

    def local_value(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a copy of the elements of `whole` that `rank` has, in a rank's shape. Padding is
        0."""
        assert tuple(whole.shape) == self.shape
        if self.padded:
            own = whole[rank * self.width : (rank + 1) * self.width]
            local = whole.new_zeros(self.local_shape)
            local[: len(own)] = own
            return local
        seen = whole.reshape(self.outer, self.parts, self.degree, self.width, self.inner)
        return seen[:, :, rank].clone().reshape(self.local_shape)

    def whole_value(self, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole parameter, joined from the tensors of all ranks in rank order."""
        if self.padded:
            return torch.cat(list(locals_))[: self.size]
        rows = [x.reshape(self.outer, self.parts, self.width, self.inner) for x in locals_]
        return torch.stack(rows, dim=2).reshape(self.shape)

    def before(self, rank: int, position: int) -> int:
        """Return the number of elements of `rank` that lie before `position` in the flattened whole
        parameter."""
        rows, rest = divmod(position, self.row)
        parts, rest = divmod(rest, self.row // self.parts)
        own = self.width * self.inner
        inside = min(max(rest - rank * own, 0), own)
        return min(rows * self.local_row + parts * own + inside, self.real(rank))

    def positions(self, rank: int, start: int, stop: int) -> torch.Tensor:
        """Return the positions of `rank`'s elements [start, stop) in the flattened whole parameter,
        as int64 [stop - start], ascending. The range must not include padding."""
        assert 0 <= start <= stop <= self.real(rank)
        return self.position(rank, torch.arange(start, stop))

    def position(self, rank: int, place: Place) -> Place:
        """Return the position in the flattened whole parameter of element `place` of `rank`, or a
        tensor of positions for a tensor of elements."""
        own = self.width * self.inner
        rows, part, inside = place // self.local_row, place // own % self.parts, place % own
        return rows * self.row + part * (self.row // self.parts) + rank * own + inside
