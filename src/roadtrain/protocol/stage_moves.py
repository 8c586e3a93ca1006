"""Which blocks go from which stage to which, when stages get other sizes or become more or fewer.
Pure arithmetic. Does NOT move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roadtrain.errors import ConfigError
from roadtrain.protocol.stage_sizes import blocks_of


@dataclass(frozen=True, slots=True)
class BlockMove:
    block: int
    source: int  # the stage that had it
    target: int  # the stage that has it from now on


def stage_of_blocks(sizes: Sequence[int], stages: int) -> list[int]:
    """Of each block. sizes: of each part in the model's order; part i is of stage i mod stages."""
    found = {
        block: stage
        for stage, parts in enumerate(blocks_of(sizes, stages))
        for part in parts
        for block in part
    }
    return [found[block] for block in range(sum(sizes))]


def block_moves(
    before: Sequence[int], stages_before: int, after: Sequence[int], stages_after: int
) -> list[BlockMove]:
    """Of the blocks that change their stage, in the model's order. Raises ConfigError where it is
    not the same number of blocks."""
    if sum(before) != sum(after):
        raise ConfigError(f"stages with {sum(before)} blocks cannot become ones with {sum(after)}")
    pairs = zip(stage_of_blocks(before, stages_before), stage_of_blocks(after, stages_after))
    return [BlockMove(i, a, b) for i, (a, b) in enumerate(pairs) if a != b]
