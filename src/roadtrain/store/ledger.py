"""StoreMeta and Ledger: what a store is, and which slots hold its last committed step.

`store.json` in every generation directory says what the store holds. The ledger has two files; a record of a step is
[header | a row per owned chunk | blob | xxh3 of all that], written to the file that does not hold the last committed
step and then fsynced. So a torn record never costs the last commit.

Assumes: one writer (a lock on the ledger says so). Does NOT touch slots.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from roadtrain.errors import DamagedError, ForeignError, GoneError, StoreError
from roadtrain.spec.chunks import Chunk, ChunkTable, ParamSpec, Record, Span, record
from roadtrain.store.direct import store_error, sync_directory

FORMAT = 1
MAGIC = b"roadtrn\0"
BLOBS = b"roadtrain blobs\0"
HEADER = struct.Struct("<8sII16sIIQQ")  # magic, format, generation, job, directory, rows, step, blob bytes
ROW = np.dtype(
    [
        ("chunk", "<u4"),
        ("step", "<u4"),  # the last that wrote the chunk
        ("public_slot", "u1"),
        ("private_slot", "u1"),
        ("unused", "<u2"),
        ("public_sum", "<u8"),  # xxh3_64; 0: absent
        ("private_sum", "<u8"),
    ]
)
LOCK_WAIT_S = 5.0  # a killed process's helpers may hold the lock for a moment longer
_SPARE = 1 << 16  # bytes allocated beyond the rows, so that a blob of usual size commits on a full disk

Rows = np.ndarray[Any, Any]


def digest(view: memoryview | bytes) -> int:
    """xxh3_64, never 0."""
    return xxhash.xxh3_64_intdigest(view) or 1


def pack(blobs: Sequence[bytes]) -> bytes:
    """What several workers commit with a step, as one blob; that of one worker is itself."""
    if len(blobs) <= 1:
        return b"".join(blobs)
    return b"".join([BLOBS, struct.pack(f"<{len(blobs) + 1}Q", len(blobs), *map(len, blobs)), *blobs])


def unpack(blob: bytes) -> list[bytes]:
    """The workers' blobs, in their order."""
    if not blob.startswith(BLOBS):
        return [blob]
    (count,) = struct.unpack_from("<Q", blob, len(BLOBS))
    lengths = struct.unpack_from(f"<{count}Q", blob, len(BLOBS) + 8)
    ends = list(itertools.accumulate(lengths, initial=len(BLOBS) + 8 * (count + 1)))
    return [blob[a:b] for a, b in itertools.pairwise(ends)]


@dataclass(frozen=True)
class GroupRule:
    """What one parameter group's rule keeps: its state arrays (fp32) and scalars (float64, a row a parameter)."""

    rule: str
    arrays: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoreMeta:
    """What a store holds. A caller gives the first four; `create_store` fills in where it rests."""

    job: str  # uuid
    blocks: tuple[tuple[str, tuple[ParamSpec, ...]], ...]
    chunk_elements: int
    groups: tuple[GroupRule, ...]
    owners: tuple[int, ...] = ()  # of each chunk: an index into `directories`
    directories: tuple[str, ...] = ()
    former: tuple[str, ...] = ()  # directories of the generation before, where leftovers may lie
    generation: int = 0
    index: int = 0  # of this directory
    staleness: int = 0
    format: int = FORMAT

    @staticmethod
    def of(table: ChunkTable, groups: Sequence[GroupRule], job: str = "", staleness: int = 0) -> StoreMeta:
        blocks = tuple((b.name, tuple(table.params[i] for i in b.params)) for b in table.blocks)
        job = job or str(uuid.uuid4())
        return StoreMeta(job, blocks, table.chunk_elements, tuple(groups), staleness=staleness)

    @cached_property
    def table(self) -> ChunkTable:
        return ChunkTable.build(self.blocks, self.chunk_elements)

    @cached_property
    def records(self) -> dict[int, Record]:
        """Of every chunk, by its id."""
        out = {}
        for chunk in self.table.chunks:
            rule = self.groups[chunk.group] if chunk.trainable else GroupRule("")
            out[chunk.id] = record(chunk, len(rule.arrays), len(rule.scalars), self.staleness)
        return out

    @cached_property
    def where(self) -> dict[str, list[tuple[Chunk, int, Span]]]:
        """By parameter name, its spans: (chunk, number of the span in it, span)."""
        out: dict[str, list[tuple[Chunk, int, Span]]] = {}
        for chunk in self.table.chunks:
            for i, span in enumerate(chunk.spans):
                out.setdefault(self.table.params[span.param].name, []).append((chunk, i, span))
        return out

    def owned(self, index: int) -> dict[int, Record]:
        """The records that directory `index` holds."""
        return {chunk: r for chunk, r in self.records.items() if self.owners[chunk] == index}

    def write(self, directory: Path) -> None:
        path = directory / "store.json"
        try:
            with open(path, "w") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise store_error(error, path, "writing", 1 << 12) from error

    @property
    def signature(self) -> str:
        """Same for two workers whose parameters, dtypes, chunks and rules are the same."""
        body = json.dumps([asdict(self)[key] for key in ("blocks", "chunk_elements", "groups", "staleness")])
        return hashlib.sha256(body.encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"fingerprint": self.table.fingerprint()})

    @staticmethod
    def load(directory: Path) -> StoreMeta:
        """Raises GoneError, DamagedError, or ForeignError for another format."""
        path = directory / "store.json"
        try:
            text = path.read_bytes()
        except OSError as error:
            raise store_error(error, path, "reading") from error
        return StoreMeta.from_json(text, str(path))

    @staticmethod
    def from_json(text: bytes | str, where: str) -> StoreMeta:
        """`where`: for messages. Raises DamagedError, or ForeignError for another format."""
        try:
            body = json.loads(text)
            if body["format"] != FORMAT:
                raise ForeignError(f"{where}: store format {body['format']}, this version reads {FORMAT}")
            fingerprint = body.pop("fingerprint")
            body["blocks"] = tuple(
                (name, tuple(ParamSpec(**p | {"shape": tuple(p["shape"])}) for p in params))
                for name, params in body["blocks"]
            )
            body["groups"] = tuple(
                GroupRule(g["rule"], tuple(g["arrays"]), tuple(g["scalars"])) for g in body["groups"]
            )
            for key in ("owners", "directories", "former"):
                body[key] = tuple(body[key])
            meta = StoreMeta(**body)
            if meta.table.fingerprint() != fingerprint or len(meta.owners) != len(meta.table.chunks):
                raise DamagedError(f"{where}: does not match its fingerprint")
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{where}: not a store description ({error})") from error
        return meta


