"""TakenPieces: values and state that come in pieces, in any order, until a store takes them all.

They lie in a scratch file (storage/scratch.py), so a stage larger than memory can be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from roadtrain.chunks import PAGE, ParamSpec
from roadtrain.errors import ForeignError, StoreError
from roadtrain.kernels.rule import Rule
from roadtrain.stages.pieces import VALUE, Extent, Piece
from roadtrain.stages.transfers import uncovered
from roadtrain.storage.scratch import Scratch
from roadtrain.streaming.split import DTYPES
from roadtrain.units import round_up


class TakenPieces:
    """`params`: of the store; `rules`: of its parameter groups. `where`: a directory."""

    def __init__(self, params: Sequence[ParamSpec], rules: Sequence[Rule], where: Path) -> None:
        self._params, self._rules = params, rules
        self._index = {spec.name: i for i, spec in enumerate(params)}
        self._at = dict[tuple[int, str], int]()
        nbytes = 0
        for i, spec in enumerate(params):
            for key in (VALUE, *self._rule_of(spec, "arrays")):
                self._at[i, key] = nbytes
                nbytes += round_up(spec.numel * 4, PAGE)
        self._scratch = Scratch(where, nbytes)
        self._came = list[Extent]()
        self._scalars = dict[int, Mapping[str, float]]()  # of parameters that have a state

    def take(self, piece: Piece) -> None:
        """Raises ForeignError for state that the rule does not keep, or lacks."""
        name, start = piece.extent.name, piece.extent.start
        index = self._index[name]
        spec = self._params[index]
        arrays, scalars = self._rule_of(spec, "arrays"), self._rule_of(spec, "scalars")
        given = {*piece.arrays, *piece.scalars} - {VALUE}
        if spec.trainable and given and given != {*arrays, *scalars}:
            raise ForeignError(
                f"the state of {name!r} is {sorted(given)}, the optimizer keeps"
                f" {[*arrays, *scalars]}",
                hint="go on with the optimizer that made it",
            )
        if spec.trainable and given:
            self._scalars[index] = piece.scalars
        self._came.append(piece.extent)
        for key in (VALUE, *(arrays if given else ())):
            values = piece.arrays[key].numpy()
            self._scratch.write(values.view(np.uint8).data, self._at[index, key] + 4 * start)

    def check(self, who: str) -> None:
        """StoreError where something has not come."""
        wanted = [Extent(spec.name, 0, spec.numel) for spec in self._params]
        if missing := uncovered([self._came], wanted):
            first = missing[0]
            raise StoreError(
                f"{who}: elements {first.start} to {first.stop} of {first.name!r} did not come"
            )

    def values(self) -> dict[int, torch.Tensor]:
        """By index: fp32 where it is trained, else in its own dtype."""
        out = {}
        for i, spec in enumerate(self._params):
            if spec.numel:
                whole = self._tensor(i, VALUE)
                out[i] = whole if spec.trainable else whole.to(DTYPES[spec.dtype])
        return out

    def state(self) -> dict[int, dict[str, torch.Tensor | float]]:
        """By index, of parameters that were updated before."""
        return {
            i: {key: self._tensor(i, key) for key in self._rule_of(self._params[i], "arrays")}
            | {key: scalars[key] for key in self._rule_of(self._params[i], "scalars")}
            for i, scalars in self._scalars.items()
        }

    def _tensor(self, index: int, key: str) -> torch.Tensor:
        spec, at = self._params[index], self._at[index, key]
        flat = torch.frombuffer(self._scratch.map, dtype=torch.float32, count=spec.numel, offset=at)
        return flat.view(spec.shape)

    def _rule_of(self, spec: ParamSpec, kind: str) -> tuple[str, ...]:
        if not spec.trainable:
            return ()
        rule = self._rules[spec.group]
        return tuple(rule.arrays if kind == "arrays" else rule.scalars)
