"""exchange(): ranks tell each other which pieces they have and which pieces they need, and send the
pieces to each other.

An exchange takes place when blocks move between stages after a step. It also takes place when a job
starts on hosts with separate disks. An exchange needs memory for one piece only, whatever the size
of the model. A rank sends pieces while it receives pieces, so every rank must exhaust its iterator
before it communicates with other ranks again.

Assumes: the pieces of a rank do not change during the exchange. Does NOT forward received pieces:
if two ranks need the same elements, the source sends these elements to each of them.
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

PIECE_ELEMENTS = 1 << 20  # the most elements in one piece: 16 MiB with four fp32 arrays


def exchange(
    source: PieceSource,
    requested: Iterable[Extent],
    control: ControlLinks,
    *,
    most_elements: int = PIECE_ELEMENTS,
) -> Iterator[Piece]:
    """Return an iterator over the elements of `requested`, in pieces of at most `most_elements`
    elements. If this rank has a piece, the piece is read locally. Otherwise the nearest rank that
    has the piece sends the piece (`ControlLinks.distance`). Collective: the call only makes all
    ranks agree on a plan. The pieces are sent while the ranks iterate, so every rank must exhaust
    its iterator.

    Raises GoneError if no rank has some of the elements, and DeadlineError or LostError if a rank
    is missing. If a rank cannot read a piece that it has to send, this rank raises the error at the
    end of its iteration. The receivers of the piece raise a LostError with the same message."""
    mine = msgspec.json.encode({"haves": source.extents(), "wants": list(requested)})
    every = control.gather(mine, "the pieces that each rank has and needs")
    lists = [msgspec.json.decode(message, type=dict[str, list[Extent]]) for message in every]
    haves, wants = ([own[key] for own in lists] for key in ("haves", "wants"))
    plan = plan_transfers(haves, wants, control.distance, most_elements)
    own = [t for t in plan if control.rank in (t.source, t.target)]
    return _carry_out(own, source, control)


def _carry_out(
    plan: Sequence[PieceTransfer], source: PieceSource, control: ControlLinks
) -> Iterator[Piece]:
    """Run this rank's transfers in the order of the plan, and yield the pieces that this rank
    needs. If this rank cannot read a piece, the error is raised at the end, because other ranks
    wait for the other pieces of this rank."""
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
    """Receive a piece, or return a LostError if the source reports a failed read. Raises PeerError
    if the source is lost."""
    head = json.loads(control.receive_bytes(source, what))
    if "error" in head:
        return LostError(f"{control.name(source)} could not read {what}: {head['error']}")
    arrays = dict[str, torch.Tensor]()
    for key in head["arrays"]:
        arrays[str(key)] = torch.empty(extent.numel, dtype=torch.float32)
        control.receive(arrays[str(key)], source, what)
    return Piece(extent, arrays, {str(k): float(v) for k, v in head["scalars"].items()})
