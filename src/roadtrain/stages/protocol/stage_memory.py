"""What a pipeline stage of given blocks needs of a device's memory, and whether that fits.

Parameters and gradients of the stage are whole on each replica; the optimizer's state may be split
over them. The activations of `PipelineShape.ahead` micro-batches wait for a backward. Arithmetic
only. Does NOT measure what there is.
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

HALVINGS = 50  # of the range in which the least lacking bytes are


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """parameters: how many. activation_bytes: that a micro-batch leaves until its backward."""

    parameters: int
    activation_bytes: int


@dataclass(frozen=True)
class StageMemory:
    """The memories of a pipeline's stages that do `work`. `fits` is what `best_sizes` asks."""

    work: StepWork
    rooms: tuple[float, ...]  # bytes, of each stage: of its device with the least
    blocks: tuple[BlockMemory, ...]
    # what comes before and after all blocks
    ends: tuple[BlockMemory, BlockMemory] = (BlockMemory(0, 0), BlockMemory(0, 0))
    parameter_bytes: float = 4.0  # of each parameter of the stage, on each replica
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0  # of each parameter once over the replicas; 0: state is elsewhere

    @property
    def stages(self) -> int:
        return len(self.rooms)

    def need(self, stage: int, blocks: Sequence[range]) -> float:
        """Bytes. blocks: of each of the stage's parts, or of those that are known."""
        parts = [self._of_part(part * self.stages + stage, own) for part, own in enumerate(blocks)]
        whole = self.parameter_bytes + self.gradient_bytes
        state = self.state_bytes / self.work.widths[stage]
        kept = sum(one.parameters for one in parts) * (whole + state)
        largest = max((one.activation_bytes for one in parts), default=0)
        return kept + self._ahead(stage) * largest

    def fits(self, stage: int, blocks: Sequence[range]) -> bool:
        return self.need(stage, blocks) <= self.rooms[stage]

    def refusal(self) -> BudgetError:
        """For memories that no sizes fit: the stages that lack least."""
        sizes = self._with_more(self._least_lacking()) or even(len(self.blocks), self.work.parts)
        own = blocks_of(sizes, self.stages)
        needs = [self.need(stage, blocks) for stage, blocks in enumerate(own)]
        worst = max(range(self.stages), key=lambda stage: needs[stage] - self.rooms[stage])
        lacks = needs[worst] - self.rooms[worst]
        return BudgetError(
            f"no division of {len(self.blocks)} blocks into {self.stages} stages fits: stage"
            f" {worst} with {sum(map(len, own[worst]))} blocks needs {show_bytes(needs[worst])} on"
            f" each device, {show_bytes(self.rooms[worst])} are free",
            hint=f"{show_bytes(lacks)} more on each would fit; or take more stages, smaller"
            " micro-batches, activation checkpointing, or a placement that keeps state elsewhere",
        )

    def _least_lacking(self) -> float:
        """Bytes that each device would have to have more, at least."""
        total = range(len(self.blocks))
        low, high = 0.0, max(self.need(s, (total,)) for s in range(self.stages))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._with_more(middle) else (middle, high)
        return high

    def _with_more(self, nbytes: float) -> tuple[int, ...] | None:
        """Sizes that fit with so much more on each device: as many blocks to each part as go,
        from the first on."""
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
        """Passes whose activations are held at once."""
        work = self.work
        shape = PipelineShape(stage, 0, work.widths, work.virtual_stages, work.num_microbatches)
        return shape.ahead

    def _of_part(self, part: int, blocks: range) -> BlockMemory:
        found = [self.blocks[i] for i in blocks]
        found += [self.ends[0]] * (part == 0)
        found += [self.ends[1]] * (part == self.work.parts - 1)
        return BlockMemory(
            sum(one.parameters for one in found), sum(one.activation_bytes for one in found)
        )
