"""The work of a step in its simplest form, for tests of stage sizes."""

from __future__ import annotations

from roadtrain.stages.protocol.step_model import BoundarySpeed, StageSpeed, StepWork


def still_work(
    stages: tuple[StageSpeed, ...], blocks: int, num_microbatches: int, virtual_stages: int = 1
) -> StepWork:
    """Equal blocks, one replica per stage, and messages that take no time."""
    count = len(stages)
    boundaries = count if virtual_stages > 1 and count > 1 else count - 1
    return StepWork(
        stages,
        (1.0,) * blocks,
        num_microbatches,
        (1,) * count,
        (BoundarySpeed(),) * boundaries,
        virtual_stages=virtual_stages,
    )
