"""Ledger: the commit records of a generation directory, in two files that are written alternately.

A record is [header | a row per owned chunk | blob | xxh3 of all these bytes]. A torn record never
damages the last committed record, which is in the other file.

Note "durable before use": a record that was read may exist only in the page cache. A step built on
such a record would overwrite data of the older step, and a power cut could then lose both steps. So
`settle` makes the loaded record durable, and erases all other records, before anything else is
written. A record whose sync fails is erased, and its step is not committed.

Note "sessions": a record names the session that trained its step. A session begins when a store on
files is opened for training. So copies of a directory that were trained separately can be told
apart. Records of servers name no session, because `store.json` holds their history.

Has one writer, enforced by a lock. Does not read or write the slots.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from roadtrain.errors import DamagedError, ForeignError, GoneError, StaleError, StoreError
from roadtrain.retry import undone_on_error
from roadtrain.storage.direct import DirectFile, typed_errors
from roadtrain.storage.history import HistoryLink
from roadtrain.storage.lock import lock
from roadtrain.storage.meta import RESTORE, StoreMeta

MAGIC = b"roadtrn\0"
BLOBS = b"roadtrain blobs\0"
# magic, format, generation, job, directory, rows, step, blob bytes
HEADER = struct.Struct("<8sII16sIIQQ")
WITH_SESSION = 2  # format of a record in which the header is followed by a session
# id of the session, the step from which it continued, the time it began (seconds since 1970)
SESSION = struct.Struct("<16sqq")
ROW = np.dtype(
    [
        ("chunk", "<u4"),
        ("step", "<u4"),  # the last step that wrote the chunk
        ("weights_slot", "u1"),
        ("state_slot", "u1"),
        ("unused", "<u2"),
        ("weights_sum", "<u8"),  # xxh3_64; 0 if the part is absent
        ("state_sum", "<u8"),
    ]
)
# bytes allocated beyond the rows, so that a blob of typical size can be committed on a full disk
_SPARE = 1 << 16

Rows = np.ndarray[Any, Any]


def digest(view: memoryview | bytes) -> int:
    """Return the xxh3_64 checksum of `view`, but never 0, because 0 stands for absent data."""
    return xxhash.xxh3_64_intdigest(view) or 1


def pack(blobs: Sequence[bytes]) -> bytes:
    """Pack the blobs that several workers commit with a step. A single blob is returned
    unchanged."""
    if len(blobs) <= 1:
        return b"".join(blobs)
    lengths = struct.pack(f"<{len(blobs) + 1}Q", len(blobs), *map(len, blobs))
    return b"".join([BLOBS, lengths, *blobs])


def unpack(blob: bytes) -> list[bytes]:
    """Return the blobs of the workers in order. Blobs that were packed several times are unpacked
    completely."""
    if not blob.startswith(BLOBS):
        return [blob]
    (count,) = struct.unpack_from("<Q", blob, len(BLOBS))
    lengths = struct.unpack_from(f"<{count}Q", blob, len(BLOBS) + 8)
    ends = list(itertools.accumulate(lengths, initial=len(BLOBS) + 8 * (count + 1)))
    return [piece for a, b in itertools.pairwise(ends) for piece in unpack(blob[a:b])]


@dataclass(frozen=True)
class LedgerEntry:
    """A record of the ledger."""

    step: int
    rows: Rows
    blob: bytes
    file: int  # number of its file: 0 for ledger.0, 1 for ledger.1
    session: HistoryLink | None = None  # the session that trained the step; None if unknown


class Ledger:
    """The two ledger files of one generation directory.

    Attributes:
        entry: The last committed record. Before the first commit, its step is -1.
        pending: The record that was appended but is not committed yet, or None.
        session: The session that new records name (Note "sessions").
        dropped: Reports of records that are ignored.
        damaged: Files that contain a torn or damaged record.
    """

    def __init__(
        self, directory: Path, meta: StoreMeta, rows: Rows, *, create: bool = False
    ) -> None:
        self._meta, self._files = meta, list[DirectFile]()
        self.entry = LedgerEntry(-1, rows, b"", 1)
        self.pending: LedgerEntry | None = None
        self.session: HistoryLink | None = None
        self.dropped: list[str] = []
        self.damaged: list[Path] = []
        self._loaded = [b"", b""]  # the valid record of each file, until settle()
        size = HEADER.size + rows.nbytes + _SPARE if create else None
        with undone_on_error(self.close):
            for i in range(2):
                self._files.append(DirectFile(directory / f"ledger.{i}", direct=False, create=size))
            with typed_errors(directory, "locking"):
                lock(self._files[0].fd, directory)

    def load(self, step: int | None) -> tuple[int, ...]:
        """Load a record. Writes nothing.

        Args:
            step: The step of the record. None stands for the newest record.

        Returns:
            The steps that have records.

        Raises:
            DamagedError: There is no record; or a record is damaged, and the other record is not of
                `step`.
            StaleError: The records are intact, but none of them is of `step`.
            ForeignError: A record belongs to another store.
        """
        found = [e for e in (self._parse(i) for i in range(2)) if e is not None]
        fit = [e for e in found if step is None or e.step == step]
        if not fit:
            raise self._lacks(step, [e.step for e in found])
        self.entry = max(fit, key=lambda e: e.step)
        self.session = self.entry.session
        for entry in found:
            if entry.step > self.entry.step:
                self._loaded[entry.file] = b""
                self.dropped.append(
                    f"{self._files[entry.file].path}: the record of step {entry.step} was not "
                    f"committed, so step {self.entry.step} is used"
                )
        return tuple(e.step for e in found)

    def _lacks(self, step: int | None, steps: list[int]) -> StoreError:
        """Return the error for a ledger that has intact records only of `steps`, not of `step`."""
        home = self._files[0].path.parent
        holds = f"its records are of steps {sorted(steps)}" if steps else "it holds no other record"
        if self.damaged:
            damaged = " and ".join(map(str, self.damaged))
            return DamagedError(
                f"{damaged}: the record in this file is damaged. {home}: {holds}", hint=RESTORE
            )
        if step is None or not steps:
            return DamagedError(f"{home}: its ledger holds no record", hint=RESTORE)
        older = "this part" if max(steps) < step else "the first part, which determines the step,"
        return StaleError(
            f"{home}: {holds}, but the store is at step {step}: {older} is an older copy, or was"
            " trained elsewhere",
            hint="nothing was changed: name the directories that were trained together",
        )

    def settle(self) -> None:
        """Make the loaded record durable, and erase all other records (Note "durable before
        use")."""
        for number in (self.entry.file, 1 - self.entry.file):
            data, self._loaded[number] = self._loaded[number] or bytes(HEADER.size), b""
            self._files[number].write(memoryview(data), 0, what := "the loaded record")
            self._files[number].sync(f"of {what}")

    def begin_session(self) -> tuple[str, str]:
        """Begin a new session. All later records contain the id of this session.

        Returns:
            The id of the session that trained the last step ("" if unknown), and the id of the new
            session.
        """
        before = "" if self.session is None else self.session.id
        begun = uuid.uuid4().hex[:16]
        self.session = HistoryLink(begun, max(0, self.entry.step), (), int(time.time()))
        return before, begun

    def append(self, step: int, rows: Rows, blob: bytes) -> None:
        """Write a record durably, beside the committed record."""
        m, number, session = self._meta, 1 - self.entry.file, self.session
        job, fmt = uuid.UUID(m.job).bytes, m.format if session is None else WITH_SESSION
        counts = len(rows), step, len(blob)
        head = HEADER.pack(MAGIC, fmt, m.generation, job, m.index, *counts)
        if session is not None:
            head += SESSION.pack(session.id.encode(), session.step, session.at)
        body = head + rows.tobytes() + blob
        self.pending = LedgerEntry(step, rows.copy(), blob, number, session)
        file, what = self._files[number], f"the record of step {step}"
        try:
            file.write(memoryview(body + digest(body).to_bytes(8, "little")), 0, what)
            file.sync(f"of {what}")
            file.check_linked(f"after {what}")
        except StoreError:
            self.pending = None
            # if erasing fails too, settle() finds the record after a restart: it makes the record
            # durable, or fails
            with contextlib.suppress(StoreError):
                file.write(memoryview(bytes(HEADER.size)), 0, "a record that may not be durable")
                file.sync("of a record that may not be durable")
            raise

    def confirm(self) -> None:
        assert self.pending is not None
        self.entry, self.pending = self.pending, None

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _parse(self, file: int) -> LedgerEntry | None:
        path = self._files[file].path
        data = record_in(path)
        if data is None:
            self.damaged.append(path)
            self.dropped.append(f"{path}: a torn record is ignored, an older intact one is used")
        if not data:
            return None
        self._loaded[file] = data
        _, fmt, generation, job, index, count, step, blob = HEADER.unpack_from(data)
        end = len(data) - 8
        m = self._meta
        is_ = (generation, str(uuid.UUID(bytes=job)), index, count)
        ours = (m.generation, m.job, m.index, len(self.entry.rows))
        if is_ != ours or fmt not in (m.format, WITH_SESSION):
            raise ForeignError(
                f"{path}: the record belongs to another store: its (generation, job, directory,"
                f" chunks) are {is_}, expected {ours}; its format is {fmt}"
            )
        session = None
        if fmt == WITH_SESSION:
            name, since, at = SESSION.unpack_from(data, HEADER.size)
            session = HistoryLink(name.decode(errors="replace"), since, (), at)
        rows = np.frombuffer(data, ROW, count, _header_nbytes(fmt)).copy()
        return LedgerEntry(step, rows, data[end - blob : end], file, session)


def _header_nbytes(fmt: int) -> int:
    return HEADER.size + (SESSION.size if fmt == WITH_SESSION else 0)


def record_in(path: Path) -> bytes | None:
    """Read the record of a ledger file, with its checksum. Returns b"" if no record was ever
    written, and None if the record is torn or damaged."""
    with typed_errors(path, "reading"):
        data = path.read_bytes()
    if not any(data[: HEADER.size]):
        return b""
    magic, fmt, _, _, _, count, _, blob = HEADER.unpack_from(data.ljust(HEADER.size, b"\0"))
    end = _header_nbytes(fmt) + count * ROW.itemsize + blob
    record, found = data[: end + 8], int.from_bytes(data[end : end + 8], "little")
    whole = magic == MAGIC and len(record) == end + 8 and digest(data[:end]) == found
    return record if whole else None


def steps_in(directory: Path) -> list[int | None]:
    """Return the steps of the records in a generation directory; None stands for a torn or damaged
    record. Does not check to which store the records belong."""
    records = []
    for name in ("ledger.0", "ledger.1"):
        with contextlib.suppress(GoneError):
            records.append(record_in(directory / name))
    written = [data for data in records if data != b""]
    return [None if data is None else HEADER.unpack_from(data)[6] for data in written]