@dataclass(frozen=True)
class Entry:
    step: int
    rows: Rows
    blob: bytes
    file: int  # ledger.0 or ledger.1


class Ledger:
    """The two ledger files of one generation directory. `entry`: the last committed one, None before the first."""

    def __init__(self, directory: Path, meta: StoreMeta, rows: int, *, create: bool = False) -> None:
        self._meta, self._count = meta, rows
        self._paths = [directory / f"ledger.{i}" for i in range(2)]
        self._fds: list[int] = []
        self.entry: Entry | None = None
        self._pending: Entry | None = None
        self.torn: list[str] = []
        size = HEADER.size + rows * ROW.itemsize + _SPARE
        path = self._paths[0]
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            for path in self._paths:
                self._fds.append(os.open(path, flags, 0o600))
                if create:
                    os.posix_fallocate(self._fds[-1], 0, size)
            self._lock(directory)
        except OSError as error:
            self.close()
            raise store_error(error, path, "allocating" if create else "opening", size if create else 0) from error
        except StoreError:
            self.close()
            raise

    def load(self, step: int | None) -> Entry:
        """The record of exactly `step`, or the newest. DamagedError where there is none, ForeignError for another's."""
        found = [e for e in (self._parse(i) for i in range(2)) if e is not None]
        fit = [e for e in found if step is None or e.step == step]
        if not fit:
            raise DamagedError(
                f"{self._paths[0].parent}: no valid ledger record" + ("" if step is None else f" of step {step}")
                + f", there are {[e.step for e in found]}"
            )
        self.entry = max(fit, key=lambda e: e.step)
        self._pending = next((e for e in found if e.step > self.entry.step), None)  # `withdraw` forgets it
        return self.entry

    def append(self, step: int, rows: Rows, blob: bytes) -> None:
        """Durable on return; the committed record is not touched."""
        m, file = self._meta, 0 if self.entry is None else 1 - self.entry.file
        head = HEADER.pack(
            MAGIC, m.format, m.generation, uuid.UUID(m.job).bytes, m.index, len(rows), step, len(blob)
        )
        body = head + rows.tobytes() + blob
        view = memoryview(body + digest(body).to_bytes(8, "little"))
        self._pending = Entry(step, rows.copy(), blob, file)
        fd, path, done = self._fds[file], self._paths[file], 0
        try:
            while done < len(view):
                done += os.pwrite(fd, view[done:], done)
            os.fsync(fd)
        except OSError as error:
            raise store_error(error, path, f"writing the record of step {step}", len(view)) from error
        if os.fstat(fd).st_nlink == 0:
            raise GoneError(f"{path}: removed while in use, at step {step}")

    def confirm(self) -> None:
        self.entry, self._pending = self._pending, None

    def withdraw(self) -> None:
        """Forget a record that was appended but is not committed, also on the disk."""
        if self._pending is not None:
            fd, path = self._fds[self._pending.file], self._paths[self._pending.file]
            try:
                os.pwrite(fd, bytes(HEADER.size), 0)
                os.fsync(fd)
            except OSError as error:
                raise store_error(error, path, "withdrawing a record", HEADER.size) from error
            self._pending = None

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _lock(self, directory: Path) -> None:
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return fcntl.flock(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StoreError(
                        f"{directory}: in use by another process (waited {LOCK_WAIT_S:.0f} s)",
                        hint="end the other run of this job first",
                    ) from None
                time.sleep(0.05)

    def _parse(self, file: int) -> Entry | None:
        path = self._paths[file]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise store_error(error, path, "reading") from error
        if not any(data[: HEADER.size]):
            return None
        magic, fmt, generation, job, index, count, step, blob = HEADER.unpack_from(data.ljust(HEADER.size, b"\0"))
        end = HEADER.size + count * ROW.itemsize + blob
        if magic != MAGIC or len(data) < end + 8 or digest(data[:end]) != int.from_bytes(data[end : end + 8], "little"):
            self.torn.append(f"{path}: a torn record was set aside, the step before it counts")
            return None
        m = self._meta
        is_, ours = (fmt, generation, str(uuid.UUID(bytes=job)), index, count), (m.format, m.generation, m.job, m.index)
        if is_ != (*ours, self._count):
            raise ForeignError(
                f"{path}: a record of (format, generation, job, directory, chunks) {is_}, not {(*ours, self._count)}"
            )
        rows = np.frombuffer(data, ROW, count, HEADER.size).copy()
        return Entry(step, rows, data[end - blob : end], file)


def make_directory(directory: Path) -> None:
    """The directory with its parents, durable."""
    missing = []
    at = directory
    while not at.exists():
        missing.append(at)
        at = at.parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise store_error(error, directory, "making the directory") from error
    for path in missing:
        sync_directory(path.parent)
