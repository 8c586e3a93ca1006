"""JobSnapshots: snapshots on disk of a job that has its state in the memory of its ranks (Rule 3).

    RUN/snapshots/step-N.START/rank-R.pieces, rank-R.json, rank-R.committed

Each rank writes its pieces (parameter values and optimizer state) into the directory of its host. A
snapshot is committed when the files of all ranks are durable, so a kill leaves the previous
snapshot intact. The two newest snapshots are kept. Later starts may read a snapshot with other
stages, widths and placements, and hosts need not share a directory.

If `replicas` is 2, pieces are also written to a host of another cluster (or to another host if
there is only one cluster), so that the run survives the loss of a host with its disks. Training
waits while a snapshot is written.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.options.schema import Count, value
from roadtrain.stages.control_links import ControlLinks, RankPlace
from roadtrain.stages.piece_exchange import PIECE_ELEMENTS, exchange
from roadtrain.stages.pieces import Extent, Piece, PieceSource
from roadtrain.stages.snapshot_choice import (
    Choice,
    Description,
    ParamEntry,
    SeenSnapshot,
    SnapshotKey,
    check_model,
    choose,
    merge_params,
)
from roadtrain.stages.snapshot_files import (
    PartReader,
    PartWriter,
    list_snapshots,
    remove_snapshot,
    set_snapshot_aside,
    write_marker,
)
from roadtrain.stages.transfers import cut_up
from roadtrain.storage.direct import in_ram, make_directory, sync_directory
from roadtrain.storage.history import HistoryLink
from roadtrain.storage.mark import Mark
from roadtrain.units import show_bytes

FOLDER = "snapshots"  # name of the snapshots' directory in the run directory


@value
class SnapshotOptions:
    """The options of snapshots. `every`: the number of steps between snapshots. `replicas`: the
    number of hosts that store each piece. `go_back`: whether a start continues from an older
    snapshot if the newest is incomplete. Raises ConfigError for invalid values."""

    every: Count = 100
    replicas: Annotated[int, Field(ge=1, le=2)] = 1
    go_back: bool = False


@dataclass(frozen=True)
class FoundSnapshot:
    """The snapshot from which a start continues. `blobs`: name -> bytes of the job's state that
    belongs to no parameter."""

    step: int
    blobs: Mapping[str, bytes]
    parallelism: str
    source: PieceSource
    links: ControlLinks

    def pieces(self, requested: Iterable[Extent]) -> Iterator[Piece]:
        """Iterate over the pieces of the `requested` extents. Collective: every rank must exhaust
        its iterator. Raises GoneError if no rank has the elements, DamagedError if a file is
        damaged, and LostError if another rank cannot send."""
        return exchange(self.source, requested, self.links)


class JobSnapshots:
    """The snapshots of a job. All ranks must create this object together. All methods are
    collective, except `describe` and `due`.

    `directory`: this host's run directory. `params`: the parameters of this rank's stage. `mark`:
    the run directory's record of the last step (storage/mark.py), on the first rank; None on
    others.
    """

    def __init__(
        self,
        directory: Path,
        links: ControlLinks,
        params: Sequence[ParamEntry],
        options: SnapshotOptions,
        *,
        parallelism: str = "",
        mark: Mark | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self.directory, self.options = directory / FOLDER, options
        self._links, self._parallelism, self._mark = links, parallelism, mark
        self._report = report if links.rank == 0 else lambda line: None
        kind = tuple[ParamEntry, ...]
        self._params = merge_params(links.agree(params, "the parameters of each stage", kind))
        other_of = buddies(links.places) if options.replicas > 1 else ()
        self._copies_of = [rank for rank, other in enumerate(other_of) if other == links.rank]
        self._job, self._history = "", tuple[HistoryLink, ...]()
        self._kept = list[SnapshotKey]()

    def describe(self) -> str:
        """Return a line for the log that says how much of the training a crash would lose (Rule
        3)."""
        where = "RAM" if in_ram(self.directory) else "files"
        copies = ", each part on two hosts" if self.options.replicas > 1 else ""
        return (
            f"state in RAM, a snapshot to {where} in {self.directory} every {self.options.every}"
            f" steps{copies}: a crash loses the steps since the last snapshot; training pauses for"
            " each snapshot"
        )

    def due(self, step: int) -> bool:
        return step % self.options.every == 0

    # a start

    def find(self) -> FoundSnapshot | None:
        """Find the snapshot from which this start continues, or None. It and the next older
        snapshot are kept; all others are removed or renamed.

        Raises GoneError if the newest snapshot is incomplete, ForkedError if two starts continued
        from the same step, ForeignError for snapshots of another run or model, and StaleError if
        the run directory records a later step.
        """
        here = self._links.together(self._list, "looking for snapshots")
        mine = [reader.seen() for _, reader in sorted(here.items())]
        seen = self._links.agree(mine, "the snapshots of each host", tuple[SeenSnapshot, ...])
        choice = choose(seen, go_back=self.options.go_back)
        chosen = choice.snapshot
        if chosen is not None:
            check_model(chosen.params, self._params)
        self._check_mark(chosen)
        for note in choice.notes:
            self._report(note)
        self._clear(here, choice)
        self._begin(chosen)
        if chosen is None:
            return None
        reader = here.get(chosen.key) or PartReader(self.directory / str(chosen.key), chosen.key)
        return FoundSnapshot(
            chosen.step, self._blobs_of(reader), chosen.parallelism, reader, self._links
        )

    def _list(self) -> dict[SnapshotKey, PartReader]:
        """Make the snapshots' directory durable, and return the snapshots in it."""
        make_directory(self.directory)
        sync_directory(self.directory.parent.parent)
        return list_snapshots(self.directory)

    def _check_mark(self, chosen: Description | None) -> None:
        def check() -> None:
            if self._mark is not None:
                job, step = ("", -1) if chosen is None else (chosen.job, chosen.step)
                self._mark.check(job, step, str(self.directory))

        self._links.same(check, "the last step that the run directory records")

    def _clear(self, here: Mapping[SnapshotKey, PartReader], choice: Choice) -> None:
        """Remove all snapshots except the chosen and the next older one. Then write the chosen
        snapshot's marker again, because it may only be in the page cache."""
        chosen = choice.snapshot
        kept = (choice.before, None if chosen is None else chosen.key)
        keep = [key for key in kept if key is not None]

        def clear() -> None:
            for key, reader in here.items():
                if key in choice.dropped:
                    set_snapshot_aside(reader.home)
                elif key not in keep:
                    remove_snapshot(reader.home)
            if chosen is not None and chosen.key in here:
                write_marker(here[chosen.key].home, self._links.rank, chosen)

        self._links.together(clear, "removing older snapshots")
        self._kept = keep

    def _begin(self, chosen: Description | None) -> None:
        """Continue the job of `chosen`, or begin a new job, and add this start to its history."""

        def link() -> list[str | int]:
            job = chosen.job if chosen is not None else str(uuid.uuid4())
            start = uuid.uuid4().hex[:16]
            if self._mark is not None:
                self._mark.adopt(job, -1 if chosen is None else chosen.step, start)
            return [job, start, int(time.time())]

        job, start, now = self._links.same(link, "the identity of this start")
        before = () if chosen is None else chosen.history
        step = -1 if chosen is None else chosen.step
        members = tuple(range(self._links.size))
        self._job, self._history = job, (*before, HistoryLink(start, step, members, now))

    def _blobs_of(self, reader: PartReader) -> dict[str, bytes]:
        """Return the blobs of the snapshot, which the first rank that has them sends to all
        ranks."""
        able = self._links.agree(bool(reader.parts), "which rank has the state of the job")
        source = able.index(True)
        what, own = "the state of the job", source == self._links.rank
        blobs = self._links.together(lambda: reader.blobs() if own else {}, what)
        whole: dict[str, bytes] = self._links.agree(blobs, what, dict[str, bytes])[source]
        return whole

    # a snapshot

    def save(self, step: int, source: PieceSource, blobs: Mapping[str, bytes]) -> None:
        """Write all pieces of `source` as the snapshot of `step`, which is committed when this
        method returns.

        `blobs`: name -> bytes of the job's state that belongs to no parameter; of several ranks,
        the first's value is used. A rank that cannot write raises FullError or another StoreError,
        all others a LostError with the same message, and earlier snapshots stay. If communication
        fails, the files stay, and the next start decides whether to use them.
        """
        begun = time.monotonic()
        description = Description(
            self._job,
            step,
            self._history,
            tuple(map(self._links.name, range(self._links.size))),
            self._params,
            self._parallelism,
        )
        home, what = self.directory / str(description.key), f"the snapshot of step {step}"
        shared = self._share(blobs, what)
        try:
            nbytes = self._write(home, description.key, source, shared, what)
        except RoadtrainError:
            if not self._links.broken:
                remove_snapshot(home)
            raise
        self._links.together(
            lambda: write_marker(home, self._links.rank, description), f"committing {what}"
        )
        self._forget(description.key)
        if self._mark is not None:
            self._mark.advance(step, now=True)
        seconds = time.monotonic() - begun
        self._report(
            f"snapshot of step {step}: this rank wrote {show_bytes(nbytes)} in {seconds:.1f} s"
        )

    def _share(self, blobs: Mapping[str, bytes], what: str) -> dict[str, bytes]:
        """Return the blobs of all ranks by name. what: the snapshot's name in errors."""
        every = self._links.agree(dict(blobs), f"{what}, state of the job", dict[str, bytes])
        return dict(ChainMap(*every))

    def _write(
        self,
        home: Path,
        key: SnapshotKey,
        source: PieceSource,
        blobs: Mapping[str, bytes],
        what: str,
    ) -> int:
        """Write this rank's files, and return their bytes when the files of all ranks are durable.
        what: the snapshot's name in errors."""
        together = self._links.together
        with contextlib.ExitStack() as open_:
            job, rank = self._job, self._links.rank
            part = together(lambda: open_.enter_context(PartWriter(home, job, key, rank)), what)
            mine = [cut for extent in source.extents() for cut in cut_up(extent, PIECE_ELEMENTS)]
            together(lambda: part.add_all(map(source.piece, mine)), what)
            if self.options.replicas > 1:
                together(lambda: part.add_all(self._copies(source, mine, what)), what)
            together(lambda: part.finish(blobs), what)
            return part.nbytes

    def _copies(self, source: PieceSource, mine: Sequence[Extent], what: str) -> Iterator[Piece]:
        """Iterate over the pieces of other ranks that this rank stores as copies. mine: the extents
        of this rank's own pieces. what: the snapshot's name in errors."""
        every = self._links.agree(mine, f"{what}, the pieces of each rank", list[Extent])
        has, of_others = set(mine), (e for rank in self._copies_of for e in every[rank])
        needed = dict.fromkeys(extent for extent in of_others if extent not in has)
        return exchange(source, needed, self._links)

    def _forget(self, key: SnapshotKey) -> None:
        """Record that all ranks have committed the snapshot `key`, and remove all but the two
        newest."""
        self._kept.append(key)
        while len(self._kept) > 2:
            remove_snapshot(self.directory / str(self._kept.pop(0)))


def buddies(places: Sequence[RankPlace]) -> tuple[int, ...]:
    """Return, for each rank, the rank that stores copies of its pieces: in the next cluster or,
    with one cluster, on the next host. Raises ConfigError if there is only one host."""
    for kinds in ([place.cluster for place in places], [place.host for place in places]):
        names = list(dict.fromkeys(kinds))
        if len(names) == 1:
            continue
        ranks = {name: [r for r, kind in enumerate(kinds) if kind == name] for name in names}
        out = list[int]()
        for rank, kind in enumerate(kinds):
            following = ranks[names[(names.index(kind) + 1) % len(names)]]
            out.append(following[ranks[kind].index(rank) % len(following)])
        return tuple(out)
    raise ConfigError(
        f"replicas = 2 needs two hosts, but all {len(places)} ranks are on one host",
        hint="remove replicas: both copies would be lost with that host",
    )
