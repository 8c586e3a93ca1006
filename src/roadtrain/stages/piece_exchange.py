"""exchange(): every rank says what it has and what it wants, and gets it, piece by piece.

For stages that move at a step boundary, and for a start where each host has its own disk. Memory is
bounded: of one piece, whatever the size of the model. A rank gives while it takes, so it reads its
pieces to their end before it does anything else with the others.

Assumes: what a rank has does not change while the exchange lasts. Does NOT pass on what it got: two
ranks that want the same elements of a third one get them each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch

from roadtrain.errors import LostError, RoadtrainError
from roadtrain.stages.control_links import ControlLinks
from roadtrain.stages.pieces import Extent, Piece, PieceSource
from roadtrain.stages.transfers import PieceTransfer, plan_transfers

PIECE_ELEMENTS = 1 << 20  # of one piece at most: 16 MiB with four arrays of fp32


def exchange(
    source: PieceSource,
    requested: Iterable[Extent],
    control: ControlLinks,
    *,
    most_elements: int = PIECE_ELEMENTS,
) -> Iterator[Piece]:
    """The pieces of `wanted`, cut as they come: from this rank where it has them, else from the
    nearest one (`ControlLinks.distance`). Collective: the plan is made on return, the iterator is
    read to its end by all.

    Raises GoneError for elements that nobody has, DeadlineError, LostError; at the end, where a
    source failed, its error, and a LostError with its sentence on who wanted of it."""
    mine = msgspec.json.encode({"haves": source.extents(), "wants": list(requested)})
    told = control.gather(mine, "what each has and wants")
    every = [msgspec.json.decode(one, type=dict[str, list[Extent]]) for one in told]
    haves, wants = ([one[key] for one in every] for key in ("haves", "wants"))
    plan = plan_transfers(haves, wants, control.distance, most_elements)
    own = [t for t in plan if control.rank in (t.source, t.target)]
    return _carry_out(own, source, control)


def _carry_out(
    plan: Sequence[PieceTransfer], source: PieceSource, control: ControlLinks
) -> Iterator[Piece]:
    """What a source cannot give is raised at the end: until then others wait for the rest of it,
    and afterwards all ranks are at the same place."""
    wrong: RoadtrainError | None = None
    for transfer in plan:
        extent = transfer.extent
        what = f"{extent.name} [{extent.start}:{extent.stop}]"
        if transfer.source == control.rank:
            found = _read(source, extent)
            if transfer.target != control.rank:
                _send_piece(found, control, transfer.target, what)
        else:
            found = _receive_piece(extent, control, transfer.source, what)
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


def _send_piece(found: Piece | RoadtrainError, control: ControlLinks, target: int, what: str) -> None:
    if not isinstance(found, Piece):
        control.send_bytes(json.dumps({"error": str(found)}).encode(), target, what)
        return
    head = {"arrays": list(found.arrays), "scalars": dict(found.scalars)}
    control.send_bytes(json.dumps(head).encode(), target, what)
    for array in found.arrays.values():
        control.send(array.contiguous(), target, what)


def _receive_piece(extent: Extent, control: ControlLinks, source: int, what: str) -> Piece | LostError:
    """A LostError is what the source says; that it is gone is raised."""
    head = json.loads(control.receive_bytes(source, what))
    if "error" in head:
        return LostError(f"{control.name(source)} could not give {what}: {head['error']}")
    arrays = dict[str, torch.Tensor]()
    for key in head["arrays"]:
        arrays[str(key)] = torch.empty(extent.numel, dtype=torch.float32)
        control.receive(arrays[str(key)], source, what)
    return Piece(extent, arrays, {str(k): float(v) for k, v in head["scalars"].items()})
