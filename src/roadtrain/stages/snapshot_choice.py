"""Choose the snapshot from which a start (a launch of a job) continues. All functions are pure.

Note "committed": a rank writes its marker (a file) when the files of all ranks are on disk, so a
single marker proves that the snapshot was complete. A start chooses the newest snapshot with any
marker, and is refused if data of this snapshot has been lost. Exception: if a rank has data but no
marker, the snapshot was never announced, and the previous snapshot is chosen.

Note "forked": a snapshot's history has one link for each start that led to it; the link names the
step from which the start continued. The longer of two histories normally begins with the shorter,
and its next link names a step that is not earlier than the shorter history's snapshot. Otherwise
two starts continued from the same step independently, and a new start is refused
(storage/history.py).
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
    dtype: str  # the compute dtype
    rule: str  # the name of its update rule; "" if it has none

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class SnapshotKey(msgspec.Struct, frozen=True, order=True):
    """The identity of a snapshot: its step, and the start that wrote it."""

    step: int
    start: str  # the id of the last link of the snapshot's history

    def __str__(self) -> str:
        return f"step-{self.step:010}.{self.start}"


class Description(msgspec.Struct, frozen=True):
    """The content of a marker, the file that each rank writes when a snapshot is complete. Equal on
    all ranks."""

    job: str  # uuid
    step: int
    history: tuple[HistoryLink, ...]
    ranks: tuple[str, ...]  # the display names of the ranks that wrote the snapshot
    params: tuple[ParamEntry, ...]
    parallelism: str = ""  # for display
    format: int = 1

    @property
    def key(self) -> SnapshotKey:
        return SnapshotKey(self.step, self.history[-1].id)


class SeenSnapshot(msgspec.Struct, frozen=True):
    """A description of the files of a snapshot that one rank finds in its directory."""

    key: SnapshotKey
    marker: Description | None  # the marker of any rank that wrote it; None if there is none
    extents: tuple[Extent, ...] = ()  # the extents in the complete parts
    parts: tuple[int, ...] = ()  # the ranks whose parts are complete
    notes: tuple[str, ...] = ()  # messages about ignored files


@dataclass(frozen=True)
class Choice:
    """The snapshot from which a start continues, messages, and the other snapshots that it drops or
    keeps."""

    snapshot: Description | None  # the start continues from it; if None, the start begins at step 0
    notes: tuple[str, ...] = ()  # messages for the log
    dropped: tuple[SnapshotKey, ...] = ()  # newer committed snapshots that the start gives up
    before: SnapshotKey | None = None  # the next older snapshot, which is kept as well


def choose(seen: Sequence[Sequence[SeenSnapshot]], *, go_back: bool = False) -> Choice:
    """Choose the snapshot from which this start continues.

    `seen`: for each rank, the snapshots on its host. `go_back`: whether the user has declared the
    newest snapshot lost. Raises ForeignError if the snapshots belong to two different runs,
    ForkedError if two starts continued from the same step, and GoneError if the newest snapshot is
    incomplete.
    """
    found = [s for rank in seen for s in rank]
    committed = {s.key: s.marker for s in found if s.marker is not None}
    partial = {s.key for s in found} - committed.keys()
    notes = list(dict.fromkeys(note for s in found for note in s.notes))
    notes += [
        f"the snapshot of step {key.step} was not committed when its run ended: it is ignored"
        for key in sorted(partial)
    ]
    if not committed:
        return Choice(None, tuple(notes))
    _check_histories([*committed.values()])
    dropped = list[SnapshotKey]()
    order = sorted(committed, reverse=True)
    for i, key in enumerate(order):
        newest = committed[key]
        own = [s for s in found if s.key == key]
        lacking = _lacking(newest, own)
        if not lacking:
            return Choice(
                newest, tuple(notes), tuple(dropped), order[i + 1] if i + 1 < len(order) else None
            )
        # every rank that holds files of it also holds a marker
        announced = all(s.marker is not None for s in own)
        if i + 1 == len(order) or (announced and not go_back):
            raise GoneError(
                f"the newest committed snapshot, of step {key.step}, is incomplete: {lacking}",
                hint=_hint(order[i + 1 :]),
            )
        why = "go_back is set" if announced else "it was not committed on every host"
        dropped.append(key)
        notes.append(
            f"the snapshot of step {key.step} is incomplete ({lacking}) and is ignored, since {why}"
        )
    raise AssertionError("the loop over the snapshots ended without a choice or an error")


def check_model(theirs: Sequence[ParamEntry], ours: Sequence[ParamEntry]) -> None:
    """Raise ForeignError about the first parameter in which the snapshot's model (`theirs`) differs
    from this model (`ours`)."""
    held, here = ({param.name: param for param in params} for params in (theirs, ours))
    for name in [*held, *here]:
        a, b = held.get(name), here.get(name)
        if a != b:
            raise ForeignError(
                f"the snapshot is of another model: {name!r} is {_text(a)} there and {_text(b)}"
                " here (shape, dtype, update rule)",
                hint="use the same model and optimizer, or another run directory",
            )


def merge_params(tables: Sequence[Sequence[ParamEntry]]) -> tuple[ParamEntry, ...]:
    """Return the parameters of all ranks, sorted by name. Raises ForeignError if two ranks have
    different parameters of the same name."""
    out: dict[str, ParamEntry] = {}
    for table in tables:
        for param in table:
            if out.setdefault(param.name, param) != param:
                raise ForeignError(
                    f"parameter {param.name!r} is {_text(param)} on one rank and"
                    f" {_text(out[param.name])} on another (shape, dtype, update rule)"
                )
    return tuple(out[name] for name in sorted(out))


def _check_histories(found: Sequence[Description]) -> None:
    longest = max(found, key=lambda d: (len(d.history), d.step))
    for other in found:
        if other.job != longest.job:
            raise ForeignError(
                f"the hosts have snapshots of two runs: step {longest.step} of run {longest.job}"
                f" and step {other.step} of run {other.job}",
                hint="give every host the same run directory; move the other run's snapshots away",
            )
        common = longest.history[: len(other.history)]
        later = longest.history[len(other.history) :]
        if common != other.history or (later and other.step > later[0].step):
            raise ForkedError(
                f"the snapshots of step {other.step} (start {other.history[-1].id}) and step"
                f" {longest.step} (start {longest.history[-1].id}) continue from the same step"
                " independently",
                hint="move the unwanted snapshots away; nothing was changed",
            )


def _lacking(snapshot: Description, found: Sequence[SeenSnapshot]) -> str:
    """Return a message about the elements of a snapshot that no host has, or "". found: the files
    of the snapshot that each rank found."""
    missing = uncovered(
        [s.extents for s in found], [Extent(p.name, 0, p.numel) for p in snapshot.params]
    )
    if not missing:
        return ""
    whole = {part for s in found for part in s.parts}
    absent = [name for rank, name in enumerate(snapshot.ranks) if rank not in whole]
    first = missing[0]
    return (
        f"{sum(e.numel for e in missing)} elements are on no host, the first of"
        f" {first.name!r} [{first.start}:{first.stop}]; the missing parts were written by"
        f" {', '.join(absent) or 'no rank'}"
    )


def _hint(older: Sequence[SnapshotKey]) -> str:
    back = "start with the hosts that hold it, or restore their run directories"
    if not older:
        return back
    option = "go_back, or --new-store of a job"
    return f"{back}; to go back to step {older[0].step} instead, set {option}"


def _text(entry: ParamEntry | None) -> str:
    return "absent" if entry is None else f"({entry.shape}, {entry.dtype}, {entry.rule or 'none'})"
