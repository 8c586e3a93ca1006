"""OpenedStore: all directories of a store together. A store that is spread over servers is opened
share by share (open_part, create_part, publish_part).

A store lies in `DIR/gen-N/` of each of its directories. `DIR[0]/CURRENT` names the current N
(storage/current.py). The record of directory 0 is written last and commits a step.

Only directories that the caller names are read or changed, under a lock that is held until `close`.
Only files that roadtrain has made are deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from roadtrain.chunks import ChunkTable
from roadtrain.errors import (
    DamagedError,
    ForeignError,
    ForkedError,
    FullError,
    GoneError,
    StaleError,
)
from roadtrain.retry import undone_on_error
from roadtrain.storage.current import (
    NAME,
    Generation,
    brief_of,
    clear,
    current,
    generations,
    remove,
    repair,
    set_aside,
    switch,
)
from roadtrain.storage.direct import check_directory, in_ram, make_directory, sync_directory
from roadtrain.storage.file import FileTier
from roadtrain.storage.history import HistoryLink, Witness
from roadtrain.storage.lock import Locks
from roadtrain.storage.meta import StoreMeta

Accept = Callable[[str, int, str], None]


@dataclass
class OpenedStore:
    """An open store. `tiers[i]` holds the records in `directories[i]`. `step` is -1 before the
    first commit."""

    directories: tuple[Path, ...]
    meta: StoreMeta  # of directory 0
    tiers: list[FileTier]
    former: OpenedStore | None = None  # to be replaced by `publish`; owns the locks until then
    locks: Locks = field(default_factory=Locks)
    # reports of what opening has done to the directories
    events: list[str] = field(default_factory=list)

    @property
    def table(self) -> ChunkTable:
        return self.meta.table

    @property
    def step(self) -> int:
        return self.tiers[0].step

    @property
    def blob(self) -> bytes:
        return self.tiers[0].blob

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.events, *(t.note for t in self.tiers if t.note))

    @property
    def session(self) -> str:
        """The id of the session that trained the store's step, or of the session that has begun
        since. "" if unknown. See storage/ledger.py, Note "sessions"."""
        session = self.tiers[0].ledger.session
        return "" if session is None else session.id

    def begin_session(self) -> Witness:
        """Begin a new session. All later ledger records contain the id of this session. Writes
        nothing.

        Returns:
            A witness for the run directory, by which the next start recognizes the store.
        """
        before, begun = self.tiers[0].ledger.begin_session()
        self._name_session(self.tiers[0].ledger.session)
        return Witness(before, begun, tuple(range(len(self.tiers))))

    def _name_session(self, session: HistoryLink | None) -> None:
        for tier in self.tiers:
            tier.ledger.session = session

    def tier_of(self, chunk: int) -> FileTier:
        return self.tiers[self.meta.owners[chunk]]

    def commit(self, step: int, blob: bytes) -> None:
        """Commit the pending writes of all directories, all or nothing. The record of directory 0
        also contains the opaque bytes `blob`, such as the job state."""
        for tier in [*self.tiers[1:], self.tiers[0]]:
            tier.prepare(step, blob if tier is self.tiers[0] else b"")
        for tier in self.tiers:
            tier.committed(step)

    def publish(self) -> None:
        """Make this generation the current generation, and remove the former one. A step must have
        been committed."""
        assert self.step >= 0
        switch(self.directories[0], self.meta.generation)
        if self.former is not None:
            old, self.former = self.former, None
            self.locks, old.locks = old.locks, Locks()
            old.close()
            if old.directories[0].resolve() != self.directories[0].resolve():
                (old.directories[0] / NAME).unlink(missing_ok=True)
            for directory in old.directories:
                remove(directory / f"gen-{old.meta.generation}")

    def discard(self) -> None:
        """Close this generation and remove its files, for example after a failed write."""
        for tier in self.tiers:
            tier.close()
        for directory in reversed(self.directories):
            remove(directory / f"gen-{self.meta.generation}")
        self.locks.close()

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
        self.locks.close()


def create_store(
    directories: Sequence[str | Path],
    meta: StoreMeta,
    owners: Sequence[int],
    *,
    direct: bool = True,
    former: OpenedStore | None = None,
) -> OpenedStore:
    """Create empty files for every chunk, with chunk c in `directories[owners[c]]`.

    The caller then writes all chunks, and calls `commit` and `publish`. If `former` is not None,
    `publish` replaces that store.

    Raises:
        FullError: There is not enough room. Nothing was written.
        ForeignError: One of the directories already holds a store, and `former` is None.
        StoreError: Another process uses one of the directories.
    """
    paths = tuple(Path(d).absolute() for d in directories)
    assert len(owners) == len(meta.table.chunks) and set(owners) <= {*range(len(paths))}
    for path in paths:
        make_directory(path)
    locks = Locks() if former else Locks(paths)
    with undone_on_error(locks.close):
        if former is not None:
            former.locks.take(paths)
        else:
            _check_free(paths)
        copy_of = former.meta.generation if former else 0
        meta = replace(
            meta,
            owners=tuple(owners),
            directories=tuple(map(str, paths)),
            generation=max([copy_of, *(g.number for p in paths for g in generations(p))]) + 1,
            index=0,
            copy_of=copy_of,
        )
        store = OpenedStore(paths, meta, [], former, locks)
        with undone_on_error(store.discard):
            for index, path in enumerate(paths):
                store.tiers.append(_create(path, replace(meta, index=index), direct))
            if former is not None:  # `former` holds the same values
                store._name_session(former.tiers[0].ledger.session)
    return store


def _check_free(paths: Sequence[Path]) -> None:
    """Raise ForeignError if a directory holds a store. Otherwise remove unfinished generations."""
    for path in paths:
        if (path / NAME).exists():
            raise ForeignError(
                f"{path}: already holds a store", hint="open this store, or name another directory"
            )
    _check_unfinished(paths)
    _remove_unfinished(paths)


def open_store(
    directories: Sequence[str | Path],
    *,
    also: Sequence[str | Path] = (),
    direct: bool = True,
    accept: Accept = lambda job, step, session: None,
) -> OpenedStore | None:
    """Open the current store whose directories are among `directories` and `also`.

    Args:
        directories: The directories of the store, in any order.
        also: Directories that the store may have been in before.
        direct: Whether to use direct I/O.
        accept: Called with the store's job, step and session ("", -1 and "" if there is no store)
            before anything is changed. It raises an error to refuse the store.

    Returns:
        The store, whose directories are locked, or None if there is no store.

    Raises:
        GoneError: A directory of the store is missing.
        ForeignError: The directories hold different stores.
        ForkedError: The directories hold copies of one store that were trained separately.
        StaleError: One of the directories holds an older copy.
        DamagedError: A description or the newest record is damaged.
        StoreError: Another process has the store open.
    """
    named = list(dict.fromkeys(Path(d).absolute() for d in (*directories, *also)))
    for path in named:
        check_directory(path)
    locks = Locks(named)
    with undone_on_error(locks.close):
        store = _open(named, direct, accept)
        if store is None:
            locks.close()
        else:
            store.locks = locks
    return store


def _check_fallback(tiers: Sequence[FileTier]) -> None:
    """If a ledger record is damaged, read the whole store, and raise DamagedError if it is
    incomplete.

    The previous step is complete if a crash has torn the newest record. If the record was damaged
    after its commit, data of the previous step may be overwritten. Nothing is changed, so the user
    can still repair the record.
    """
    damaged = [path for tier in tiers for path in tier.ledger.damaged]
    if not damaged:
        return
    try:
        for tier in tiers:
            tier.check_all()
    except DamagedError as error:
        raise DamagedError(
            f"{damaged[0]}: the record in this file is damaged, and the data of step"
            f" {tiers[0].step}, the last step with an intact record, is incomplete:"
            f" {error}".partition("\nhint:")[0],
            hint=f"nothing was changed: restore {damaged[0].name} or the whole store from a copy;"
            " the disk may be failing",
        ) from error


def _open(named: Sequence[Path], direct: bool, accept: Accept) -> OpenedStore | None:
    found = [g for d in named if (g := current(d)) is not None] or _roots(named)
    if not found:
        _check_unfinished(named)
        accept("", -1, "")
        _remove_unfinished(named)
        return None
    newest = max(found, key=lambda g: g.number)
    meta = StoreMeta.load(newest.home)
    _check_jobs(named, meta)
    paths = tuple(_member(i, meta, named) for i in range(len(meta.directories)))
    store = OpenedStore(paths, meta, [], events=[g.note for g in found if g.note])
    with undone_on_error(store.close):
        for path in paths:
            home, step = path / f"gen-{meta.generation}", store.step if store.tiers else None
            own = StoreMeta.load(home)
            store.tiers.append(FileTier(home, own, step, direct=direct, settle=False))
        _check_sessions(store)
        _check_accepted(store, accept)
        _check_fallback(store.tiers)
        repair(paths[0], meta.generation)
        for tier in store.tiers:  # directory 0 first, because its record is the commit
            tier.settle()
        store.events += _clean(named, store)
    return store


def _check_sessions(store: OpenedStore) -> None:
    """Raise ForkedError if two directories hold the same step of different sessions."""
    first = store.tiers[0].ledger.session
    for path, tier in zip(store.directories, store.tiers):
        if (session := tier.ledger.session) != first:
            raise ForkedError(
                f"{store.directories[0]} and {path} hold step {store.step} of two sessions that"
                f" were trained separately: {first or '(unknown)'}; {session or '(unknown)'}",
                hint="nothing was changed: the directories belong to two copies of one store; name"
                " directories that were trained together",
            )


def _check_accepted(store: OpenedStore, accept: Accept) -> None:
    """Call `accept`. If it raises StaleError and a ledger record is damaged, raise DamagedError
    instead, because the damaged record may be that of the expected step."""
    try:
        accept(store.meta.job, store.step, store.session)
    except StaleError as error:
        damaged = [str(path) for tier in store.tiers for path in tier.ledger.damaged]
        if not damaged:
            raise
        raise DamagedError(
            f"{damaged[0]}: the newest record is damaged, and the record before it is of step"
            f" {store.step}: {error}".partition("\nhint:")[0],
            hint=(
                f"nothing was changed: restore {' and '.join(damaged)} from a copy (the disk may be"
                f" failing); without a copy, pass --new-store (run.new_store) to continue from step"
                f" {store.step} and to repeat the later steps"
            ),
        ) from error


def open_part(
    directory: str | Path, step: int | None = None, *, direct: bool = True, read_only: bool = False
) -> FileTier | None:
    """Open one server's share of a store that is spread over servers.

    Args:
        step: The step at which to open the share. None stands for the newest step.
        direct: Whether to use direct I/O.
        read_only: If True, nothing is written, removed or locked.

    Returns:
        The share, or None if `directory` holds none.
    """
    path = Path(directory).absolute()
    locks = Locks(() if read_only else [path])
    with undone_on_error(locks.close):
        now = _current_part(path)
        if now is None:
            for generation in () if read_only else generations(path):
                if not generation.recorded:
                    remove(generation.home)
            locks.close()
            return None
        tier = FileTier(now.home, StoreMeta.load(now.home), step, direct=direct, settle=False)
    tier.locks = locks
    tier.events += [now.note] if now.note else []
    with undone_on_error(tier.close):
        if not read_only:
            _check_fallback([tier])
            repair(path, now.number)
            tier.settle()
            tier.events += clear(path, now, tier.meta.copy_of)
    return tier


def create_part(
    directory: str | Path,
    meta: StoreMeta,
    *,
    direct: bool = True,
    anew: bool = False,
    keep: bool = False,
) -> FileTier:
    """Create one server's share of a store: empty files for the chunks of server `meta.index`.

    The directory may hold an earlier share of the same job and server, or any share at step 0,
    which `publish_part` replaces. If a RAM disk has no room for both, the earlier share is removed
    at once, unless `keep` is True.

    Args:
        direct: Whether to use direct I/O.
        anew: If True, no share is current until `publish_part` is called. If False, the earlier
            share stays current until then.
        keep: If True, `publish_part` renames the earlier share. If False, `publish_part` removes
            it, or renames it if it is at a later step than the new share.

    Raises:
        ForeignError: The directory holds a trained share of another job or server.
    """
    path = Path(directory).absolute()
    make_directory(path)
    locks = Locks([path])
    with undone_on_error(locks.close):
        old, events = _current_part(path), list[str]()
        if old is not None and old.step > 0 and old.part != (meta.job, meta.index):
            raise ForeignError(
                f"{path}: already holds step {old.step} of a store", hint="name another directory"
            )
        for other in generations(path):
            if old is not None and other.home == old.home:
                continue
            if other.recorded:
                events.append(set_aside(other))
            else:
                remove(other.home)
        if anew:
            switch(path, 0)
        number = 0 if old is None else old.number
        meta = replace(meta, generation=number + 1, copy_of=0 if keep else number)
        try:
            tier = _create(path, meta, direct)
        except FullError:
            if old is None or keep or not in_ram(path):
                raise
            (path / NAME).unlink(missing_ok=True)
            remove(old.home)
            events.append(
                f"{path}: no room in RAM for two copies: the copy of step {old.step} was removed to"
                " make room for the new copy"
            )
            tier = _create(path, meta, direct)
    tier.locks = locks
    tier.events += events
    return tier


def publish_part(directory: str | Path) -> list[str]:
    """Make the newest share in `directory` the current share. A step must have been committed.
    The former share is removed, or renamed if it is at a later step. Returns a report of each
    rename."""
    path = Path(directory).absolute()
    newest = generations(path)[-1]
    assert newest.step >= 0 and newest.brief is not None, newest
    switch(path, newest.number)
    return clear(path, newest, newest.brief.copy_of)


def _create(path: Path, meta: StoreMeta, direct: bool) -> FileTier:
    """Create the description of a store and empty files in `path`."""
    home = path / f"gen-{meta.generation}"
    with undone_on_error(lambda: remove(home)):
        make_directory(home)
        meta.write(home)
        return FileTier(home, meta, direct=direct, create=True)


def _current_part(path: Path) -> Generation | None:
    """Return the current generation of a server's directory. Without CURRENT, this is the newest
    one with a record. Raises DamagedError."""
    if (path / NAME).exists():
        return current(path)
    whole = [g for g in generations(path) if g.step >= 0]
    if not whole:
        return None
    best = max(whole, key=lambda g: (g.step, g.number))
    if not all(g.of(best) for g in whole):
        raise DamagedError(
            f"{path}: {[g.home.name for g in whole]} hold parts of several stores, without {NAME}",
            hint=f"write the number N of the right gen-N into {NAME}",
        )
    return _unnamed(best)


def _unnamed(found: Generation) -> Generation:
    """Return a copy of `found` with a note that CURRENT is missing."""
    home = found.home
    note = f"{home.parent}: there is no {NAME}; {home.name}, at step {found.step}, is used"
    return replace(found, note=note)


def _roots(named: Iterable[Path]) -> list[Generation]:
    """Return the complete generations of those stores whose directory 0 is in `named`, but has no
    file CURRENT. A generation is complete if its ledger in directory 0 of the store has a record,
    because this record is written last."""
    found = _all(d for d in named if not (d / NAME).exists())
    return [_unnamed(g) for g in found if g.step >= 0 and g.brief and g.brief.index == 0]


def _member(index: int, meta: StoreMeta, named: Sequence[Path]) -> Path:
    """Return the directory among `named` that has the number `index` in the store. Raises GoneError
    if there is none."""
    name = f"gen-{meta.generation}"
    for path in named:
        if not (path / name).is_dir():
            continue
        # if the description is damaged, load() raises the error
        if (brief_of(path / name) or StoreMeta.load(path / name)).index == index:
            return path
    seen = [f"{path} {_describe(path)}" for path in named if not (path / name).is_dir()]
    raise GoneError(
        f"directory {index} of the store's {len(meta.directories)} directories (created as"
        f" {meta.directories[index]}) is not among the {len(named)} directories that were named"
        + "".join(f"; {what}" for what in seen),
        hint="nothing was changed: mount the disk of this directory, or name the directory's new"
        " location in `store`; to move the store to other directories, name this directory in"
        " `moved_from`",
    )


def _describe(path: Path) -> str:
    if not path.is_dir():
        return "does not exist" if not path.exists() else "is not a directory"
    return "holds no part of the store" if any(path.iterdir()) else "is empty"


def _check_jobs(named: Iterable[Path], meta: StoreMeta) -> None:
    """Raise ForeignError if one of the directories has records of another job."""
    for generation in _all(named):
        counts = generation.recorded or generation.number == meta.generation
        if counts and generation.job not in (None, meta.job):
            raise ForeignError(
                f"{generation.home.parent}: holds data of job {generation.job}, but the store"
                f" belongs to job {meta.job}",
                hint="name the directories of one store",
            )


def _all(named: Iterable[Path]) -> list[Generation]:
    return [g for d in named for g in generations(d)]


def _clean(named: Iterable[Path], store: OpenedStore) -> list[str]:
    """Remove or rename all generations except that of `store`. Returns a report of each rename."""
    events, meta = [], store.meta
    for path in named:
        home = path if path in store.directories else store.directories[0]
        kept = next(g for g in generations(home) if g.number == meta.generation)
        events += clear(path, kept, meta.copy_of)
        if path != store.directories[0] and (path / NAME).exists():
            (path / NAME).unlink()  # it names a generation that was replaced
            sync_directory(path)
    return events


def _check_unfinished(named: Iterable[Path]) -> None:
    """Raise GoneError if a directory holds data that may be trained, but directory 0 of its store
    is not in `named`."""
    found = _all(named)
    begun = {(g.job, g.number) for g in found if g.brief is not None and g.brief.index == 0}
    for generation in found:
        alone = (generation.job, generation.number) not in begun
        if generation.step > 0 or (generation.step == 0 and alone):
            raise GoneError(
                f"{generation.home.parent}: holds step {generation.step} of a store, but the first"
                " directory of this store is not in the list of directories",
                hint="nothing was changed: mount all disks of the store, and name its directories",
            )


def _remove_unfinished(named: Iterable[Path]) -> None:
    """Remove generations that were never finished. Directory 0 is removed last: if a kill left only
    the other directories, these would seem to hold trained data."""
    for generation in sorted(_all(named), key=lambda g: g.brief is None or g.brief.index == 0):
        if generation.recorded and generation.step < 0:
            set_aside(generation)
        else:
            remove(generation.home)
    for directory in named:
        (directory / f"{NAME}.new").unlink(missing_ok=True)
