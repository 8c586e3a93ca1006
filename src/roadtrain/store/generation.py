"""OpenedStore: all directories of a store together; open_store, create_store.

A store rests in `DIR/gen-N/` of each of its directories; `DIR[0]/CURRENT` names N. A generation counts from the moment
CURRENT names it: one that was half written (a kill while creating or converting) is nothing, and is removed. A step
is committed by directory 0's record, written after all others hold theirs.

Assumes: nobody else opens the directories (the ledgers' locks). Deletes only files that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from roadtrain.errors import DamagedError, ForeignError, GoneError
from roadtrain.spec.chunks import ChunkTable
from roadtrain.store.direct import make_directory, replace_file, typed_errors
from roadtrain.store.file import FILES, FileTier
from roadtrain.store.ledger import HEADER, Brief, StoreMeta

Accept = Callable[[str, int], None]


@dataclass
class OpenedStore:
    """`tiers[i]` is directory i. `step` -1: created and not yet committed."""

    directories: tuple[Path, ...]
    meta: StoreMeta  # of directory 0
    tiers: list[FileTier]
    former: OpenedStore | None = None  # what `publish` replaces

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
        return tuple(t.note for t in self.tiers if t.note)

    def tier_of(self, chunk: int) -> FileTier:
        return self.tiers[self.meta.owners[chunk]]

    def commit(self, step: int, blob: bytes) -> None:
        """All that was written counts, or nothing: the other directories first, directory 0 is the commit."""
        for tier in [*self.tiers[1:], self.tiers[0]]:
            tier.prepare(step, blob if tier is self.tiers[0] else b"")
        for tier in self.tiers:
            tier.committed(step)

    def publish(self) -> None:
        """This generation counts from now on; the former one is removed. Only after the first commit."""
        assert self.step >= 0
        _switch(self.directories[0], self.meta.generation)
        if self.former is not None:
            old, self.former = self.former, None
            old.close()
            if old.directories[0].resolve() != self.directories[0].resolve():
                (old.directories[0] / "CURRENT").unlink(missing_ok=True)
            for directory in old.directories:
                _remove(directory / f"gen-{old.meta.generation}")

    def discard(self) -> None:
        """Close and remove a generation that is not to count."""
        self.close()
        for directory in self.directories:
            _remove(directory / f"gen-{self.meta.generation}")

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def create_store(
    directories: Sequence[str | Path],
    meta: StoreMeta,
    owners: Sequence[int],
    *,
    direct: bool = True,
    former: OpenedStore | None = None,
) -> OpenedStore:
    """Empty files for every chunk, chunk c in `directories[owners[c]]`. The caller writes all, commits, publishes.
    FullError with both numbers before anything is written; ForeignError where a store is there already."""
    paths = tuple(Path(d).absolute() for d in directories)
    assert len(owners) == len(meta.table.chunks) and all(0 <= o < len(paths) for o in owners), "owners do not fit"
    for path in paths:
        if former is None and (path / "CURRENT").exists():
            raise ForeignError(f"{path}: holds a store already", hint="open it, or name another directory")
    there = [n for p in paths for n in _generations(p)] + ([former.meta.generation] if former else [])
    meta = replace(
        meta, owners=tuple(owners), directories=tuple(map(str, paths)), generation=max(there, default=0) + 1, index=0,
        former=tuple(map(str, former.directories)) if former else (),
    )  # fmt: skip
    store = OpenedStore(paths, meta, [], former)
    try:
        for index, path in enumerate(paths):
            store.tiers.append(_create(path, replace(meta, index=index), direct))
    except BaseException:
        store.discard()
        raise
    return store


def open_store(
    directories: Sequence[str | Path], *, direct: bool = True, accept: Accept = lambda job, step: None
) -> OpenedStore | None:
    """The store that counts among `directories`, in the directories that it was made with (where a given one holds its
    part, there). None where nothing is. `accept` is told its job and step ("", -1: nothing is there) before anything is
    removed, and raises where that is not to be gone on with. GoneError, ForeignError, DamagedError."""
    given = [Path(d).absolute() for d in directories]
    found = [(n, d, StoreMeta.load(d / f"gen-{n}")) for d in given if (n := _current(d)) is not None]
    if not found:
        accept("", -1)
        _clean_unborn(given)
        return None
    generation, _, meta = max(found, key=lambda f: f[0])
    for _, directory, other in found:
        if other.job != meta.job:
            raise ForeignError(f"{directory}: holds job {other.job}, the others job {meta.job}")
    store = OpenedStore(tuple(_member(i, meta, given) for i in range(len(meta.directories))), meta, [])
    try:
        for path in store.directories:
            home, step = path / f"gen-{generation}", store.step if store.tiers else None
            store.tiers.append(FileTier(home, StoreMeta.load(home), step, direct=direct))
        accept(meta.job, store.step)
        _clean_leftovers(meta, given, store.directories)
    except BaseException:
        store.close()
        raise
    return store


def open_part(directory: str | Path, step: int | None = None, *, direct: bool = True) -> FileTier | None:
    """One server's part of a store that rests on several hosts: at `step`, or the newest. None where none is."""
    path = Path(directory).absolute()
    generation = _current(path)
    if not generation:
        _clean_unborn([path])
        return None
    home = path / f"gen-{generation}"
    return FileTier(home, StoreMeta.load(home), step, direct=direct)


