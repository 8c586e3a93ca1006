"""The parts of a record, and the rules of a tier (storage/file.py) that holds records.

A record is [weights | state] (chunks.py). A part is "weights", "state" or "record" (both). A view
that is passed in has exactly the padded size of its part. Between two commits each part is written
at most once. If only "state" is written for a chunk that has a master in it, its weights part
becomes *absent* until it is written again: it can be cast from the master. Reading "record" then
leaves the weights bytes of the view unchanged. Writes are pending until `committed`; `prepare`
makes them durable under a record of the step. Opening the tier again discards pending writes.

Assumes one thread at a time per chunk (different chunks may be used by different threads), and no
write between `prepare` and `committed`. State in RAM is in the server's own arena instead. Does not
know blocks, gradients or rules.
"""

from __future__ import annotations

from roadtrain.chunks import Record

WEIGHTS, STATE_PART, RECORD = "weights", "state", "record"


def part_range(record: Record, part: str) -> tuple[int, int]:
    """Return the first and the last byte of a part inside its record."""
    if part == WEIGHTS:
        return 0, record.weights_nbytes
    assert part in (STATE_PART, RECORD), part
    return (record.weights_nbytes if part == STATE_PART else 0), record.nbytes
