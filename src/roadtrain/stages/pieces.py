"""Pieces: the common format of a stage's parameters and optimizer state, wherever they are stored.

A piece is a range of one parameter's elements, under the parameter's name in the whole model. So
stages, ranks and placements may change between two starts of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from roadtrain.errors import ForeignError, StoreError
from roadtrain.kernels.rule import Rule

VALUE = "value"  # the key of the parameter's fp32 master copy among a piece's arrays


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Elements [start, stop) of the flattened parameter `name`."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """The values and optimizer state of an extent.

    arrays: float32 arrays [numel] on the host: "value" (the parameter's values), and the arrays of
    the optimizer state under torch's names, such as "exp_avg". scalars: the optimizer state that
    exists once per parameter, such as "step". Raises StoreError if an array's length or dtype is
    wrong.
    """

    extent: Extent
    arrays: Mapping[str, torch.Tensor]
    scalars: Mapping[str, float]

    def __post_init__(self) -> None:
        for key, array in self.arrays.items():
            if array.shape != (self.extent.numel,) or array.dtype != torch.float32:
                raise StoreError(
                    f"array {key!r} of parameter {self.extent.name!r} is {array.dtype}"
                    f" {tuple(array.shape)}, but must be torch.float32 ({self.extent.numel},)"
                )

    def has_state(self, rule: Rule) -> bool:
        """Return whether the piece has optimizer state. Raises ForeignError if it has the state of
        another rule."""
        found, kept = {*self.arrays, *self.scalars} - {VALUE}, {*rule.arrays, *rule.scalars}
        if found and found != kept:
            raise ForeignError(
                f"the optimizer state of {self.extent.name!r} has {', '.join(sorted(found))}, but"
                f" {rule.name} keeps {', '.join(sorted(kept)) or 'none'}",
                hint="continue with the optimizer that wrote the state",
            )
        return bool(found)


def even_shares(sizes: Iterable[tuple[str, int]], rank: int, width: int) -> list[Extent]:
    """Divide each parameter evenly among `width` ranks, and return the non-empty shares of `rank`.
    sizes: the name and the number of elements of each parameter."""
    parts = (Extent(name, n * rank // width, n * (rank + 1) // width) for name, n in sizes)
    return [part for part in parts if part.numel]


class PieceSource(Protocol):
    """A provider of pieces: a stage's optimizer, a snapshot, another rank."""

    def extents(self) -> list[Extent]:
        """Return the extents that this source has, which do not overlap."""

    def piece(self, extent: Extent) -> Piece:
        """Return a copy of the values and state of an extent, which must lie inside one of
        `extents`."""
