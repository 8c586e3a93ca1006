"""Lacking: which parts of the wanted extents have not come yet."""

from __future__ import annotations

from collections.abc import Iterable

from roadtrain.errors import StoreError
from roadtrain.stages.pieces import Extent


class Lacking:
    def __init__(self, wanted: Iterable[Extent]) -> None:
        # of each name, disjoint
        self._open: dict[str, list[Extent]] = {}
        for extent in wanted:
            self._open.setdefault(extent.name, []).append(extent)

    def came(self, extent: Extent) -> None:
        """Also what came before, and what nobody wants."""
        rest: list[Extent] = []
        for one in self._open.get(extent.name, ()):
            parts = (
                (one.start, min(one.stop, extent.start)),
                (max(one.start, extent.stop), one.stop),
            )
            if extent.stop <= one.start or one.stop <= extent.start:
                rest.append(one)
            else:
                rest += [Extent(one.name, start, stop) for start, stop in parts if start < stop]
        self._open[extent.name] = rest

    def check(self, who: str) -> None:
        """Raises StoreError where something has not come."""
        missing = [one for extents in self._open.values() for one in extents]
        if missing:
            first = missing[0]
            raise StoreError(
                f"{who}: {sum(one.numel for one in missing)} elements of its state are lacking,"
                f" first [{first.start}, {first.stop}) of {first.name!r}",
                hint="the pieces cover every parameter of the stage",
            )
