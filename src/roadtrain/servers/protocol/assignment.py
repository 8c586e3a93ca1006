"""Which server owns which chunk. Chunks of one block are spread over all servers, so that a
block is read from all devices at once; with equal weights every server's bytes differ by at most
one chunk."""

from __future__ import annotations

from collections.abc import Sequence

from roadtrain.chunks import ChunkTable


def assign(table: ChunkTable, weights: Sequence[float]) -> tuple[int, ...]:
    """Owner of each chunk. `weights`: relative rates of the servers. Each chunk goes to the
    server whose share would be least filled with it (ties: the lowest number); trainable and
    frozen chunks are spread apart from each other, since only the first are written every
    step."""
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
