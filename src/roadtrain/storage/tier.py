"""The parts of a record, and the rules of a tier (storage/file.py) that holds records.

A record is [weights | state] (chunks.py). A part is "weights", "state" or "record" (both). A
memoryview that is passed to a tier has exactly the padded size of the part that the tier reads or
writes. Between two commits each part is written at most once.

The state part of most chunks contains a master, from which the weights can be cast. If only the
state part of such a chunk is written, the weights part becomes *absent* until the weights part is
written again. Reading "record" while the weights part is absent leaves the weights bytes of the
view unchanged.

Writes are pending until `committed` is called. `prepare` makes pending writes durable, together
with a ledger record of the step. If the tier is closed and opened again, pending writes are
discarded.

Assumes that each chunk is used by one thread at a time (different threads may use different
chunks), and that nothing is written between `prepare` and `committed`. A tier only stores bytes; it
computes no updates. A server that keeps its state in process memory has no tier.
"""

from __future__ import annotations

from roadtrain.chunks import Record

WEIGHTS, STATE_PART, RECORD = "weights", "state", "record"


def part_range(record: Record, part: str) -> tuple[int, int]:
    """Return the byte range of a part inside its record: (first byte, byte after the last)."""
    if part == WEIGHTS:
        return 0, record.weights_nbytes
    assert part in (STATE_PART, RECORD), part
    return (record.weights_nbytes if part == STATE_PART else 0), record.nbytes
