"""The files of a snapshot that one rank writes: pieces (values and optimizer state of ranges of
parameter elements) in `rank-R.pieces`, their table in `rank-R.json`, and the marker
`rank-R.committed`, when the files of all ranks are durable. Does NOT communicate with other ranks.

Every array, table and marker has a checksum, which each read verifies. At most one piece is in
memory at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import torch

from roadtrain.errors import DamagedError, StoreError
from roadtrain.stages.pieces import Extent, Piece
from roadtrain.stages.snapshot_choice import Description, SeenSnapshot, SnapshotKey
from roadtrain.storage.direct import (
    make_directory,
    replace_file,
    sync_directory,
    typed_errors,
    write_all,
)
from roadtrain.storage.ledger import digest
from roadtrain.storage.sealed import sealed, unsealed

PIECES, TABLE, MARKER = "pieces", "json", "committed"
_HINT = "restore this file from a copy; the disk may be failing"


class StoredArray(msgspec.Struct, frozen=True):
    """The location of an array in the pieces file, and its checksum."""

    offset: int
    nbytes: int
    sum: int  # xxh3_64


class StoredPiece(msgspec.Struct, frozen=True):
    """A piece in the pieces file: its extent, and the locations of its arrays."""

    name: str
    start: int
    stop: int
    arrays: dict[str, StoredArray]  # fp32
    scalars: dict[str, float]

    @property
    def extent(self) -> Extent:
        return Extent(self.name, self.start, self.stop)


class PartTable(msgspec.Struct, frozen=True):
    """The table of the file of pieces. `blobs`: name -> location of state of the job that belongs
    to no parameter."""

    job: str
    key: SnapshotKey
    rank: int
    nbytes: int
    pieces: tuple[StoredPiece, ...]
    blobs: dict[str, StoredArray]
    format: int = 1


class PartWriter:
    """A writer of one rank's files of a snapshot, into the directory `home`. The files are durable
    when `finish` has returned. The writer is a context manager."""

    def __init__(self, home: Path, job: str, key: SnapshotKey, rank: int) -> None:
        self._home, self._about = home, (job, key, rank)
        self._pieces = list[StoredPiece]()
        self._blobs = dict[str, StoredArray]()
        self.nbytes = 0
        self._path = home / f"rank-{rank}.{PIECES}"
        make_directory(home)
        with typed_errors(self._path, "making"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)

    def add(self, piece: Piece) -> None:
        arrays = {
            key: self._write(array.detach().contiguous().numpy().view(np.uint8).data)
            for key, array in piece.arrays.items()
        }
        extent = piece.extent
        self._pieces.append(
            StoredPiece(extent.name, extent.start, extent.stop, arrays, dict(piece.scalars))
        )

    def add_all(self, pieces: Iterable[Piece]) -> None:
        """Write all pieces. After an error, read on to the end, because the iterator also sends
        pieces to other ranks."""
        failed: StoreError | None = None
        for piece in pieces:
            try:
                if failed is None:
                    self.add(piece)
            except StoreError as error:
                failed = error
        if failed is not None:
            raise failed

    def finish(self, blobs: Mapping[str, bytes]) -> None:
        for name, blob in blobs.items():
            self._blobs[name] = self._write(memoryview(blob))
        with typed_errors(self._path, "writing", self.nbytes):
            os.fsync(self._fd)
        job, key, rank = self._about
        table = PartTable(job, key, rank, self.nbytes, tuple(self._pieces), self._blobs)
        replace_file(
            self._home / f"rank-{rank}.{TABLE}", sealed(msgspec.json.encode(table)), "writing"
        )

    def _write(self, data: memoryview) -> StoredArray:
        at = StoredArray(self.nbytes, data.nbytes, digest(data))
        self.nbytes += data.nbytes
        with typed_errors(self._path, "writing", self.nbytes):
            write_all(self._fd, data)
        return at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def write_marker(home: Path, rank: int, about: Description) -> None:
    replace_file(home / f"rank-{rank}.{MARKER}", sealed(msgspec.json.encode(about)), "committing")


class PartReader:
    """A reader of the files of one snapshot in the directory `home`. `notes`: messages about
    ignored files."""

    def __init__(self, home: Path, key: SnapshotKey) -> None:
        self.home, self.key, self.notes = home, key, list[str]()
        self.parts = dict[int, PartTable]()
        # parameter name -> (start, stop, rank, piece)
        self._at = dict[str, list[tuple[int, int, int, StoredPiece]]]()
        self._last: tuple[StoredPiece, Piece] | None = None
        for path in sorted(home.glob(f"rank-*.{TABLE}")):
            self._add_part(path)
        for entries in self._at.values():
            entries.sort(key=lambda entry: entry[:3])

    def marker(self) -> Description | None:
        """Return the content of a valid marker (written when the snapshot was complete), or
        None."""
        for path in sorted(self.home.glob(f"rank-*.{MARKER}")):
            try:
                found = msgspec.json.decode(_unsealed(path), type=Description)
            except (StoreError, ValueError) as error:
                self.notes.append(f"{path}: ignored ({error})")
                continue
            if found.key == self.key and found.format == 1:
                return found
            self.notes.append(f"{path}: ignored (it is of {found.key}, format {found.format})")
        return None

    def seen(self) -> SeenSnapshot:
        marker, parts = self.marker(), tuple(sorted(self.parts))
        return SeenSnapshot(self.key, marker, tuple(self.extents()), parts, tuple(self.notes))

    def extents(self) -> list[Extent]:
        found = {Extent(name, a, b) for name, all_ in self._at.items() for a, b, _, _ in all_}
        return sorted(found, key=lambda e: (e.name, e.start, e.stop))

    def extents_of(self, name: str) -> list[Extent]:
        """Return the extents (ranges of elements) of the parameter `name` that this snapshot
        contains."""
        spans = sorted({(a, b) for a, b, _, _ in self._at.get(name, ())})
        return [Extent(name, a, b) for a, b in spans]

    def piece(self, extent: Extent) -> Piece:
        """Return the values and optimizer state of `extent`. Raises DamagedError, which names the
        file, if a checksum does not match."""
        entries = self._at[extent.name]
        at = bisect_right(entries, extent.start, key=lambda entry: entry[0])
        start, _, rank, stored = next(
            entries[i] for i in reversed(range(at)) if entries[i][1] >= extent.stop
        )
        if self._last is None or self._last[0] is not stored:
            arrays = {
                name: torch.from_numpy(self._read(rank, array, f"{name} of {stored.name!r}"))
                for name, array in stored.arrays.items()
            }
            self._last = (stored, Piece(stored.extent, arrays, stored.scalars))
        whole = self._last[1]
        cut = slice(extent.start - start, extent.stop - start)
        return Piece(extent, {k: v[cut].clone() for k, v in whole.arrays.items()}, whole.scalars)

    def blobs(self) -> dict[str, bytes]:
        out: dict[str, bytes] = {}
        for rank, table in sorted(self.parts.items()):
            for name, array in table.blobs.items():
                if name not in out:
                    out[name] = self._read(rank, array, name).view(np.uint8).tobytes()
        return out

    def _add_part(self, path: Path) -> None:
        """Add the files whose table is at `path`, or ignore them if they are incomplete."""
        try:
            table = msgspec.json.decode(_unsealed(path), type=PartTable)
            if table.key != self.key or table.format != 1:
                raise ValueError(f"it is of {table.key}, format {table.format}")
            if (size := _size(path.with_suffix(f".{PIECES}"))) != table.nbytes:
                raise ValueError(f"its pieces have {size} bytes, but the table says {table.nbytes}")
        except (StoreError, ValueError) as error:
            self.notes.append(f"{path}: ignored ({error})")
            return
        self.parts[table.rank] = table
        for piece in table.pieces:
            self._at.setdefault(piece.name, []).append((piece.start, piece.stop, table.rank, piece))

    def _read(self, rank: int, at: StoredArray, what: str) -> np.ndarray:
        """Read and verify an array, as float32 if its length is a multiple of 4 bytes, otherwise as
        uint8."""
        path = self.home / f"rank-{rank}.{PIECES}"
        with typed_errors(path, f"reading {what}"):
            data = np.fromfile(path, np.uint8, at.nbytes, offset=at.offset)
        if data.nbytes != at.nbytes or digest(data.data) != at.sum:
            raise DamagedError(
                f"{path}: {what} at byte {at.offset}, of step {self.key.step}, fails its checksum",
                hint=_HINT,
            )
        return data if at.nbytes % 4 else data.view(np.float32)


def list_snapshots(directory: Path) -> dict[SnapshotKey, PartReader]:
    """Return a reader for each snapshot in a directory."""
    if not directory.is_dir():
        return {}
    found = ((_key_of(home.name), home) for home in directory.iterdir() if home.is_dir())
    return {
        key: PartReader(home, key) for key, home in found if key is not None and _files_of(home)
    }


def remove_snapshot(home: Path) -> None:
    """Remove a snapshot's files, markers first, so that a kill leaves no incomplete snapshot with a
    marker. Several ranks may call this function at the same time."""
    with typed_errors(home, "removing"):
        for path in sorted(_files_of(home), key=lambda path: path.suffix != f".{MARKER}"):
            path.unlink(missing_ok=True)
        try:
            home.rmdir()
        except FileNotFoundError:
            pass  # another rank removed it
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    if home.parent.is_dir():
        sync_directory(home.parent)


def set_snapshot_aside(home: Path) -> None:
    """Rename a snapshot's directory, so that later starts ignore it. The files are kept."""
    # the directory is not found if another rank has renamed it
    with typed_errors(home, "renaming"), contextlib.suppress(FileNotFoundError):
        home.rename(home.with_name(f"{home.name}.aside"))
    sync_directory(home.parent)


def _key_of(name: str) -> SnapshotKey | None:
    head, _, start = name.partition(".")
    step = head.removeprefix("step-")
    valid = head != step and step.isdigit() and start.isalnum()
    return SnapshotKey(int(step), start) if valid else None


def _files_of(home: Path) -> list[Path]:
    """Return the files of the snapshot in the directory `home`, or [] if another rank has removed
    it."""
    try:
        names = os.listdir(home)
    except FileNotFoundError:
        return []
    return sorted(home / name for name in fnmatch.filter(names, "rank-*.*"))


def _size(path: Path) -> int:
    with typed_errors(path, "reading"):
        return path.stat().st_size


def _unsealed(path: Path) -> bytes:
    with typed_errors(path, "reading"):
        content = path.read_bytes()
    return unsealed(content)
