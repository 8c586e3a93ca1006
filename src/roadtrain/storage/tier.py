"""The parts of a record, and what a tier (storage/file.py) promises; what rests in RAM lies in the
server's own arena.

A record is [public | private] (spec.chunks). A part is "public", "private" or "record" (both); a
view handed in has exactly the padded size of its part. Between two commits each part is written at
most once. Writing only "private" of a chunk that has a master there makes its public part *absent*
until it is written again: it can be cast from the master. Reading "record" then leaves the public
bytes of `into` as they are. What is written is pending until `committed`; `prepare` makes it
durable under a record of the step. Opening the tier again abandons what is pending.

Assumes: one thread at a time for one chunk; different chunks from any threads; no write between
`prepare` and `committed`. Does NOT know blocks, gradients or rules.
"""

from __future__ import annotations

from roadtrain.chunks import Record

PUBLIC, PRIVATE, RECORD = "public", "private", "record"


def part_range(record: Record, part: str) -> tuple[int, int]:
    """First and last byte of a part inside its record."""
    if part == PUBLIC:
        return 0, record.public_nbytes
    assert part in (PRIVATE, RECORD), part
    return (record.public_nbytes if part == PRIVATE else 0), record.nbytes
