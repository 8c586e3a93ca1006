"""The parts of a record, and what a tier (storage/file.py) promises; what rests in RAM lies in the
server's own arena.

A record is [weights | state] (chunks.py). A part is "weights", "state" or "record" (both); a
view handed in has exactly the padded size of its part. Between two commits each part is written at
most once. Writing only "state" of a chunk that has a master there makes its weights part *absent*
until it is written again: it can be cast from the master. Reading "record" then leaves the public
bytes of `into` as they are. What is written is pending until `committed`; `prepare` makes it
durable under a record of the step. Opening the tier again abandons what is pending.

Assumes: one thread at a time for one chunk; different chunks from any threads; no write between
`prepare` and `committed`. Does NOT know blocks, gradients or rules.
"""

from __future__ import annotations

from roadtrain.chunks import Record

WEIGHTS, STATE_PART, RECORD = "weights", "state", "record"


def part_range(record: Record, part: str) -> tuple[int, int]:
    """First and last byte of a part inside its record."""
    if part == WEIGHTS:
        return 0, record.weights_nbytes
    assert part in (STATE_PART, RECORD), part
    return (record.weights_nbytes if part == STATE_PART else 0), record.nbytes
