"""StageOptimizer: the interface between the pipeline and the optimizer of a stage. The optimizer's
state is either divided among the stage's data-parallel ranks, or placed on servers or files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from roadtrain.stages.pieces import Extent, Piece, PieceSource


class StageOptimizer(PieceSource, Protocol):
    """The optimizer of one rank's share of the model. A step consists of a call of `begin_step`,
    the forwards and backwards of the micro-batches, a call of `sum_squares` if gradients are
    clipped, and a call of `step`.

    Gradients are summed over the ranks of the stage, never averaged, because the pipeline divides
    each micro-batch's loss by the number of micro-batches of the whole step.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's parameter groups. Each step reads its learning rates from these groups."""

    @property
    def steps_done(self) -> int:
        """The number of steps that the job has taken, over all of its starts."""

    def begin_step(self, backwards: int) -> None:
        """Begin a step. Parameters of the previous step may still be in flight; each block waits
        for its own parameters before it runs. backwards: the number of backwards that this rank
        runs through each part of the stage in this step. After the last of these backwards, the
        gradients are complete."""

    def sum_squares(self) -> float:
        """Wait for the summed gradients. Return the sum of the squares of the gradients in this
        rank's share. The sum of the results of all ranks of the job is the square of the global
        norm."""

    def step(self, scale: float = 1.0) -> None:
        """Update the parameters with `scale` times the gradients, and clear the gradients. The
        update may continue while the next forward runs."""

    def settle(self) -> None:
        """Wait until all work of the previous step has ended, so that the process groups are free
        for other operations. Raises PeerError if a rank is lost."""

    def extents(self) -> list[Extent]:
        """Return the extents (ranges of parameter elements) that this rank provides. Each element
        of the stage is provided by exactly one of the stage's ranks."""

    def piece(self, extent: Extent) -> Piece:
        """Wait for the previous step, and return a copy of the parameter values and the optimizer
        state of an extent (a range of parameter elements)."""

    def needed(self) -> list[Extent]:
        """Return the extents (ranges of parameter elements) that `load` must receive on this
        rank."""

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """Replace parameter values and optimizer state by the content of `pieces`. Collective over
        the stage's ranks. steps_done: the number of steps that the job has taken with these
        values."""

    def abandon(self) -> None:
        """Drop all pending work after an error, without waiting for the work to end. No method may
        be called afterwards."""

    def close(self) -> None:
        """Wait for pending work and end the threads. The model's parameters are not changed."""
