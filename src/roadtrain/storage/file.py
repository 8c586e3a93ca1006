"""FileTier: one directory's records in two slot files, with direct I/O, checksums and a commit
record a step.

Note "two slots": both files have the same offsets. A part is written into the slot that does not
hold its committed bytes; the ledger record of a step says which slot counts. So the step before is
whole until the commit, and after it until the next step writes. Frozen chunks come last and exist
in slot 0 only.

Assumes: what storage/tier.py says; one process writes a directory (the ledger's lock). Does NOT
decide when to commit, and does NOT know the other directories (storage/generation.py does).
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
    row: int  # in the ledger
    offset: int  # in both slot files
    record: Record
    frozen: bool
    spill: int  # offset in the spill file
    spill_nbytes: int


class FileTier:
    """The generation directory `directory` at the record of exactly `step`, or the newest; with
    `create`, files of the full size, empty. `note`: say it once. Without `settle` nothing is
    written before that is called. Raises FullError with both numbers, GoneError, DamagedError,
    ForeignError.

    `on_write`, `on_prepare`, `on_commit`: set by storage/snapshot.py, which copies what is
    committed; called before a chunk is written and a step prepared, and after its commit."""

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
        self.spill_workers = 1  # whose gradients the spill file has room for
        self._lock = threading.Lock()  # the making of the spill file
        # the newest; as last committed but for chunks of _written
        self._now: Rows = np.zeros(len(self._places), ROW)
        self._now["chunk"] = list(self._places)
        # so that the first write goes to slot 0
        self._now["weights_slot"] = self._now["state_slot"] = 1
        self._written: set[tuple[int, str]] = set()  # parts written since the last commit
        self._dirty: set[int] = set()  # slots written since their last sync
        self._slots: list[DirectFile] = []
        self.found: tuple[int, ...] = ()  # steps of which there were records when it was opened
        self.said: list[str] = []  # what happened to the directory when it was opened
        self.locks = Locks()  # that this tier holds until it is closed
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
                    raise DamagedError(f"{path}: truncated: {held} bytes, {nbytes} are needed")
            if create:
                sync_directory(directory)
            else:
                self.found = self.ledger.load(step)
                self._take()
                assert self._now["chunk"].tolist() == list(self._places)
                if settle:
                    self.settle()

    @property
    def entry(self) -> LedgerEntry:
        """What is committed; it is not changed later."""
        return self.ledger.entry

    @property
    def step(self) -> int:
        """The last committed one; -1 before the first."""
        return self.ledger.entry.step

    @property
    def blob(self) -> bytes:
        return self.ledger.entry.blob

    @property
    def note(self) -> str:
        lines = [*self.said, *(f.note for f in self._slots if f.note), *self.ledger.dropped]
        return "; ".join(dict.fromkeys(lines))

    def check_all(self) -> None:
        """Reads every chunk of the newest step. Raises DamagedError."""
        most = max((place.record.nbytes for place in self._places.values()), default=0)
        buffer = Buffer(most).view
        for chunk, place in self._places.items():
            row = self._now[place.row]
            for part in _parts(place, RECORD):
                if row[f"{part}_sum"]:
                    start, stop = part_range(place.record, part)
                    self.read(chunk, part, buffer[: stop - start])

    def settle(self) -> None:
        """What was found when it was opened is durable, and what does not count is gone, before
        anything is written."""
        # of its description: it may have been read before its name was durable
        sync_directory(self.directory)
        self.ledger.settle()

    def written_in(self, chunk: int) -> int:
        """The step that wrote `chunk` last."""
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
        """`check`: else the caller does, before it uses what was read. `rows`: of an older
        step, else the newest."""
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
        """What `rows` say of a chunk, checked, is written in `to`. Returns its bytes."""
        place, row = self._places[chunk], rows[self._places[chunk].row]
        part = RECORD if row["weights_sum"] else STATE_PART
        start, stop = part_range(place.record, part)
        view = buffer[: stop - start]
        self.read(chunk, part, view, rows=rows)
        to.write(chunk, part, view, {p: int(row[f"{p}_sum"]) for p in _parts(place, part)})
        return len(view)

    def check_sums(self, chunk: int, part: str, data: memoryview, rows: Rows | None = None) -> None:
        """Raises DamagedError where `data` is not what was written."""
        row = (self._now if rows is None else rows)[self._places[chunk].row]
        for p, found in self.sums(chunk, part, data).items():
            if row[f"{p}_sum"] not in (0, found):
                raise DamagedError(
                    f"{self._slots[row[f'{p}_slot']].path}: chunk {chunk}: its {p} part does not"
                    f" match its checksum, written at step {row['step']}, last committed step"
                    f" {self.step}",
                    hint="restore the store from a copy; the disk may be failing",
                )

    def sums(self, chunk: int, part: str, data: memoryview) -> dict[str, int]:
        """The checksums that `write` will want: cheapest where `data` was just made and lies in
        the cache."""
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
        # a weights part that is absent may go to either slot: beside the state part, so that one
        # read gets both
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
        """`steps`: those in which each chunk was written last, where it was copied from
        elsewhere."""
        self.on_prepare(step)
        assert step > self.step and self.ledger.pending is None, (step, self.step)
        assert self.step >= 0 or all(map(self._whole, self._places.values())), (
            "a chunk was never written"
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
        self._take()
        self.on_commit(step)

    def spill_write(self, chunk: int, data: memoryview, spill_slot: int = 0) -> None:
        """Scratch bytes of a chunk (a worker's gradient): not durable. FullError at the first
        call, and beyond the spill slots of `spill_workers`."""
        self._spill_sums[chunk, spill_slot] = len(data), digest(data)
        self._spill_file().write(data, *self._spilled(chunk, data, spill_slot))

    def spill_read(self, chunk: int, into: memoryview, spill_slot: int = 0) -> None:
        """What was written last, and zeros or older bytes behind it. DamagedError where it is
        something else."""
        offset, what = self._spilled(chunk, into, spill_slot)
        file, (nbytes, sum_) = self._spill_file(), self._spill_sums[chunk, spill_slot]
        assert len(into) >= nbytes, (chunk, len(into), nbytes)
        file.read(into, offset, what)
        if digest(into[:nbytes]) != sum_:
            hint = "the same command goes on from the last committed step; the disk may be failing"
            raise DamagedError(f"{file.path}: {what} does not match its checksum", hint=hint)

    def _spilled(self, chunk: int, view: memoryview, spill_slot: int) -> tuple[int, str]:
        """Where it lies in the spill file, and what it is."""
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
        """All that the fields promise (tests call it)."""
        assert (self._now["chunk"] == self.ledger.entry.rows["chunk"]).all()
        for chunk, place in self._places.items():
            now, base = self._now[place.row], self.ledger.entry.rows[place.row]
            for p in _parts(place, RECORD):
                if (chunk, p) in self._written and base[f"{p}_sum"]:
                    assert now[f"{p}_slot"] != base[f"{p}_slot"], (chunk, p)
            if not any((chunk, p) in self._written for p in (WEIGHTS, STATE_PART)):
                assert now == base, chunk

    def _take(self) -> None:
        """The newest is what is committed."""
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
    """Places by chunk, trainable ones first, and the bytes of slot 0, slot 1 and the spill file."""
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
    """Those of the weights and the state part that `part` means and that have bytes."""
    parts = [p for p in (WEIGHTS, STATE_PART) if part in (p, RECORD)]
    return [p for p in parts if p == WEIGHTS or place.record.state_nbytes]


def _extents(place: ChunkPlace, parts: list[tuple[str, int]]) -> list[tuple[int, int, int]]:
    """(slot, first byte, last byte) inside the record: one where the parts lie side by side in
    one slot."""
    out = [(slot, *part_range(place.record, p)) for p, slot in parts]
    if len(out) == 2 and out[0][0] == out[1][0]:
        return [(out[0][0], out[0][1], out[1][2])]
    return out


def _check_room(directory: Path, nbytes: int) -> None:
    free = free_nbytes(directory)
    if nbytes > free:
        raise FullError(
            f"{directory}: the store needs {show_bytes(nbytes)} here, {show_bytes(free)} are free",
            hint="free space there, or spread the store over more directories",
        )
