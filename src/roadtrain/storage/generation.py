"""OpenedStore: all directories of a store together; open_store, create_store. And one server's part
of a store that rests on several hosts: open_part, create_part, publish_part.

A store rests in `DIR/gen-N/` of each of its directories; `DIR[0]/CURRENT` names N
(storage/current.py). A generation that was half written (a kill while creating or converting) is
nothing, and is removed. A step is committed by directory 0's record, written after all others hold
theirs.

Only directories that were given are read, written or cleaned, each under a lock from opening or
creating to `close`; where a store was made is written in it for people, and is not followed.
Deletes only files that it makes.
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
    counting,
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
    """`tiers[i]` is directory i. `step` -1: created and not yet committed."""

    directories: tuple[Path, ...]
    meta: StoreMeta  # of directory 0
    tiers: list[FileTier]
    former: OpenedStore | None = None  # what `publish` replaces; until then the locks are its
    locks: Locks = field(default_factory=Locks)
    # what happened to the directories when it was opened
    said: list[str] = field(default_factory=list)

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
        return (*self.said, *(t.note for t in self.tiers if t.note))

    @property
    def session(self) -> str:
        """The identity of the session that trained the store's step, or of the one that was begun
        here; "" where it is not known. See storage/ledger.py, Note "sessions"."""
        session = self.tiers[0].ledger.session
        return "" if session is None else session.id

    def begin_session(self) -> Witness:
        """Every record that is written from now on names a new session. Nothing is written here.

        Returns:
            What a run directory keeps to recognize the store, whether or not the new session comes
            to commit a step.
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
        """All that was written counts, or nothing: the other directories first, directory 0 is
        the commit."""
        for tier in [*self.tiers[1:], self.tiers[0]]:
            tier.prepare(step, blob if tier is self.tiers[0] else b"")
        for tier in self.tiers:
            tier.committed(step)

    def publish(self) -> None:
        """This generation counts from now on; the former one is removed. Only after the first
        commit."""
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
        """Close and remove a generation that is not to count."""
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
    """Empty files for every chunk, chunk c in `directories[owners[c]]`. The caller writes all,
    commits, publishes. FullError with both numbers before anything is written; ForeignError
    where a store is there already, StoreError where another process is at work in one of the
    directories."""
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
            if former is not None:  # the same values in other files
                store._name_session(former.tiers[0].ledger.session)
    return store


def _check_free(paths: Sequence[Path]) -> None:
    """No store is in `paths`; what a killed process half made is removed."""
    for path in paths:
        if (path / NAME).exists():
            raise ForeignError(
                f"{path}: holds a store already", hint="open it, or name another directory"
            )
    _check_unborn(paths)
    _remove_unborn(paths)


def open_store(
    directories: Sequence[str | Path],
    *,
    also: Sequence[str | Path] = (),
    direct: bool = True,
    accept: Accept = lambda job, step, session: None,
) -> OpenedStore | None:
    """Open the store that counts among `directories` and `also`, whichever of them hold its parts.

    Args:
        directories: Where the store rests, in any order.
        also: Directories that it may have rested in before.
        direct: Whether to read and write past the page cache.
        accept: Called with the store's job, step and session ("", -1 and "" where nothing is there)
            before anything is written or removed. Raises where training must not go on from that.

    Returns:
        The store, locked, or None where nothing is there.

    Raises:
        GoneError: A directory of the store is missing.
        ForeignError: The directories hold different stores.
        ForkedError: They hold copies of one store that were trained apart from each other.
        StaleError: One of them is an older copy.
        DamagedError: A description or the newest record is damaged.
        StoreError: Another process has it open.
    """
    given = list(dict.fromkeys(Path(d).absolute() for d in (*directories, *also)))
    for path in given:
        check_directory(path)
    locks = Locks(given)
    with undone_on_error(locks.close):
        store = _open(given, direct, accept)
        if store is None:
            locks.close()
        else:
            store.locks = locks
    return store


def _check_fallback(tiers: Sequence[FileTier]) -> None:
    """A record that is torn belongs to a step that never counted, and the step before it is
    whole. One that counted and is damaged since does not: the next step may have begun to
    overwrite what the older record names. Then nothing is written, so that the record can still
    be mended. It costs a read of the store, where a record is damaged only. Raises
    DamagedError."""
    damaged = [path for tier in tiers for path in tier.ledger.damaged]
    if not damaged:
        return
    try:
        for tier in tiers:
            tier.check_all()
    except DamagedError as error:
        raise DamagedError(
            f"{damaged[0]}: its record is damaged, and step {tiers[0].step}, of the record before,"
            f" is not whole any more: {error}".partition("\nhint:")[0],
            hint=(
                f"nothing was changed: restore {damaged[0].name}, or the store, from a copy; the"
                " disk may be failing"
            ),
        ) from error


