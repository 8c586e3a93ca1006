"""StageOptimizer: the interface between the pipeline and the optimizer of a stage, which is either
sharded over the stage's data-parallel group or placed on servers and files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from roadtrain.stages.pieces import Extent, Piece, PieceSource


class StageOptimizer(PieceSource, Protocol):
    """The optimizer of one rank's share of the model. The calls of a step are `begin_step`, the
    forwards and backwards of the micro-batches, `sum_squares` if gradients are clipped, and `step`.

    Gradients are summed over the ranks of the stage, never averaged, because the pipeline divides
    each micro-batch's loss by the number of micro-batches of the whole step.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's parameter groups; learning rates are read from them at each step."""

    @property
    def steps_done(self) -> int:
        """The number of steps taken, over all starts of the job."""

    def begin_step(self, backwards: int) -> None:
        """Begin a step. Parameters of the last step may still be in flight; each block waits for
        its own before it runs. backwards: this rank's backward passes through each part of the
        stage in this step, after which a gradient is complete."""

    def sum_squares(self) -> float:
        """Return the sum of squares of this rank's share of the summed gradients, after waiting for
        them. The sum over all ranks of the job is the square of the global norm."""

    def step(self, scale: float = 1.0) -> None:
        """Update the parameters with `scale` times the gradients, and clear the gradients. The
        update may continue while the next forward runs."""

    def settle(self) -> None:
        """Wait until all work of the last step has ended, so that its process groups may be used
        for something else. Raises PeerError."""

    def extents(self) -> list[Extent]:
        """Return the extents that this rank provides; every element of the stage is provided by
        exactly one of its ranks."""

    def piece(self, extent: Extent) -> Piece:
        """Copy the values of an extent, after waiting for the last step."""

    def needed(self) -> list[Extent]:
        """Return the extents that `load` must receive on this rank."""

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """Replace values and state. Collective over the stage's ranks."""

    def abandon(self) -> None:
        """Drop all pending work without waiting for it, after an error. No other call may
        follow."""

    def close(self) -> None:
        """Wait for pending work and end the threads. The model's parameters are not changed."""
