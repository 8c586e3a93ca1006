"""FileTier: the records of one directory in two slot files, with direct I/O, checksums and commits.

Note "two slots": a chunk has the same offset in both slot files. A write goes to the slot that does
not hold the committed bytes. The ledger record of a step names the slots in use. So the last
committed step stays complete while the next step is written. Frozen chunks are written once and
exist in slot 0 only.

Follows the rules of storage/tier.py. One process at a time uses the directory; a lock enforces
this. storage/generation.py commits all directories of a store together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roadtrain.chunks import PAGE, Record
from roadtrain.device.buffers import Buffer
from roadtrain.errors import DamagedError, FullError
from roadtrain.retry import undone_on_error
from roadtrain.storage.direct import DirectFile, free_nbytes, sync_directory
from roadtrain.storage.ledger import ROW, Ledger, LedgerEntry, Rows, digest
from roadtrain.storage.lock import Locks
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.tier import RECORD, STATE_PART, WEIGHTS, part_range
from roadtrain.units import round_up, show_bytes

SLOTS = ("slot0.bin", "slot1.bin")
FILES = (*SLOTS, "ledger.0", "ledger.1", "store.json", "store.json.new")


@dataclass(frozen=True)
class ChunkPlace:
    """The place of a chunk in the slot files and in the spill file, a scratch file for gradients
    that do not fit into memory."""

    row: int  # index of its row in a ledger record
    offset: int  # in both slot files
    record: Record
    frozen: bool
    spill: int  # offset in the spill file
    spill_nbytes: int


class FileTier:
    """The records of one generation directory, opened at a committed step.

    `note` is a warning that the caller should print once, or "". Callers may set three callbacks:
    `on_write` runs before a chunk is written, `on_prepare` at the start of `prepare`, and
    `on_commit` at the end of `committed`.

    Args:
        step: The step whose record is loaded. None stands for the newest record.
        direct: Whether to use direct I/O.
        create: Whether to create empty files of the full size.
        settle: Whether to call `settle` at once. If False, the directory is not changed before the
            caller calls `settle`.

    Raises:
        StoreError: The disk is full (FullError); a file is missing (GoneError), damaged
            (DamagedError) or of another store (ForeignError); or there is no record of `step`
            (StaleError).
    """

    def __init__(
        self,
        directory: Path,
        meta: StoreMeta,
        step: int | None = None,
        *,
        direct: bool = True,
        create: bool = False,
        settle: bool = True,
    ) -> None:
        self.directory, self.meta, self._direct = directory, meta, direct
        self._places, sizes = _lay_out(meta)
        self._spill_nbytes = sizes[2]
        self._spill: DirectFile | None = None
        # (chunk, spill slot) -> bytes written, their checksum
        self._spill_sums = dict[tuple[int, int], tuple[int, int]]()
        self.spill_workers = 1  # number of gradients per chunk for which the spill file has room
        self._lock = threading.Lock()  # guards the creation of the spill file
        # the newest rows; the rows of chunks in _written differ from the last commit
        self._now: Rows = np.zeros(len(self._places), ROW)
        self._now["chunk"] = list(self._places)
        # so that the first write of each chunk goes to slot 0
        self._now["weights_slot"] = self._now["state_slot"] = 1
        self._written: set[tuple[int, str]] = set()  # parts written since the last commit
        self._dirty: set[int] = set()  # slots written since their last sync
        self._slots: list[DirectFile] = []
        self.found: tuple[int, ...] = ()  # steps that had records when the tier was opened
        self.events: list[str] = []  # reports of what opening has done to the directory
        self.locks = Locks()  # held until the tier is closed
        self.on_write: Callable[[int], None] = lambda chunk: None
        self.on_prepare: Callable[[int], None] = lambda step: None
        self.on_commit: Callable[[int], None] = lambda step: None
        self.ledger = Ledger(directory, meta, self._now.copy(), create=create)
        with undone_on_error(self.close):
            if create:
                _check_room(directory, sizes[0] + sizes[1])
            for name, nbytes in zip(SLOTS, sizes[:2]):
                path, size = directory / name, nbytes if create else None
                self._slots.append(DirectFile(path, direct=direct, create=size))
                if (held := self._slots[-1].nbytes) < nbytes:
                    raise DamagedError(f"{path}: truncated to {held} bytes, {nbytes} are needed")
            if create:
                sync_directory(directory)
            else:
                self.found = self.ledger.load(step)
                self._reset()
                assert self._now["chunk"].tolist() == list(self._places)
                if settle:
                    self.settle()

    @property
    def entry(self) -> LedgerEntry:
        """The last committed record of the ledger. The object is not modified later."""
        return self.ledger.entry

    @property
    def step(self) -> int:
        """The last committed step; -1 before the first commit."""
        return self.ledger.entry.step

    @property
    def blob(self) -> bytes:
        return self.ledger.entry.blob

    @property
    def disk_nbytes(self) -> int:
        """The bytes that the files occupy on disk."""
        spill = [self._spill] if self._spill else []
        return sum(file.disk_nbytes for file in (*self._slots, *spill, *self.ledger._files))

    @property
    def note(self) -> str:
        lines = [*self.events, *(f.note for f in self._slots if f.note), *self.ledger.dropped]
        return "; ".join(dict.fromkeys(lines))

    def check_all(self) -> None:
        """Verify the checksums of all chunks of the newest step. Raises DamagedError."""
        most = max((place.record.nbytes for place in self._places.values()), default=0)
        buffer = Buffer(most).view
        for chunk, place in self._places.items():
            row = self._now[place.row]
            for part in _parts(place, RECORD):
                if row[f"{part}_sum"]:
                    start, stop = part_range(place.record, part)
                    self.read(chunk, part, buffer[: stop - start])

    def settle(self) -> None:
        """Make the loaded ledger record durable, and erase uncommitted ledger records. Must be
        called before the first write."""
        # the description may have been read before its name was durable
        sync_directory(self.directory)
        self.ledger.settle()

    def written_in(self, chunk: int) -> int:
        """Return the last step that wrote `chunk`."""
        return int(self._now[self._places[chunk].row]["step"])

    def has_weights(self, chunk: int) -> bool:
        return bool(self._now[self._places[chunk].row]["weights_sum"])

    def read(
        self,
        chunk: int,
        part: str,
        into: memoryview,
        *,
        check: bool = True,
        rows: Rows | None = None,
    ) -> None:
        """Read the weights, the state or the whole record of a chunk.

        Args:
            part: "weights", "state" or "record" (both).
            into: Destination of the bytes, as large as the padded data.
            check: Whether to verify the checksums. If False, the caller must call `check_sums`
                before using the data.
            rows: The rows of the ledger record to read by. None stands for the newest rows.
        """
        place, rows = self._places[chunk], self._now if rows is None else rows
        row = rows[place.row].copy()
        start, stop = part_range(place.record, part)
        assert len(into) == stop - start, (chunk, part, len(into), stop - start)
        parts = [p for p in _parts(place, part) if part != RECORD or row[f"{p}_sum"]]
        assert all(row[f"{p}_sum"] for p in parts), f"{part} of chunk {chunk} is absent"
        what = f"chunk {chunk} at step {row['step']}"
        for slot, first, last in _extents(place, [(p, int(row[f"{p}_slot"])) for p in parts]):
            self._slots[slot].read(into[first - start : last - start], place.offset + first, what)
        if check:
            self.check_sums(chunk, part, into, rows)

    def copy(self, chunk: int, rows: Rows, to: FileTier, buffer: memoryview) -> int:
        """Copy the record of a chunk, as it was in the ledger record with `rows`, into the tier
        `to`. `buffer` is scratch memory, as large as the largest record. Returns the number of
        bytes copied. Raises DamagedError if a checksum does not match."""
        place, row = self._places[chunk], rows[self._places[chunk].row]
        part = RECORD if row["weights_sum"] else STATE_PART
        start, stop = part_range(place.record, part)
        view = buffer[: stop - start]
        self.read(chunk, part, view, rows=rows)
        to.write(chunk, part, view, {p: int(row[f"{p}_sum"]) for p in _parts(place, part)})
        return len(view)

    def check_sums(self, chunk: int, part: str, data: memoryview, rows: Rows | None = None) -> None:
        """Compare `data`, which `read` has filled with the same arguments, with its checksums.
        Raises DamagedError."""
        row = (self._now if rows is None else rows)[self._places[chunk].row]
        for p, found in self.sums(chunk, part, data).items():
            if row[f"{p}_sum"] not in (0, found):
                raise DamagedError(
                    f"{self._slots[row[f'{p}_slot']].path}: chunk {chunk}: the {p} part that was"
                    f" written at step {row['step']} does not match its checksum (the last"
                    f" committed step is {self.step})",
                    hint="restore the store from a copy; the disk may be failing",
                )

    def sums(self, chunk: int, part: str, data: memoryview) -> dict[str, int]:
        """Compute the checksums of `data` that `write` takes, by "weights" or "state". Fastest
        right after `data` was computed, while it is in the CPU cache."""
        place, out = self._places[chunk], {}
        start, _ = part_range(place.record, part)
        for p in _parts(place, part):
            first, last = part_range(place.record, p)
            out[p] = digest(data[first - start : last - start])
        return out

    def write(
        self, chunk: int, part: str, data: memoryview, sums: dict[str, int] | None = None
    ) -> None:
        self.on_write(chunk)
        place = self._places[chunk]
        start, stop = part_range(place.record, part)
        assert len(data) == stop - start, (chunk, part, len(data), stop - start)
        assert self.ledger.pending is None, "a write between prepare and committed"
        parts = _parts(place, part)
        assert not any((chunk, p) in self._written for p in parts), (
            f"chunk {chunk} is written twice before a commit"
        )
        base = self.ledger.entry.rows[place.row]
        assert not (place.frozen and base["weights_sum"]), f"chunk {chunk} is frozen"
        # a weights part that is absent may go to either slot; it is put beside the state part, so
        # that one read gets both parts
        slots = {
            p: 1 - int(base[f"{p}_slot" if base["weights_sum"] else "state_slot"]) for p in parts
        }
        sums = sums or self.sums(chunk, part, data)
        for slot, first, last in _extents(place, list(slots.items())):
            self._dirty.add(slot)
            what = f"chunk {chunk} after step {self.step}"
            self._slots[slot].write(data[first - start : last - start], place.offset + first, what)
        row = self._now[place.row]
        for p in parts:
            row[f"{p}_sum"], row[f"{p}_slot"] = sums[p], slots[p]
            self._written.add((chunk, p))
        if place.record.master and (chunk, WEIGHTS) not in self._written:
            row["weights_sum"] = 0

    def prepare(self, step: int, blob: bytes, steps: Rows | None = None) -> None:
        """Make the pending writes durable, together with a ledger record of `step` that contains
        `blob`. If the data was copied from another tier, `steps` holds the step that last wrote
        each chunk in that tier."""
        self.on_prepare(step)
        assert step > self.step and self.ledger.pending is None, (step, self.step)
        assert self.step >= 0 or all(map(self._whole, self._places.values())), (
            "a chunk has not been written"
        )
        for file in self._slots:
            file.check_linked(f"at step {step}")
        for slot in sorted(self._dirty):
            self._slots[slot].sync(f"at step {step}")
        self._dirty.clear()
        for chunk, _ in self._written:
            self._now[self._places[chunk].row]["step"] = step
        if steps is not None:
            self._now["step"] = steps
        self.ledger.append(step, self._now, blob)

    def committed(self, step: int) -> None:
        self.ledger.confirm()
        assert step == self.step, (step, self.step)
        self._reset()
        self.on_commit(step)

    def spill_write(self, chunk: int, data: memoryview, spill_slot: int = 0) -> None:
        """Write the gradient of one worker for a chunk to the spill file, without durability.
        `spill_slot` numbers the gradients of the same chunk. Raises FullError if the disk is
        full."""
        self._spill_sums[chunk, spill_slot] = len(data), digest(data)
        self._spill_file().write(data, *self._spilled(chunk, data, spill_slot))

    def spill_read(self, chunk: int, into: memoryview, spill_slot: int = 0) -> None:
        """Read the gradient that was last written for a chunk. If `into` is larger than the
        gradient, the additional bytes are undefined. Raises DamagedError if the checksum does not
        match."""
        offset, what = self._spilled(chunk, into, spill_slot)
        file, (nbytes, sum_) = self._spill_file(), self._spill_sums[chunk, spill_slot]
        assert len(into) >= nbytes, (chunk, len(into), nbytes)
        file.read(into, offset, what)
        if digest(into[:nbytes]) != sum_:
            hint = "repeat the command to resume the last committed step; the disk may be failing"
            raise DamagedError(f"{file.path}: {what} does not match its checksum", hint=hint)

    def _spilled(self, chunk: int, view: memoryview, spill_slot: int) -> tuple[int, str]:
        """Return the offset of a gradient in the spill file, and its description for messages."""
        place = self._places[chunk]
        assert len(view) <= place.spill_nbytes, (chunk, len(view), place.spill_nbytes)
        what = f"the spilled gradient of chunk {chunk} after step {self.step}"
        return place.spill + spill_slot * self._spill_nbytes, what

    def close(self) -> None:
        for file in [*self._slots, *([self._spill] if self._spill else [])]:
            file.close()
        self.ledger.close()
        self.locks.close()

    def check(self) -> None:
        """Assert the invariants of all fields (used by tests)."""
        assert (self._now["chunk"] == self.ledger.entry.rows["chunk"]).all()
        for chunk, place in self._places.items():
            now, base = self._now[place.row], self.ledger.entry.rows[place.row]
            for p in _parts(place, RECORD):
                if (chunk, p) in self._written and base[f"{p}_sum"]:
                    assert now[f"{p}_slot"] != base[f"{p}_slot"], (chunk, p)
            if not any((chunk, p) in self._written for p in (WEIGHTS, STATE_PART)):
                assert now == base, chunk

    def _reset(self) -> None:
        self._now = self.ledger.entry.rows.copy()
        self._written.clear()

    def _whole(self, place: ChunkPlace) -> bool:
        row = self._now[place.row]
        needed = [p for p in _parts(place, RECORD) if p == STATE_PART or not place.record.master]
        return all(row[f"{p}_sum"] for p in needed)

    def _spill_file(self) -> DirectFile:
        with self._lock:
            if self._spill is None:
                path = self.directory / "spill.bin"
                path.unlink(missing_ok=True)
                try:
                    self._spill = DirectFile(
                        path, direct=self._direct, create=self._spill_nbytes * self.spill_workers
                    )
                finally:
                    path.unlink(missing_ok=True)
            return self._spill


def _lay_out(meta: StoreMeta) -> tuple[dict[int, ChunkPlace], tuple[int, int, int]]:
    """Return the place of each chunk, and the sizes of slot 0, slot 1 and the spill file in
    bytes."""
    records = meta.owned(meta.index)
    chunks = sorted((meta.table.chunks[c] for c in records), key=lambda c: not c.trainable)
    places: dict[int, ChunkPlace] = {}
    at = both = spill = 0
    for chunk in chunks:
        r, scratch = records[chunk.id], round_up(chunk.numel * 4, PAGE) if chunk.trainable else 0
        places[chunk.id] = ChunkPlace(len(places), at, r, not chunk.trainable, spill, scratch)
        at, spill = at + r.nbytes, spill + scratch
        both = at if chunk.trainable else both
    return places, (at, both, spill)


def _parts(place: ChunkPlace, part: str) -> list[str]:
    """Return "weights", "state" or both: the contents of `part` that are not empty."""
    parts = [p for p in (WEIGHTS, STATE_PART) if part in (p, RECORD)]
    return [p for p in parts if p == WEIGHTS or place.record.state_nbytes]


def _extents(place: ChunkPlace, parts: list[tuple[str, int]]) -> list[tuple[int, int, int]]:
    """Return the byte ranges to read or write, each as (slot, first byte in the record, byte after
    the last)."""
    out = [(slot, *part_range(place.record, p)) for p, slot in parts]
    if len(out) == 2 and out[0][0] == out[1][0]:
        return [(out[0][0], out[0][1], out[1][2])]
    return out


def _check_room(directory: Path, nbytes: int) -> None:
    free = free_nbytes(directory)
    if nbytes > free:
        raise FullError(
            f"{directory}: the store needs {show_bytes(nbytes)}, but {show_bytes(free)} are free",
            hint="free space there, or spread the store over more directories",
        )
