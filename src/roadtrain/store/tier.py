"""Tier: where chunks' records rest, and the RAM tier.

A record is [public | private] (spec.chunks). A part is "public", "private" or "record" (both); a view handed in has
exactly the padded size of its part. Between two commits each part is written at most once. Writing only "private" of a
chunk that has a master there makes its public part *absent* until it is written again: it can be cast from the master.
Reading "record" then leaves the public bytes of `into` as they are.

Assumes: one thread at a time for one chunk; different chunks from any threads; no write between `prepare` and
`committed`. Does NOT know blocks, gradients or rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from roadtrain.errors import StoreError
from roadtrain.spec.chunks import Record
from roadtrain.store.buffers import Buffer

PUBLIC, PRIVATE, RECORD = "public", "private", "record"


class Tier(Protocol):
    def read(self, chunk: int, part: str, into: memoryview) -> None:
        """The newest written. DamagedError (file, chunk, step) where the bytes are not those that were written."""

    def write(self, chunk: int, part: str, data: memoryview) -> None:
        """Pending until `committed`. FullError, GoneError."""

    def prepare(self, step: int, blob: bytes) -> None:
        """All that was written is durable, under a record of `step`. For directory 0 this is the commit."""

    def committed(self, step: int) -> None:
        """`step` is committed everywhere: what is pending becomes what counts."""

    def drop_pending(self) -> None:
        """Abandon what was written since the last commit. StoreError where a tier has only one slot."""

    def close(self) -> None: ...


def part_range(record: Record, part: str) -> tuple[int, int]:
    """First and last byte of a part inside its record."""
    if part == PUBLIC:
        return 0, record.public_nbytes
    assert part in (PRIVATE, RECORD), part
    return (record.public_nbytes if part == PRIVATE else 0), record.nbytes


class RamTier:
    """One slot a chunk in memory: a step cannot be abandoned once written, and nothing outlives the process."""

    def __init__(self, records: Mapping[int, Record]) -> None:
        self._records = dict(records)
        self._buffers = {chunk: Buffer(r.nbytes) for chunk, r in self._records.items()}
        self.nbytes = sum(b.nbytes for b in self._buffers.values())
        self._absent: set[int] = set()  # chunks whose public part is older than their private part
        self._written: set[tuple[int, str]] = set()  # parts written since the last commit
        self.step, self.blob = -1, b""

    def read(self, chunk: int, part: str, into: memoryview) -> None:
        start, stop = part_range(self._records[chunk], part)
        assert len(into) == stop - start, (chunk, part, len(into), stop - start)
        assert part != PUBLIC or chunk not in self._absent, f"public part of chunk {chunk} is absent"
        if part == RECORD and chunk in self._absent:
            start = self._records[chunk].public_nbytes
        into[len(into) - (stop - start) :] = self._buffers[chunk].view[start:stop]

    def write(self, chunk: int, part: str, data: memoryview) -> None:
        start, stop = part_range(self._records[chunk], part)
        assert len(data) == stop - start, (chunk, part, len(data), stop - start)
        parts = {(chunk, p) for p in ((PUBLIC, PRIVATE) if part == RECORD else (part,))}
        assert not parts & self._written, f"chunk {chunk} is written twice before a commit"
        self._buffers[chunk].view[start:stop] = data
        self._written |= parts
        if (chunk, PUBLIC) in self._written:
            self._absent.discard(chunk)
        elif self._records[chunk].master:
            self._absent.add(chunk)

    def has_public(self, chunk: int) -> bool:
        return chunk not in self._absent

    def prepare(self, step: int, blob: bytes) -> None:
        self.step, self.blob = step, blob

    def committed(self, step: int) -> None:
        assert step == self.step, (step, self.step)
        self._written.clear()

    def drop_pending(self) -> None:
        if self._written:
            raise StoreError(
                f"{len(self._written)} parts since step {self.step} rest in RAM, in one slot: they cannot be undone",
                hint="keep the state on files, or decide on a bad step before its update",
            )

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
