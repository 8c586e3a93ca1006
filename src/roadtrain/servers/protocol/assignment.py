"""The assignment of chunks to servers. The chunks of a block are distributed over all servers, so
all servers read them at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from roadtrain.chunks import ChunkTable


def assign(table: ChunkTable, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the owner (a server number) of each chunk.

    `weights` are the relative rates of the servers, which get elements in this proportion.
    Trainable and frozen chunks are distributed separately, because only trainable chunks are
    written in every step.
    """
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
