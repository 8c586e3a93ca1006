"""Tier: where chunks' records rest (protocol); FileTier is the one that there is, RAM is the server's own arena.

A record is [public | private] (spec.chunks). A part is "public", "private" or "record" (both); a view handed in has
exactly the padded size of its part. Between two commits each part is written at most once. Writing only "private" of a
chunk that has a master there makes its public part *absent* until it is written again: it can be cast from the master.
Reading "record" then leaves the public bytes of `into` as they are.

Assumes: one thread at a time for one chunk; different chunks from any threads; no write between `prepare` and
`committed`. Does NOT know blocks, gradients or rules.
"""

from __future__ import annotations

from typing import Protocol

from roadtrain.spec.chunks import Record

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
