"""Plan the transfers that send every rank the elements that it needs. Does NOT run the transfers.

A rank's own elements are preferred, then the cheapest source, then the source with the fewest
elements to send. Many pairs of ranks are busy at once. All ranks compute the same plan, and run
their transfers in its order, so deadlock is impossible: both ranks of the first unfinished transfer
have finished all of their earlier transfers.
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
    """A transfer of elements between ranks. If `source` and `target` are equal, nothing is sent."""

    extent: Extent
    source: int
    target: int


class _Holders:
    """An index of the ranks that hold each element."""

    def __init__(self, haves: Sequence[Iterable[Extent]]) -> None:
        found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for rank, extents in enumerate(haves):
            for extent in extents:
                if extent.numel > 0:
                    found[extent.name].append((extent.start, extent.stop, rank))
        self._held = {name: _between_cuts(spans) for name, spans in found.items()}

    def parts(self, needed: Extent) -> Iterator[tuple[Extent, tuple[int, ...]]]:
        """Cut `needed` into extents of which each is held by the same ranks, and yield each with
        these ranks."""
        cuts, ranks = self._held.get(needed.name, ([], []))
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
    """Return the sorted bounds of all spans, and the ranks that hold each interval between
    neighboring bounds. spans: (start, stop, rank)."""
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
    """Return the planned transfers.

    `haves`, `wants`: for each rank, the extents that it has and needs. `cost`: (source, target) ->
    cost of sending an element. `most_elements`: the largest number of elements of one transfer.
    Raises GoneError if a rank needs elements that no rank has.
    """
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
    """Cut `extent` into extents of at most `most_elements` elements."""
    for start in range(extent.start, extent.stop, most_elements):
        yield Extent(extent.name, start, min(start + most_elements, extent.stop))


def uncovered(haves: Sequence[Iterable[Extent]], needed: Iterable[Extent]) -> list[Extent]:
    """Return the ranges of `needed` that no rank has. `haves`: for each rank, the extents that it
    has."""
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
