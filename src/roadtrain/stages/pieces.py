"""Pieces: how a stage's parameters and their optimizer state are told, whatever holds them.

A piece is a run of one parameter's elements under the parameter's own name in the whole model, so
that stages, data-parallel ranks and placements may change between two starts of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from roadtrain.errors import ForeignError, StoreError
from roadtrain.kernels.rule import Rule

VALUE = "value"  # the fp32 master copy of the parameter, among a piece's arrays


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Elements [start, stop) of the flattened parameter `name`; in messages a list of three."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """The values of an extent. Raises StoreError where an array is of another length.

    arrays: float32 [numel] on the host: VALUE and the rule's state by torch's names ("exp_avg").
    scalars: what the rule keeps once a parameter ("step").
    """

    extent: Extent
    arrays: Mapping[str, torch.Tensor]
    scalars: Mapping[str, float]

    def __post_init__(self) -> None:
        for key, array in self.arrays.items():
            if array.shape != (self.extent.numel,) or array.dtype != torch.float32:
                raise StoreError(
                    f"{key} of {self.extent.name!r} is {array.dtype} {tuple(array.shape)}, its"
                    f" extent has {self.extent.numel} elements of torch.float32"
                )

    def has_state(self, rule: Rule) -> bool:
        """Whether it has the state of `rule` beside the values. Raises ForeignError where it has
        that of another rule."""
        found, kept = {*self.arrays, *self.scalars} - {VALUE}, {*rule.arrays, *rule.scalars}
        if found and found != kept:
            raise ForeignError(
                f"the state of {self.extent.name!r} is {', '.join(sorted(found))},"
                f" {rule.name} keeps {', '.join(sorted(kept)) or 'none'}",
                hint="go on with the optimizer that made it",
            )
        return bool(found)


def even_shares(sizes: Iterable[tuple[str, int]], rank: int, width: int) -> list[Extent]:
    """The part of each parameter that `rank` of `width` ranks has where each has as much; without
    empty ones. sizes: names and elements."""
    parts = (Extent(name, n * rank // width, n * (rank + 1) // width) for name, n in sizes)
    return [part for part in parts if part.numel]


class PieceSource(Protocol):
    """What can give pieces: a stage's optimizer, a snapshot, another rank."""

    def extents(self) -> list[Extent]:
        """What this source has; disjoint."""

    def piece(self, extent: Extent) -> Piece:
        """A copy of the values of (a part of) one of its extents."""
