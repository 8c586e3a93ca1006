"""The rules of a tier (storage/file.py), which stores the records of chunks.

A record is [weights | state]. The methods of a tier take the argument `part`: "weights", "state",
or "record" for both. A memoryview given to a tier has the padded size of what `part` names. Between
two commits, the weights and the state of a chunk are each written at most once.

Most chunks keep a master (fp32 weights) in their state. If only the state of such a chunk is
written, its weights become *absent* until they are written again. Reading the record then leaves
the weights bytes of the view unchanged.

Writes are pending until `committed` is called. `prepare` makes pending writes durable, together
with a ledger record of the step. Closing the tier discards pending writes.

Different threads may use different chunks at the same time. Nothing may be written between
`prepare` and `committed`. A tier computes no updates.
"""

from __future__ import annotations

from roadtrain.chunks import Record

WEIGHTS, STATE_PART, RECORD = "weights", "state", "record"


def part_range(record: Record, part: str) -> tuple[int, int]:
    """Return the byte range inside a record that `part` names: (first byte, byte after the
    last)."""
    if part == WEIGHTS:
        return 0, record.weights_nbytes
    assert part in (STATE_PART, RECORD), part
    return (record.weights_nbytes if part == STATE_PART else 0), record.nbytes
