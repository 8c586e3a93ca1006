"""Which piece goes from whom to whom, so that every rank gets what it wants. Arithmetic only.

What a rank has itself costs nothing; else the source with the least cost gives, among those the one
that gives least so far, among those the first. Transfers are cut to a size, and taken target by
target in turn, so that many pairs are busy at once. All ranks make the same plan of the same
haves and wants, and do their parts of it in its order: the first transfer that is not done always
has both of its ranks at it or on the way to it, so none waits in a circle.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from roadtrain.errors import GoneError, StoreError
from roadtrain.stages.pieces import Extent

Cost = Callable[[int, int], float]  # source, target -> what an element costs


@dataclass(frozen=True)
class PieceTransfer:
    """`extent` goes from rank `source` to rank `target`, which may be the same."""

    extent: Extent
    source: int
    target: int


class _Holders:
    """By parameter, the cuts of all extents, and who has what lies between two cuts."""

    def __init__(self, haves: Sequence[Iterable[Extent]]) -> None:
        found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for rank, extents in enumerate(haves):
            for extent in extents:
                if extent.numel > 0:
                    found[extent.name].append((extent.start, extent.stop, rank))
        self._cuts: dict[str, list[int]] = {}
        self._ranks: dict[str, list[tuple[int, ...]]] = {}
        for name, spans in found.items():
            self._cuts[name], self._ranks[name] = _between_cuts(spans)

    def parts(self, needed: Extent) -> Iterator[tuple[Extent, tuple[int, ...]]]:
        """`wanted`, cut where an extent begins or ends, and who has each part."""
        cuts, ranks = self._cuts.get(needed.name, []), self._ranks.get(needed.name, [])
        at = needed.start
        while at < needed.stop:
            k = bisect_right(cuts, at) - 1
            inside = 0 <= k < len(ranks)
            after = cuts[k + 1] if k + 1 < len(cuts) else needed.stop
            stop = min(after, needed.stop)
            yield Extent(needed.name, at, stop), ranks[k] if inside else ()
            at = stop


def _between_cuts(
    spans: Sequence[tuple[int, int, int]],
) -> tuple[list[int], list[tuple[int, ...]]]:
    """`spans`: (start, stop, rank). Ranks of each run from one cut to the next."""
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for start, stop, rank in spans:
        begins[start].append(rank)
        ends[stop].append(rank)
    cuts, here, ranks = sorted({*begins, *ends}), dict[int, int](), list[tuple[int, ...]]()
    for cut in cuts[:-1]:
        for rank in ends[cut]:
            here[rank] -= 1
        for rank in begins[cut]:
            here[rank] = here.get(rank, 0) + 1
        ranks.append(tuple(sorted(rank for rank, count in here.items() if count)))
    return cuts, ranks


def plan_transfers(
    haves: Sequence[Iterable[Extent]],
    wants: Sequence[Iterable[Extent]],
    cost: Cost,
    most_elements: int,
) -> list[PieceTransfer]:
    """`haves`, `wants`: of every rank. `most_elements`: of one transfer. Raises GoneError, naming
    the first elements that nobody has."""
    holders, given = _Holders(haves), defaultdict[int, int](int)
    of_target = list[list[PieceTransfer]]()
    for target, wanted in enumerate(wants):
        transfers = list[PieceTransfer]()
        for extent in wanted:
            for part, ranks in holders.parts(extent):
                if not ranks:
                    raise GoneError(
                        f"elements {part.start} to {part.stop} of {part.name!r}, which rank"
                        f" {target} wants, are with no rank",
                        hint="a host with a part of the state is absent, or this is the state of"
                        " another model",
                    )
                source = min(ranks, key=lambda r: (r != target, cost(r, target), given[r], r))
                given[source] += part.numel if source != target else 0
                transfers += [
                    PieceTransfer(cut, source, target) for cut in cut_up(part, most_elements)
                ]
        of_target.append(transfers)
    turns = itertools.zip_longest(*of_target)
    return [one for turn in turns for one in turn if one is not None]


def cut_up(extent: Extent, most_elements: int) -> Iterator[Extent]:
    """`extent` in parts of `most_elements`, the last one of what is left."""
    for start in range(extent.start, extent.stop, most_elements):
        yield Extent(extent.name, start, min(start + most_elements, extent.stop))


def uncovered(haves: Sequence[Iterable[Extent]], needed: Iterable[Extent]) -> list[Extent]:
    """The parts of `wanted` that nobody has."""
    holders = _Holders(haves)
    return [part for extent in needed for part, ranks in holders.parts(extent) if not ranks]


def check_covered(received: Iterable[Extent], needed: Iterable[Extent], who: str) -> None:
    """Raises StoreError where a part of `wanted` has not come."""
    if lacking := uncovered([received], needed):
        first = lacking[0]
        raise StoreError(
            f"{who}: {sum(part.numel for part in lacking)} elements of its state are lacking,"
            f" first [{first.start}, {first.stop}) of {first.name!r}",
            hint="the pieces cover every parameter of the stage",
        )
