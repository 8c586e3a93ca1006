"""StageOptimizer: the interface between the pipeline and a stage's optimizer. The optimizer
state is either divided among the stage's data-parallel ranks, or stored on servers or in files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from roadtrain.stages.pieces import Extent, Piece, PieceSource


class StageOptimizer(PieceSource, Protocol):
    """The optimizer of one rank's share of the model. A step is a call of `begin_step`, the
    forwards and backwards, a call of `sum_squares` if gradients are clipped, and a call of `step`.

    Gradients are summed over the ranks of the stage, never averaged, because each micro-batch's
    loss is divided by the number of micro-batches of the whole step.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's parameter groups, from which each step reads its learning rates."""

    @property
    def steps_done(self) -> int:
        """The number of steps that the job has taken, over all of its starts."""

    def begin_step(self, backwards: int) -> None:
        """Begin a step. backwards: the number of backwards that this rank runs through each segment
        of the stage in the step."""

    def sum_squares(self) -> float:
        """Wait for the summed gradients, and return the sum of their squares in this rank's share.
        Summed over all ranks of the job, this is the square of the global norm."""

    def step(self, scale: float = 1.0) -> None:
        """Update the parameters with `scale` times the gradients, and clear the gradients. The
        update may continue while the next forward runs."""

    def settle(self) -> None:
        """Wait until all work of the previous step has ended, so that the process groups are free.
        Raises PeerError if a rank is lost."""

    def extents(self) -> list[Extent]:
        """Return the extents (ranges of parameter elements) that this rank provides. Exactly one of
        the stage's ranks provides each element."""

    def piece(self, extent: Extent) -> Piece:
        """Wait for the previous step, and return a copy of the values and optimizer state of an
        extent."""

    def needed(self) -> list[Extent]:
        """Return the extents (ranges of parameter elements) that `load` must receive on this
        rank."""

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """Replace parameter values and optimizer state by those of `pieces`. Collective over the
        stage's ranks. steps_done: the number of steps that the job has taken with these values."""

    def abandon(self) -> None:
        """Drop all pending work after an error, without waiting. No method may be called
        afterwards."""

    def close(self) -> None:
        """Wait for pending work and end the threads. The model's parameters are not changed."""