def create_part(directory: str | Path, meta: StoreMeta, *, direct: bool = True) -> FileTier:
    """Empty files for the chunks of server `meta.index`. It counts from `publish_part` on. ForeignError where another
    part has trained. This one (it has missed steps that its replicas have), or one that has not trained (its store was
    never finished elsewhere), is replaced."""
    path = Path(directory).absolute()
    if generation := _current(path):
        home = path / f"gen-{generation}"
        brief, step = _brief(home), _newest_step(home)
        if step > 0 and (brief is None or (brief.job, brief.index) != (meta.job, meta.index)):
            raise ForeignError(f"{path}: holds step {step} of a store already", hint="name another directory")
        _switch(path, 0)  # nothing counts here
    _clean_unborn([path])
    make_directory(path)
    _switch(path, 0)  # whatever step it gets, until publish_part
    return _create(path, replace(meta, generation=1), direct)


def _create(path: Path, meta: StoreMeta, direct: bool) -> FileTier:
    """Empty files for the chunks of directory `meta.index`, beside what describes them."""
    home = path / f"gen-{meta.generation}"
    try:
        make_directory(home)
        meta.write(home)
        return FileTier(home, meta, direct=direct, create=True)
    except BaseException:
        _remove(home)
        raise


def publish_part(directory: str | Path) -> None:
    """After its first commit."""
    _switch(Path(directory).absolute(), 1)


def _member(index: int, meta: StoreMeta, given: Sequence[Path]) -> Path:
    """Where directory `index` of the store is: a given directory that holds it, else where it was made."""
    recorded = Path(meta.directories[index])
    name = f"gen-{meta.generation}"
    for path in [*given, recorded]:
        brief = _brief(path / name)
        if brief is None:
            continue
        if brief.job != meta.job:
            raise ForeignError(f"{path / name}: of job {brief.job}, the store is job {meta.job}")
        if brief.index == index:
            return path
    raise GoneError(
        f"{recorded / name}: gone: directory {index} of the {len(meta.directories)} of job {meta.job}",
        hint="is its disk still mounted? If it moved, name its new place in `store`",
    )


def _clean_leftovers(meta: StoreMeta, given: Iterable[Path], members: Sequence[Path]) -> None:
    """Remove this job's generations that do not count. ForeignError for another job's in a given directory."""
    for path in dict.fromkeys([*given, *members, *map(Path, meta.former)]):
        for n in _generations(path):
            brief = _brief(path / f"gen-{n}")
            if n == meta.generation and path in members:
                continue
            if brief is None or brief.job == meta.job:
                _remove(path / f"gen-{n}")
            elif path in given:
                raise ForeignError(f"{path}: holds job {brief.job}, the store is job {meta.job}")
        (path / "CURRENT.new").unlink(missing_ok=True)
        if path != members[0] and (path / "CURRENT").exists() and not _generations(path):
            (path / "CURRENT").unlink()


def _clean_unborn(given: Iterable[Path]) -> None:
    """No CURRENT anywhere (or it names 0): remove generations that were never finished. GoneError for one that has
    trained, unless it was given up."""
    found = [(d, d / f"gen-{n}") for d in given for n in _generations(d)]
    for directory, path in found:
        if _current(directory) is None and (step := _newest_step(path)) > 0:
            raise GoneError(
                f"{directory}: holds step {step} of a store whose first directory is not here",
                hint="is its disk still mounted? Name all directories of the store",
            )
    for directory, path in found:
        _remove(path)
        (directory / "CURRENT.new").unlink(missing_ok=True)


def _brief(directory: Path) -> Brief | None:
    """None where a generation directory has no readable description."""
    try:
        return msgspec.json.decode(_read(directory / "store.json") or b"", type=Brief)
    except ValueError:
        return None


def _generations(directory: Path) -> list[int]:
    return sorted(int(p.name[4:]) for p in directory.glob("gen-*") if p.name[4:].isdigit())


def _current(directory: Path) -> int | None:
    path = directory / "CURRENT"
    text = _read(path)
    if text is None:
        return None
    if not text.strip().isdigit():
        raise DamagedError(f"{path}: {text[:20]!r} names no generation", hint="write the N of the gen-N beside it")
    return int(text)


def _switch(directory: Path, generation: int) -> None:
    """Name the generation that counts, atomically and durably."""
    replace_file(directory / "CURRENT", f"{generation}\n".encode(), "switching the generation")


def _read(path: Path) -> bytes | None:
    """None where no such file is."""
    with typed_errors(path, "reading"):
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _newest_step(directory: Path) -> int:
    """The newest step that a ledger file names, checked or not; -1 for none."""
    steps = [-1]
    for name in ("ledger.0", "ledger.1"):
        head = (_read(directory / name) or b"")[: HEADER.size]
        if len(head) == HEADER.size and any(head):
            steps.append(HEADER.unpack(head)[6])
    return max(steps)


def _remove(directory: Path) -> None:
    """Delete a generation directory: the files that we make, then the directory where nothing else is in it."""
    with typed_errors(directory, "removing"):
        for name in (*FILES, "spill.bin"):
            (directory / name).unlink(missing_ok=True)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


