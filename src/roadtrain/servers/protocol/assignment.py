"""The assignment of chunks to servers. The chunks of a block are spread over all servers, so that
they are read from all devices at once. With equal weights, the bytes of any two servers differ by
at most one chunk."""

from __future__ import annotations

from collections.abc import Sequence

from roadtrain.chunks import ChunkTable


def assign(table: ChunkTable, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the owner of each chunk. `weights`: relative rates of the servers. Each chunk goes to
    the server whose share would be filled least by it (ties: the lowest number). Trainable and
    frozen chunks are spread independently, since only trainable ones are written every step."""
    owners = [0] * len(table.chunks)
    for kind in (True, False):
        filled = [0.0] * len(weights)
        for chunk in table.chunks:
            if chunk.trainable is kind:
                best = min(
                    range(len(weights)), key=lambda s: ((filled[s] + chunk.numel) / weights[s], s)
                )
                filled[best] += chunk.numel
                owners[chunk.id] = best
    return tuple(owners)