def _open(given: Sequence[Path], direct: bool, accept: Accept) -> OpenedStore | None:
    found = [g for d in given if (g := counting(d)) is not None] or _roots(given)
    if not found:
        _check_unborn(given)
        accept("", -1, "")
        _remove_unborn(given)
        return None
    newest = max(found, key=lambda g: g.number)
    meta = StoreMeta.load(newest.home)
    _check_jobs(given, meta)
    paths = tuple(_member(i, meta, given) for i in range(len(meta.directories)))
    store = OpenedStore(paths, meta, [], said=[g.note for g in found if g.note])
    with undone_on_error(store.close):
        for path in paths:
            home, step = path / f"gen-{meta.generation}", store.step if store.tiers else None
            own = StoreMeta.load(home)
            store.tiers.append(FileTier(home, own, step, direct=direct, settle=False))
        _check_sessions(store)
        _check_accepted(store, accept)
        _check_fallback(store.tiers)
        repair(paths[0], meta.generation)
        for tier in store.tiers:  # directory 0, whose record decides, first
            tier.settle()
        store.said += _clean(given, store)
    return store


def _check_sessions(store: OpenedStore) -> None:
    """Raise ForkedError where two directories hold the same step of different sessions."""
    first = store.tiers[0].ledger.session
    for path, tier in zip(store.directories, store.tiers):
        if (session := tier.ledger.session) != first:
            raise ForkedError(
                f"{store.directories[0]} and {path} hold step {store.step} of two sessions that"
                f" trained apart from each other: {first or 'one that is not known'};"
                f" {session or 'one that is not known'}",
                hint=(
                    "nothing was changed: they are parts of two copies of one store; name the"
                    " directories that were trained together"
                ),
            )


def _check_accepted(store: OpenedStore, accept: Accept) -> None:
    """Raise what `accept` does, and DamagedError where the store is behind because its newest
    record is damaged."""
    try:
        accept(store.meta.job, store.step, store.session)
    except StaleError as error:
        damaged = [str(path) for tier in store.tiers for path in tier.ledger.damaged]
        if not damaged:
            raise
        raise DamagedError(
            f"{damaged[0]}: the newest record is damaged, and the one before it is of step"
            f" {store.step}: {error}".partition("\nhint:")[0],
            hint=(
                f"nothing was changed: restore {' and '.join(damaged)} from a copy, the disk may be"
                f" failing; without a copy, --new-store (run.new_store) goes back to step"
                f" {store.step} and repeats the steps after it"
            ),
        ) from error


def open_part(
    directory: str | Path, step: int | None = None, *, direct: bool = True, look: bool = False
) -> FileTier | None:
    """One server's part of a store that rests on several hosts: at `step`, or the newest. None
    where none is. `look`: only to see what it is; nothing is written or removed."""
    path = Path(directory).absolute()
    locks = Locks(() if look else [path])
    with undone_on_error(locks.close):
        now = _counting_part(path)
        if now is None:
            for generation in () if look else generations(path):
                if not generation.recorded:
                    remove(generation.home)
            locks.close()
            return None
        tier = FileTier(now.home, StoreMeta.load(now.home), step, direct=direct, settle=False)
    tier.locks = locks
    tier.said += [now.note] if now.note else []
    with undone_on_error(tier.close):
        if not look:
            _check_fallback([tier])
            repair(path, now.number)
            tier.settle()
            tier.said += clear(path, now, tier.meta.copy_of)
    return tier


def create_part(
    directory: str | Path,
    meta: StoreMeta,
    *,
    direct: bool = True,
    anew: bool = False,
    keep: bool = False,
) -> FileTier:
    """Empty files for the chunks of server `meta.index`. It counts from `publish_part` on; until
    then what is there does (`anew`: nothing), and takes its room beside it; in RAM, where that is
    too little, it goes first. ForeignError where another part has trained; this one (it has missed
    steps that its replicas have), or one that has not trained (its store was never finished
    elsewhere), is replaced; `keep`: what is replaced is renamed, whatever its step.
    """
    path = Path(directory).absolute()
    make_directory(path)
    locks = Locks([path])
    with undone_on_error(locks.close):
        old, said = _counting_part(path), list[str]()
        if old is not None and old.step > 0 and old.part != (meta.job, meta.index):
            raise ForeignError(
                f"{path}: holds step {old.step} of a store already", hint="name another directory"
            )
        for other in generations(path):
            if old is not None and other.home == old.home:
                continue
            if other.recorded:
                said.append(set_aside(other))
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
            said.append(
                f"{path}: no room in RAM for two copies: that of step {old.step} goes before the"
                " new one comes"
            )
            tier = _create(path, meta, direct)
    tier.locks = locks
    tier.said += said
    return tier


def publish_part(directory: str | Path) -> list[str]:
    """What `create_part` has made there counts, after its first commit; then what it replaces is
    removed, or renamed where it is at a later step. Lines that say so."""
    path = Path(directory).absolute()
    newest = generations(path)[-1]
    assert newest.step >= 0 and newest.brief is not None, newest
    switch(path, newest.number)
    return clear(path, newest, newest.brief.copy_of)


