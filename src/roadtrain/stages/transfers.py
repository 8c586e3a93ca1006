"""Plan the transfers that send every rank the elements that the rank needs. Does NOT run the
transfers.

If a rank itself has the elements that it needs, it uses these elements. Otherwise the cheapest
source sends the elements. If several sources are equally cheap, the plan takes the source that has
the fewest elements to send so far. If several of these sources have equally few elements to send,
the plan takes the lowest rank. Transfers are cut to a maximum size, and interleaved over the
targets, so that many pairs of ranks are busy at once. All ranks compute the same plan, and run
their transfers in the order of the plan. No deadlock is possible: both ranks of the first
unfinished transfer have finished all of their earlier transfers, so they can run this transfer.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from roadtrain.errors import GoneError, StoreError
from roadtrain.stages.pieces import Extent

Cost = Callable[[int, int], float]  # (source, target) -> cost per element


@dataclass(frozen=True)
class PieceTransfer:
    """A transfer of elements from rank `source` to rank `target`. If both are the same rank,
    nothing is sent."""

    extent: Extent
    source: int
    target: int


class _Holders:
    """An index of the ranks that hold each element. For each parameter, the index has the sorted
    bounds of all extents, and the ranks that hold the elements of each interval between neighboring
    bounds."""

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
        """Cut `needed` at the bounds of all extents. Yield each resulting extent, together with the
        ranks that hold the elements of this extent."""
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
    """Return the sorted bounds of all spans, and the ranks that hold the elements of each interval
    between neighboring bounds. spans: (start, stop, rank) for each range of elements that a rank
    holds."""
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
    """Return the planned transfers. `haves`: for each rank, the extents that the rank has. `wants`:
    for each rank, the extents that the rank needs. `cost`: (source, target) -> cost of sending an
    element from rank `source` to rank `target`. `most_elements`: the largest number of elements of
    one transfer. Raises GoneError if a rank needs elements that no rank has."""
    holders, load = _Holders(haves), defaultdict[int, int](int)
    of_target = list[list[PieceTransfer]]()
    for target, needed in enumerate(wants):
        transfers = list[PieceTransfer]()
        for extent in needed:
            for part, ranks in holders.parts(extent):
                if not ranks:
                    raise GoneError(
                        f"no rank has elements {part.start} to {part.stop} of {part.name!r}, which"
                        f" rank {target} needs",
                        hint="start the host that has this part of the state too, or check that the"
                        " state is of this model",
                    )
                source = min(ranks, key=lambda r: (r != target, cost(r, target), load[r], r))
                load[source] += part.numel if source != target else 0
                transfers += [
                    PieceTransfer(cut, source, target) for cut in cut_up(part, most_elements)
                ]
        of_target.append(transfers)
    turns = itertools.zip_longest(*of_target)
    return [transfer for turn in turns for transfer in turn if transfer is not None]


def cut_up(extent: Extent, most_elements: int) -> Iterator[Extent]:
    """Cut `extent` into extents of `most_elements` elements. The last of these extents may be
    smaller."""
    for start in range(extent.start, extent.stop, most_elements):
        yield Extent(extent.name, start, min(start + most_elements, extent.stop))


def uncovered(haves: Sequence[Iterable[Extent]], needed: Iterable[Extent]) -> list[Extent]:
    """Return the ranges of `needed` that no rank has. `haves`: for each rank, the extents that the
    rank has."""
    holders = _Holders(haves)
    return [part for extent in needed for part, ranks in holders.parts(extent) if not ranks]


def check_covered(received: Iterable[Extent], needed: Iterable[Extent], who: str) -> None:
    """Raise StoreError if some elements of `needed` were not received. `who`: the receiver's name
    in the message."""
    if lacking := uncovered([received], needed):
        first = lacking[0]
        raise StoreError(
            f"{who}: {sum(part.numel for part in lacking)} elements of the state are missing,"
            f" the first are [{first.start}, {first.stop}) of {first.name!r}",
            hint="load pieces that cover every parameter of the stage",
        )
