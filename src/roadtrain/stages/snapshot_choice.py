"""Which snapshot a start goes on from, of those that its hosts hold together. Pure.

Note "committed": a rank's marker is written once every rank has its part on its disk, so one
marker proves the snapshot whole at that moment, on all hosts together. It is announced once every
rank has its marker. So a start takes the newest of which anybody has a marker; where that is not
whole any more it is refused, unless some who hold parts of it have no marker: then it was never
announced, and the one before may be gone on from, which is said.

Note "forked": every start that makes a snapshot adds a link to the history. Of two histories one
must be the beginning of the other, and hold no snapshot after the step at which the other went on;
else two starts went on without each other (storage/history.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from roadtrain.errors import ForeignError, ForkedError, GoneError
from roadtrain.stages.pieces import Extent
from roadtrain.stages.transfers import uncovered
from roadtrain.storage.history import HistoryLink


class ParamEntry(msgspec.Struct, frozen=True):
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # that the model computes in
    rule: str  # that updates it, "" for none

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class SnapshotKey(msgspec.Struct, frozen=True, order=True):
    """Which snapshot: of which step, by which start of the run."""

    step: int
    start: str  # the identity of the last link of its history

    def __str__(self) -> str:
        return f"step-{self.step:010}.{self.start}"


class Description(msgspec.Struct, frozen=True):
    """What a marker says of its snapshot: the same on every rank."""

    job: str  # uuid
    step: int
    history: tuple[HistoryLink, ...]
    ranks: tuple[str, ...]  # that wrote it, as people call them
    params: tuple[ParamEntry, ...]
    parallelism: str = ""  # for people
    format: int = 1

    @property
    def key(self) -> SnapshotKey:
        return SnapshotKey(self.step, self.history[-1].id)


class SeenSnapshot(msgspec.Struct, frozen=True):
    """What a rank of this start sees of a snapshot in its directory."""

    key: SnapshotKey
    marker: Description | None  # of any rank
    extents: tuple[Extent, ...] = ()  # that are there whole
    parts: tuple[int, ...] = ()  # the ranks whose parts are there whole
    notes: tuple[str, ...] = ()  # about files that do not count


@dataclass(frozen=True)
class Choice:
    """`counts`: the snapshot that a start goes on from, None: there is none. `notes`: what is to
    be said. `dropped`: committed ones that do not count any more. `before`: the one before, which
    is kept beside it."""

    snapshot: Description | None
    notes: tuple[str, ...] = ()
    dropped: tuple[SnapshotKey, ...] = ()
    before: SnapshotKey | None = None


def choose(seen: Sequence[Sequence[SeenSnapshot]], *, go_back: bool = False) -> Choice:
    """`seen`: of every rank of this start. `go_back`: a person says that the newest snapshot is
    lost. Raises ForeignError, ForkedError, GoneError; see the notes."""
    committed = {one.key: one.marker for rank in seen for one in rank if one.marker is not None}
    halves = {one.key for rank in seen for one in rank} - committed.keys()
    notes = list(dict.fromkeys(note for rank in seen for one in rank for note in one.notes))
    notes += [
        f"the snapshot of step {key.step} was not committed when its run ended: it does not count"
        for key in sorted(halves)
    ]
    if not committed:
        return Choice(None, tuple(notes))
    _refuse_strangers([*committed.values()])
    dropped = list[SnapshotKey]()
    order = sorted(committed, reverse=True)
    for i, key in enumerate(order):
        told = committed[key]
        assert told is not None
        lacking = _lacking(told, seen)
        if not lacking:
            return Choice(
                told, tuple(notes), tuple(dropped), order[i + 1] if i + 1 < len(order) else None
            )
        own = [one for rank in seen for one in rank if one.key == key]
        announced = all(one.marker is not None for one in own)  # by all who see something of it
        if i + 1 == len(order) or (announced and not go_back):
            raise GoneError(
                f"the newest committed snapshot, of step {key.step}, is not whole: {lacking}",
                hint=_way_out(order[i + 1 :]),
            )
        why = "a person said so" if announced else "it was not committed on every host"
        dropped.append(key)
        notes.append(
            f"the snapshot of step {key.step} is not whole ({lacking}) and is given up, since {why}"
        )
    raise AssertionError("the last one is returned or refused")


def check_model(theirs: Sequence[ParamEntry], ours: Sequence[ParamEntry]) -> None:
    """Raises ForeignError that names the first difference between the snapshot's model and this
    one."""
    held, here = ({one.name: one for one in params} for params in (theirs, ours))
    for name in [*held, *here]:
        a, b = held.get(name), here.get(name)
        if a != b:
            raise ForeignError(
                f"the snapshot is of another model: {name!r} is {_entry_text(a)} there and {_entry_text(b)}"
                " here (shape, dtype, update rule)",
                hint="give the same model and optimizer, or another run directory",
            )


def merge_params(tables: Sequence[Sequence[ParamEntry]]) -> tuple[ParamEntry, ...]:
    """The parameters of all ranks by name. ForeignError where two mean different ones by one."""
    out: dict[str, ParamEntry] = {}
    for table in tables:
        for one in table:
            if out.setdefault(one.name, one) != one:
                raise ForeignError(
                    f"{one.name!r} is {_entry_text(one)} on one rank and {_entry_text(out[one.name])} on"
                    " another"
                )
    return tuple(out[name] for name in sorted(out))


def _refuse_strangers(told: Sequence[Description | None]) -> None:
    found = [one for one in told if one is not None]
    longest = max(found, key=lambda one: (len(one.history), one.step))
    for one in found:
        if one.job != longest.job:
            raise ForeignError(
                f"snapshots of two runs: step {longest.step} of {longest.job} and step"
                f" {one.step} of {one.job}",
                hint="give every host the same run directory; move the other one's away",
            )
        known = longest.history[: len(one.history)]
        later = longest.history[len(one.history) :]
        if known != one.history or (later and one.step > later[0].step):
            raise ForkedError(
                f"the snapshot of step {one.step} (start {one.history[-1].id}) and that of step"
                f" {longest.step} (start {longest.history[-1].id}) go on from the same step"
                " without each other",
                hint="move the snapshots away that are not meant; nothing was changed",
            )


def _lacking(told: Description, seen: Sequence[Sequence[SeenSnapshot]]) -> str:
    """What no host has of a snapshot, for people; "" where it is whole."""
    here = [one for rank in seen for one in rank if one.key == told.key]
    missing = uncovered(
        [one.extents for one in here], [Extent(p.name, 0, p.numel) for p in told.params]
    )
    if not missing:
        return ""
    whole = {part for one in here for part in one.parts}
    absent = [name for rank, name in enumerate(told.ranks) if rank not in whole]
    first = missing[0]
    return (
        f"{sum(e.numel for e in missing)} elements are on no host, the first of"
        f" {first.name!r} [{first.start}:{first.stop}]; absent is what"
        f" {', '.join(absent) or 'nobody'} wrote"
    )


def _way_out(older: Sequence[SnapshotKey]) -> str:
    back = "start with the hosts that hold it, or bring back their run directories"
    if not older:
        return back
    asked = "go_back, --new-store of a job"
    return f"{back}; going back to step {older[0].step} has to be asked for ({asked})"


def _entry_text(entry: ParamEntry | None) -> str:
    return "absent" if entry is None else f"({entry.shape}, {entry.dtype}, {entry.rule or 'none'})"