def _create(path: Path, meta: StoreMeta, direct: bool) -> FileTier:
    """Empty files for the chunks of directory `meta.index`, beside what describes them."""
    home = path / f"gen-{meta.generation}"
    with undone_on_error(lambda: remove(home)):
        make_directory(home)
        meta.write(home)
        return FileTier(home, meta, direct=direct, create=True)


def _counting_part(path: Path) -> Generation | None:
    """What counts in the directory of one server; also without CURRENT, once it has a record.
    DamagedError."""
    if (path / NAME).exists():
        return counting(path)
    whole = [g for g in generations(path) if g.step >= 0]
    if not whole:
        return None
    best = max(whole, key=lambda g: (g.step, g.number))
    if not all(g.of(best) for g in whole):
        raise DamagedError(
            f"{path}: {[g.home.name for g in whole]} hold parts of several stores, and there is no"
            f" {NAME}",
            hint=f"write the N of the gen-N that counts into {NAME}",
        )
    return _unnamed(best)


def _unnamed(counts: Generation) -> Generation:
    """With the note that no CURRENT says so."""
    home = counts.home
    note = f"{home.parent}: there is no {NAME}; {home.name}, at step {counts.step}, counts"
    return replace(counts, note=note)


def _roots(given: Iterable[Path]) -> list[Generation]:
    """Where no CURRENT says what counts (a kill before it was written, or it was lost): first
    directories that have a record. All others have theirs by then."""
    found = _all(d for d in given if not (d / NAME).exists())
    return [_unnamed(g) for g in found if g.step >= 0 and g.brief and g.brief.index == 0]


def _member(index: int, meta: StoreMeta, given: Sequence[Path]) -> Path:
    """The given directory that holds directory `index` of the store."""
    name = f"gen-{meta.generation}"
    for path in given:
        if not (path / name).is_dir():
            continue
        # what is damaged says so
        if (brief_of(path / name) or StoreMeta.load(path / name)).index == index:
            return path
    seen = [f"{path} {_looks(path)}" for path in given if not (path / name).is_dir()]
    raise GoneError(
        f"directory {index} of the store's {len(meta.directories)} (made as"
        f" {meta.directories[index]}) is none of the {len(given)} given"
        + "".join(f"; {what}" for what in seen),
        hint=(
            "nothing was changed: mount its disk, or name in `store` the place where it is now; to"
            " move the store out of it, name it in `moved_from`"
        ),
    )


def _looks(path: Path) -> str:
    """What a directory that holds no part of a store looks like, for people."""
    if not path.is_dir():
        return "does not exist" if not path.exists() else "is no directory"
    return "holds no part of it" if any(path.iterdir()) else "is empty"


def _check_jobs(given: Iterable[Path], meta: StoreMeta) -> None:
    """ForeignError for what another job has recorded in a given directory."""
    for generation in _all(given):
        counts = generation.recorded or generation.number == meta.generation
        if counts and generation.job not in (None, meta.job):
            raise ForeignError(
                f"{generation.home.parent}: holds job {generation.job}, the store is job"
                f" {meta.job}",
                hint="name the directories of one store",
            )


def _all(given: Iterable[Path]) -> list[Generation]:
    return [g for d in given for g in generations(d)]


def _clean(given: Iterable[Path], store: OpenedStore) -> list[str]:
    """Nothing but `store` is left in the given directories. Lines about what was renamed."""
    said, meta = [], store.meta
    for path in given:
        home = path if path in store.directories else store.directories[0]
        counts = next(g for g in generations(home) if g.number == meta.generation)
        said += clear(path, counts, meta.copy_of)
        if path != store.directories[0] and (path / NAME).exists():
            (path / NAME).unlink()  # of a generation that another one has replaced
            sync_directory(path)
    return said


def _check_unborn(given: Iterable[Path]) -> None:
    """GoneError for a generation whose first directory is not here: it may have trained."""
    found = _all(given)
    begun = {(g.job, g.number) for g in found if g.brief is not None and g.brief.index == 0}
    for generation in found:
        alone = (generation.job, generation.number) not in begun
        if generation.step > 0 or (generation.step == 0 and alone):
            raise GoneError(
                f"{generation.home.parent}: holds step {generation.step} of a store whose first"
                " directory is not among those given",
                hint="nothing was changed: name all directories of the store; mount their disks",
            )


def _remove_unborn(given: Iterable[Path]) -> None:
    """Nothing counts: generations that were never finished are removed, first directories last:
    one that holds step 0 of a store without them is taken for one that may have trained
    (`_check_unborn`)."""
    for generation in sorted(_all(given), key=lambda g: g.brief is None or g.brief.index == 0):
        if generation.recorded and generation.step < 0:
            set_aside(generation)
        else:
            remove(generation.home)
    for directory in given:
        (directory / f"{NAME}.new").unlink(missing_ok=True)
