"""exchange(): ranks send each other the pieces (values and optimizer state of ranges of parameters)
that they need.

Used when blocks move between stages, and when a job starts on hosts with separate disks. Needs
memory for one piece only. Assumes that the pieces of a rank do not change during the exchange.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import torch

from roadtrain.errors import LostError, RoadtrainError
from roadtrain.stages.control_links import ControlLinks
from roadtrain.stages.pieces import Extent, Piece, PieceSource
from roadtrain.stages.transfers import PieceTransfer, plan_transfers

PIECE_ELEMENTS = 1 << 20  # the most elements in one piece: 16 MiB with four fp32 arrays


def exchange(
    source: PieceSource,
    requested: Iterable[Extent],
    control: ControlLinks,
    *,
    most_elements: int = PIECE_ELEMENTS,
) -> Iterator[Piece]:
    """Return an iterator over the elements of `requested`, in pieces of at most `most_elements`
    elements. Collective.

    A piece that this rank lacks comes from the nearest rank that has it. Pieces are sent while the
    ranks iterate, so every rank must exhaust its iterator before it communicates with other ranks
    again.

    Raises GoneError if no rank has some of the elements, and DeadlineError or LostError if a rank
    is missing. A rank that cannot read a piece raises the error at the end of its iteration; the
    piece's receivers raise a LostError.
    """
    mine, kind = (source.extents(), list(requested)), tuple[list[Extent], list[Extent]]
    every = control.agree(mine, "the pieces that each rank has and needs", kind)
    haves, wants = zip(*every)
    plan = plan_transfers(haves, wants, control.distance, most_elements)
    own = [t for t in plan if control.rank in (t.source, t.target)]
    return _carry_out(own, source, control)


def _carry_out(
    plan: Sequence[PieceTransfer], source: PieceSource, control: ControlLinks
) -> Iterator[Piece]:
    """Run this rank's transfers, and yield the pieces that it needs. An error about an unreadable
    piece is raised at the end, because other ranks wait for this rank's other pieces."""
    wrong: RoadtrainError | None = None
    for transfer in plan:
        extent = transfer.extent
        what = f"{extent.name} [{extent.start}:{extent.stop}]"
        if transfer.source == control.rank:
            found = _read(source, extent)
            if transfer.target != control.rank:
                _send(found, control, transfer.target, what)
        else:
            found = _receive(extent, control, transfer.source, what)
        if not isinstance(found, Piece):
            wrong = wrong or found
        elif transfer.target == control.rank:
            yield found
    if wrong is not None:
        raise wrong


def _read(source: PieceSource, extent: Extent) -> Piece | RoadtrainError:
    try:
        return source.piece(extent)
    except RoadtrainError as error:
        return error


def _send(found: Piece | RoadtrainError, control: ControlLinks, target: int, what: str) -> None:
    if not isinstance(found, Piece):
        control.send_bytes(json.dumps({"error": str(found)}).encode(), target, what)
        return
    head = {"arrays": list(found.arrays), "scalars": dict(found.scalars)}
    control.send_bytes(json.dumps(head).encode(), target, what)
    for array in found.arrays.values():
        control.send(array.contiguous(), target, what)


def _receive(extent: Extent, control: ControlLinks, source: int, what: str) -> Piece | LostError:
    """Receive a piece, or return a LostError if the source could not read it."""
    head = json.loads(control.receive_bytes(source, what))
    if "error" in head:
        return LostError(f"{control.name(source)} could not read {what}: {head['error']}")
    arrays = dict[str, torch.Tensor]()
    for key in head["arrays"]:
        arrays[str(key)] = torch.empty(extent.numel, dtype=torch.float32)
        control.receive(arrays[str(key)], source, what)
    return Piece(extent, arrays, {str(k): float(v) for k, v in head["scalars"].items()})
