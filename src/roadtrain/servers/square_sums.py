"""Sums of squares of a block's gradient, from the sums of segments that its servers send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roadtrain.chunks import Block
from roadtrain.servers.protocol.block_state import BlockLayout


class BlockSegments:
    """The segments of a block's trainable chunks, in the order of the table.

    Args:
        block: The block.
        layout: Its layout.
        owners: The servers of each chunk of the table.
    """

    def __init__(self, block: Block, layout: BlockLayout, owners: Sequence[Sequence[int]]) -> None:
        self._params = [param for param, _ in layout.params]
        index = {param: i for i, param in enumerate(self._params)}
        of: list[int] = []
        at: dict[int, list[int]] = {server: [] for server in layout.holders}
        for chunk in block.trainable:
            here = range(len(of), len(of) + len(chunk.segments))
            of += [index[param] for param, _, _ in chunk.segments]
            for server in owners[chunk.id]:
                at[server] += here
        self._of = np.array(of)  # [segments]: index of each segment's parameter
        # server -> the positions of its segments among all segments
        self._at = {server: np.array(here) for server, here in at.items()}

    def sums_of_squares(self, values: Mapping[int, Any], workers: int) -> dict[int, float]:
        """Return a dict: index of a parameter -> sum of squares of its mean gradient.

        `values` are the sums of the segments that each server holds. The order of the additions
        does not depend on the number of servers (Rule 1).
        """
        squares = np.empty(len(self._of))
        for server, sums in values.items():
            squares[self._at[server]] = sums
        found = np.bincount(self._of, squares / workers**2)
        return dict(zip(self._params, found.tolist()))
