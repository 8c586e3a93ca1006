"""JobSnapshots: a job whose ranks hold its state in memory, as files of a step (Rule 3).

    RUN/snapshots/step-N.START/rank-R.pieces, rank-R.json, rank-R.committed

Each rank writes what it has into its own host's directory, in pieces under the parameters' names.
A snapshot is committed when every rank's part is durable (snapshot_choice.py), so a kill at any
moment leaves the one before. Two are kept. Any other start of the job can read it: with other
stages, widths and placements, on hosts that share a directory or have one each (piece_exchange.py).

With `replicas` 2 each part lies on a host of another cluster as well (of another host, where there
is one cluster), so that the run goes on when one of them is lost with its disks.

Assumes: training waits while a snapshot is written, so no second copy of the state is in memory.
Does NOT know optimizers: they give and take pieces.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
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

FOLDER = "snapshots"  # in the run directory


@value
class SnapshotOptions:
    """`every`: steps from one to the next. `replicas`: hosts that hold each part. `go_back`: a
    person says that the newest snapshot is lost. Raises ConfigError."""

    every: Count = 100
    replicas: Annotated[int, Field(ge=1, le=2)] = 1
    go_back: bool = False


@dataclass(frozen=True)
class FoundSnapshot:
    """What a start goes on from. `blobs`: what else the step consists of, as `save` was given
    it."""

    step: int
    blobs: Mapping[str, bytes]
    parallelism: str
    source: PieceSource
    links: ControlLinks

    def pieces(self, requested: Iterable[Extent]) -> Iterator[Piece]:
        """Collective; read to the end by all. Raises GoneError, DamagedError, LostError."""
        return exchange(self.source, requested, self.links)


class JobSnapshots:
    """`directory`: this host's run directory. `params`: of this rank's stage. `mark`: what the run
    directory knows, on the first rank (storage/mark.py). Collective, as all its methods. Invariant:
    `_kept` are committed, oldest first, two at most."""

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
        told = links.gather(msgspec.json.encode(tuple(params)), "the parameters of each stage")
        tables = [msgspec.json.decode(one, type=tuple[ParamEntry, ...]) for one in told]
        self._params = merge_params(tables)
        other_of = buddies(links.places) if options.replicas > 1 else ()
        self._copies_of = [rank for rank, other in enumerate(other_of) if other == links.rank]
        self._job, self._history = "", tuple[HistoryLink, ...]()
        self._kept = list[SnapshotKey]()

    def describe(self) -> str:
        """What a state in memory is worth, for people (Rule 3)."""
        where = "RAM" if in_ram(self.directory) else "files"
        copies = ", each part on two hosts" if self.options.replicas > 1 else ""
        return (
            f"state in RAM, a snapshot to {where} in {self.directory} every {self.options.every}"
            f" steps{copies}: a crash loses the steps since the last one; training waits while it"
            " is written"
        )

    def due(self, step: int) -> bool:
        return step % self.options.every == 0

    # a start

    def find(self) -> FoundSnapshot | None:
        """The snapshot that this start goes on from; None: from the beginning. What does not count
        is removed or set aside, and said. Raises GoneError where the newest one is not whole,
        ForkedError, ForeignError (also for another model), StaleError (by the mark)."""
        here = self._links.together(self._list, "looking for snapshots")
        mine = msgspec.json.encode([one.seen() for _, one in sorted(here.items())])
        every = self._links.gather(mine, "the snapshots of each host")
        seen = [msgspec.json.decode(one, type=tuple[SeenSnapshot, ...]) for one in every]
        choice = choose(seen, go_back=self.options.go_back)
        told = choice.snapshot
        if told is not None:
            check_model(told.params, self._params)
        self._check_mark(told)
        for note in choice.notes:
            self._report(note)
        self._clear(here, choice)
        self._begin(told)
        if told is None:
            return None
        reader = here.get(told.key) or PartReader(self.directory / str(told.key), told.key)
        return FoundSnapshot(
            told.step, self._blobs_of(reader), told.parallelism, reader, self._links
        )

    def _list(self) -> dict[SnapshotKey, PartReader]:
        """The directory is durable too: whoever made the run's may not have seen to that."""
        make_directory(self.directory)
        sync_directory(self.directory.parent.parent)
        return list_snapshots(self.directory)

    def _check_mark(self, told: Description | None) -> None:
        def check() -> None:
            if self._mark is not None:
                job, step = ("", -1) if told is None else (told.job, told.step)
                self._mark.check(job, step, str(self.directory))

        self._links.same(check, "which snapshot the run directory knows")

    def _clear(self, here: Mapping[SnapshotKey, PartReader], choice: Choice) -> None:
        """Nothing is left but what counts and the one before it, so that a half which filled the
        disk is gone first. A marker that is there may be in the system's memory only, since its
        writer was killed: what counts is marked anew."""
        told = choice.snapshot
        kept = (choice.before, None if told is None else told.key)
        keep = [key for key in kept if key is not None]

        def clear() -> None:
            for key, reader in here.items():
                if key in choice.dropped:
                    set_snapshot_aside(reader.home)
                elif key not in keep:
                    remove_snapshot(reader.home)
            if told is not None and told.key in here:
                write_marker(here[told.key].home, self._links.rank, told)

        self._links.together(clear, "removing older snapshots")
        self._kept = keep

    def _begin(self, told: Description | None) -> None:
        """One more link of the history, of the job that `told` is of or of a new one."""

        def link() -> list[str | int]:
            job = told.job if told is not None else str(uuid.uuid4())
            start = uuid.uuid4().hex[:16]
            if self._mark is not None:
                self._mark.adopt(job, -1 if told is None else told.step, start)
            return [job, start, int(time.time())]

        job, start, now = self._links.same(link, "the identity of this start")
        before = () if told is None else told.history
        step = -1 if told is None else told.step
        members = tuple(range(self._links.size))
        self._job, self._history = job, (*before, HistoryLink(start, step, members, now))

    def _blobs_of(self, reader: PartReader) -> dict[str, bytes]:
        """From the first rank that sees any part: each part has all of them."""
        able = self._links.agree(bool(reader.parts), "who has the state of the job")
        giver = able.index(True)
        told = self._links.together(
            lambda: msgspec.msgpack.encode(reader.blobs()) if giver == self._links.rank else b"",
            "the state of the job",
        )
        whole = self._links.gather(told, "the state of the job")[giver]
        return msgspec.msgpack.decode(whole, type=dict[str, bytes])

    # a snapshot

    def save(self, step: int, source: PieceSource, blobs: Mapping[str, bytes]) -> None:
        """All of `source`, of `step`, committed on return. `blobs`: what else the step consists of;
        of a name that several ranks give the first one's counts. Raises FullError and others
        where it failed, and LostError with the same sentence on the other ranks; the snapshots
        before are as they were. Where ranks cannot talk, some may hear that all parts are durable
        and others not: what is written stays then, and the next start judges it."""
        begun = time.monotonic()
        told = Description(
            self._job,
            step,
            self._history,
            tuple(map(self._links.name, range(self._links.size))),
            self._params,
            self._parallelism,
        )
        home, what = self.directory / str(told.key), f"the snapshot of step {step}"
        shared = self._share(blobs, what)
        try:
            nbytes = self._write(home, told.key, source, shared, what)
        except RoadtrainError:
            if not self._links.broken:
                remove_snapshot(home)
            raise
        self._links.together(
            lambda: write_marker(home, self._links.rank, told), f"committing {what}"
        )
        self._forget(told.key)
        if self._mark is not None:
            self._mark.advance(step, now=True)
        seconds = time.monotonic() - begun
        self._report(
            f"snapshot of step {step}: {show_bytes(nbytes)} of this rank in {seconds:.1f} s"
        )

    def _share(self, blobs: Mapping[str, bytes], what: str) -> dict[str, bytes]:
        """All ranks' blobs, which every part holds."""
        told = self._links.gather(msgspec.msgpack.encode(dict(blobs)), f"{what}, state of the job")
        shared: dict[str, bytes] = {}
        for one in told:
            for name, blob in msgspec.msgpack.decode(one, type=dict[str, bytes]).items():
                shared.setdefault(name, blob)
        return shared

    def _write(
        self,
        home: Path,
        key: SnapshotKey,
        source: PieceSource,
        blobs: Mapping[str, bytes],
        what: str,
    ) -> int:
        """This rank's part, and with replicas copies of others; on return all have theirs."""
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
        """What this rank keeps of others."""
        told = self._links.gather(msgspec.json.encode(mine), f"{what}, what each one has")
        every = [msgspec.json.decode(one, type=list[Extent]) for one in told]
        has, of_others = set(mine), (e for rank in self._copies_of for e in every[rank])
        wanted = dict.fromkeys(one for one in of_others if one not in has)
        return exchange(source, wanted, self._links)

    def _forget(self, key: SnapshotKey) -> None:
        """The one before the one before, now that all ranks have committed `key`."""
        self._kept.append(key)
        while len(self._kept) > 2:
            remove_snapshot(self.directory / str(self._kept.pop(0)))


def buddies(places: Sequence[RankPlace]) -> tuple[int, ...]:
    """Of each rank, the one that keeps a copy of its part: of the next cluster, or of the next host
    where there is one cluster. Raises ConfigError where there is one host."""
    for kinds in ([one.cluster for one in places], [one.host for one in places]):
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
        f"replicas = 2 and all {len(places)} ranks are on one host",
        hint="leave replicas out: both copies would be lost with that host",
    )
