"""StageOptimizer: what the pipeline asks of whatever updates a stage's parameters: sharded over the
stage's data-parallel group, or placed on servers and files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from roadtrain.stages.pieces import Extent, Piece, PieceSource


class StageOptimizer(PieceSource, Protocol):
    """The optimizer of one rank's share of the model. A step is: `begin_step`, the micro-batches'
    forwards and backwards, `sum_squares` where gradients are clipped, `step`.

    Gradients are summed over the ranks of the stage, never averaged: the pipeline has divided each
    micro-batch's loss by the number of micro-batches of the whole step.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Torch's own form; learning rates are read from here at each step."""

    @property
    def steps_done(self) -> int:
        """Steps taken, over all starts of the job."""

    def begin_step(self, backwards: int) -> None:
        """Parameters of the last step may still be on their way (a block waits before it runs).
        backwards: passes of this step on this rank through each part of the stage; after so many a
        gradient is whole."""

    def sum_squares(self) -> float:
        """Of the step's summed gradients, of this rank's share alone, so that the sum over all
        ranks of the job is the square of the global norm. Waits for the gradients."""

    def step(self, scale: float = 1.0) -> None:
        """Update with `scale` times the gradients, and forget them. May go on while the next
        forward runs."""

    def settle(self) -> None:
        """Wait until nothing of the last step is under way, so that its process groups may be used
        by others. Raises PeerError."""

    def extents(self) -> list[Extent]:
        """What this rank keeps of the stage: every element of the stage once over its ranks."""

    def piece(self, extent: Extent) -> Piece:
        """Waits for the last step."""

    def needed(self) -> list[Extent]:
        """What `load` must be given on this rank."""

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """Take values and state. Collective over the stage's ranks."""

    def abandon(self) -> None:
        """After an error: forget what is under way, without waiting for it. Nothing follows."""

    def close(self) -> None:
        """Wait for what is under way; end threads. The model's parameters stay as they are."""
