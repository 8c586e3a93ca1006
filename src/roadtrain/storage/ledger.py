"""Ledger: which slots hold the last committed step of a generation directory.

The ledger has two files; a record of a step is [header | a row per owned chunk | blob | xxh3 of all
that], written to the file that does not hold the last committed step and then fsynced. So a torn
record never costs the last commit.

Note "what the disk has": a record that is read may lie in the system's memory only: its writer was
killed before it synced it, or the sync failed. A step that was built on it would overwrite the
slots of the step before, and a power cut would then cost both. So `settle` writes again what
counts, wipes what does not, and syncs both, before anything else is written; a record whose sync
fails is wiped at once, and its step never counts.

Note "sessions": a record names the session that trained its step (a HistoryLink,
storage/history.py). A session is one opening of a store on files that trains. So two copies of a
directory that went on without each other have different sessions at the same step, and cannot be
taken for each other. Records of servers' parts name none: their history rests in `store.json`.

Assumes: one writer (a lock on the ledger says so). Does NOT touch slots.
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
WITH_SESSION = 2  # format of a record whose header is followed by its session
# id, the step it went on from, when it began (seconds since 1970)
SESSION = struct.Struct("<16sqq")
ROW = np.dtype(
    [
        ("chunk", "<u4"),
        ("step", "<u4"),  # the last that wrote the chunk
        ("weights_slot", "u1"),
        ("state_slot", "u1"),
        ("unused", "<u2"),
        ("weights_sum", "<u8"),  # xxh3_64; 0: absent
        ("state_sum", "<u8"),
    ]
)
# bytes allocated beyond the rows, so that a blob of usual size commits on a full disk
_SPARE = 1 << 16

Rows = np.ndarray[Any, Any]


def digest(view: memoryview | bytes) -> int:
    """xxh3_64, never 0."""
    return xxhash.xxh3_64_intdigest(view) or 1


def pack(blobs: Sequence[bytes]) -> bytes:
    """What several workers commit with a step, as one blob; that of one worker is itself."""
    if len(blobs) <= 1:
        return b"".join(blobs)
    lengths = struct.pack(f"<{len(blobs) + 1}Q", len(blobs), *map(len, blobs))
    return b"".join([BLOBS, lengths, *blobs])


def unpack(blob: bytes) -> list[bytes]:
    """The workers' blobs, in their order; what a relay has packed for its host's is in one of
    them."""
    if not blob.startswith(BLOBS):
        return [blob]
    (count,) = struct.unpack_from("<Q", blob, len(BLOBS))
    lengths = struct.unpack_from(f"<{count}Q", blob, len(BLOBS) + 8)
    ends = list(itertools.accumulate(lengths, initial=len(BLOBS) + 8 * (count + 1)))
    return [one for a, b in itertools.pairwise(ends) for one in unpack(blob[a:b])]


@dataclass(frozen=True)
class LedgerEntry:
    step: int
    rows: Rows
    blob: bytes
    file: int  # ledger.0 or ledger.1
    session: HistoryLink | None = None  # that trained the step; None: not known


class Ledger:
    """The two ledger files of one generation directory.

    `entry`: the last committed record, before the first one of step -1 with the rows given.
    `pending`: what is appended and not confirmed. `session`: what the next records name (Note
    "sessions"), at first that of the record that was loaded. `dropped`: lines about records that do
    not count. `damaged`: files with a record that is torn or damaged.
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
        self._loaded = [b"", b""]  # what counts in each file, until it is settled
        size = HEADER.size + rows.nbytes + _SPARE if create else None
        with undone_on_error(self.close):
            for i in range(2):
                self._files.append(DirectFile(directory / f"ledger.{i}", direct=False, create=size))
            with typed_errors(directory, "locking"):
                lock(self._files[0].fd, directory)

    def load(self, step: int | None) -> tuple[int, ...]:
        """The record of exactly `step`, or the newest; nothing is written before `settle`. A
        newer one than `step` is not to count. Returns the steps there were records of.
        DamagedError where there is none, ForeignError for another's."""
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
                    f"committed, step {self.entry.step} counts"
                )
        return tuple(e.step for e in found)

    def _lacks(self, step: int | None, steps: list[int]) -> StoreError:
        """The error for a directory without a record of `step` (None: without any record)."""
        home = self._files[0].path.parent
        holds = f"its records are of steps {sorted(steps)}" if steps else "it holds no other record"
        if self.damaged:
            damaged = " and ".join(map(str, self.damaged))
            return DamagedError(
                f"{damaged}: the record there is damaged, and {holds}", hint=RESTORE
            )
        if step is None or not steps:
            return DamagedError(f"{home}: its ledger holds no record", hint=RESTORE)
        older = "this part" if max(steps) < step else "the part whose step counts, the first one,"
        return StaleError(
            f"{home}: {holds}, and the store is at step {step}: {older} is an older copy, or one"
            " that was trained elsewhere",
            hint="nothing was changed: name the directories that were trained together",
        )

    def settle(self) -> None:
        """What was loaded is durable, and what does not count is gone for good (Note "what the
        disk has")."""
        for number in (self.entry.file, 1 - self.entry.file):
            data, self._loaded[number] = self._loaded[number] or bytes(HEADER.size), b""
            self._files[number].write(memoryview(data), 0, what := "a record that was found")
            self._files[number].sync(f"of {what}")

    def begin_session(self) -> tuple[str, str]:
        """Name a new session in every record that is written from now on.

        Returns:
            The session that trained the last step ("" where it is not known), and the new one.
        """
        before = "" if self.session is None else self.session.id
        begun = uuid.uuid4().hex[:16]
        self.session = HistoryLink(begun, max(0, self.entry.step), (), int(time.time()))
        return before, begun

    def append(self, step: int, rows: Rows, blob: bytes) -> None:
        """Durable on return; the committed record is not touched."""
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
            # else `settle` finds it, and makes it durable or fails too
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
            self.dropped.append(f"{path}: a torn record was dropped, the newest whole one counts")
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
                f"{path}: a record of (generation, job, directory, chunks) {is_}, not {ours}, in"
                f" format {fmt}"
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
    """The whole record of a ledger file, checksum included; b"" where none was ever written,
    None where one is torn or damaged."""
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
    """The steps of the records in a generation directory, None for a record that is torn or
    damaged; unchecked is whether they are of the store that its description tells of."""
    records = []
    for name in ("ledger.0", "ledger.1"):
        with contextlib.suppress(GoneError):
            records.append(record_in(directory / name))
    written = [data for data in records if data != b""]
    return [None if data is None else HEADER.unpack_from(data)[6] for data in written]
