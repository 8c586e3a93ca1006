"""Compute the memory that a pipeline stage needs on its devices, and whether the stage fits. Does
NOT measure memory.

Each replica has all parameters and gradients of the stage; the optimizer state is divided among the
replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roadtrain.errors import BudgetError
from roadtrain.stages.parallelism import even
from roadtrain.stages.protocol.pipeline import PipelineShape
from roadtrain.stages.protocol.stage_sizes import blocks_of
from roadtrain.stages.protocol.step_model import StepWork
from roadtrain.units import show_bytes

HALVINGS = 50  # number of steps of the bisection that finds the least missing bytes


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """The memory of one block."""

    parameters: int  # number of parameters
    activation_bytes: int  # bytes that a micro-batch holds until its backward


@dataclass(frozen=True)
class StageMemory:
    """A model of the memory that a pipeline's stages need on their devices."""

    work: StepWork
    rooms: tuple[float, ...]  # for each stage, the free bytes of its smallest device
    blocks: tuple[BlockMemory, ...]
    # the code before the first block and after the last block
    ends: tuple[BlockMemory, BlockMemory] = (BlockMemory(0, 0), BlockMemory(0, 0))
    parameter_bytes: float = 4.0  # per parameter on each replica
    gradient_bytes: float = 4.0  # per parameter on each replica
    # per parameter, sharded over the replicas; 0 if state is not on the device
    state_bytes: float = 8.0

    @property
    def stages(self) -> int:
        return len(self.rooms)

    def need(self, stage: int, blocks: Sequence[range]) -> float:
        """Return the bytes that a stage needs on each of its devices. blocks: the stage's ranges of
        blocks, in the model's order; without the later ranges, the result is a lower bound."""
        parts = [self._of_part(part * self.stages + stage, own) for part, own in enumerate(blocks)]
        whole = self.parameter_bytes + self.gradient_bytes
        state = self.state_bytes / self.work.widths[stage]
        kept = sum(part.parameters for part in parts) * (whole + state)
        largest = max((part.activation_bytes for part in parts), default=0)
        return kept + self._ahead(stage) * largest

    def fits(self, stage: int, blocks: Sequence[range]) -> bool:
        return self.need(stage, blocks) <= self.rooms[stage]

    def refusal(self) -> BudgetError:
        """Return the error for the case that no sizes fit in memory, which names the missing
        bytes."""
        sizes = self._with_more(self._least_lacking()) or even(len(self.blocks), self.work.parts)
        own = blocks_of(sizes, self.stages)
        needs = [self.need(stage, blocks) for stage, blocks in enumerate(own)]
        worst = max(range(self.stages), key=lambda stage: needs[stage] - self.rooms[stage])
        lacks = needs[worst] - self.rooms[worst]
        return BudgetError(
            f"no division of {len(self.blocks)} blocks into {self.stages} stages fits: stage"
            f" {worst} with {sum(map(len, own[worst]))} blocks needs {show_bytes(needs[worst])} on"
            f" each device, but {show_bytes(self.rooms[worst])} are free",
            hint=f"free {show_bytes(lacks)} more on each device, or use more stages, smaller"
            " micro-batches, activation checkpointing, or a placement that keeps state elsewhere",
        )

    def _least_lacking(self) -> float:
        """Return the smallest number of additional bytes per device with which some sizes would
        fit."""
        total = range(len(self.blocks))
        low, high = 0.0, max(self.need(s, (total,)) for s in range(self.stages))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._with_more(middle) else (middle, high)
        return high

    def _with_more(self, nbytes: float) -> tuple[int, ...] | None:
        """Return sizes that fit if each device has `nbytes` more memory, or None."""
        sizes: list[int] = []
        for part in range(self.work.parts):
            stage, begin = part % self.stages, sum(sizes)
            most = len(self.blocks) - begin - (self.work.parts - 1 - part)
            takes = [
                n
                for n in range(1, most + 1)
                if self.need(stage, blocks_of([*sizes, n], self.stages)[stage])
                <= self.rooms[stage] + nbytes
            ]
            if not takes:
                return None
            sizes.append(takes[-1])
        return tuple(sizes) if sum(sizes) == len(self.blocks) else None

    def _ahead(self, stage: int) -> int:
        work = self.work
        shape = PipelineShape(stage, 0, work.widths, work.virtual_stages, work.num_microbatches)
        return shape.ahead

    def _of_part(self, part: int, blocks: range) -> BlockMemory:
        found = [self.blocks[i] for i in blocks]
        found += [self.ends[0]] * (part == 0)
        found += [self.ends[1]] * (part == self.work.parts - 1)
        return BlockMemory(
            sum(block.parameters for block in found), sum(block.activation_bytes for block in found)
        )
