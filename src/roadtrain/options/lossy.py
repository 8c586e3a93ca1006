"""The options that make training lossy or delayed: TopK, Downcast and Delay. All are off by default
(Rule 2). Does NOT check which options can be combined (placement/session_plan.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from roadtrain.options.check import Checked, PositiveInt

# number of steps whose gradients a server must be able to store if the delay has no bound (Rule 4)
NO_BOUND = 16


@dataclass(frozen=True)
class TopK(Checked):
    """Send only the largest elements of each gradient, by magnitude.

    Args:
        keep: The fraction of the elements that is sent, between 0 and 1. 0.01 sends 2 % of the
            bytes of an fp32 gradient, since each value comes with its index.
        error_feedback: Add the elements that were not sent to the next gradient.
        per_block: Select the largest elements of a whole block, not of each chunk.

    Raises:
        ConfigError: An option is out of range.
    """

    keep: Annotated[float, Field(gt=0, lt=1, description="a fraction between 0 and 1 (0.01: 1 %)")]
    error_feedback: bool = False
    per_block: bool = False

    def __str__(self) -> str:
        return (
            f"top-k, {self.keep:.2%} of the gradient's elements are kept, error feedback"
            f" {self.error_feedback}"
        )


@dataclass(frozen=True)
class Downcast(Checked):
    """Send gradients of fp32 parameters to servers in 16 bits; servers sum them in fp32.

    Args:
        dtype: "bf16" or "fp16".

    Raises:
        ConfigError: The dtype is not bf16 or fp16.
    """

    dtype: Literal["bf16", "fp16"]

    def __str__(self) -> str:
        return f"gradients travel as {self.dtype}"


@dataclass(frozen=True)
class Delay(Checked):
    """Let a step begin before the updates of the latest steps are finished.

    If `steps` is 1, each step computes with the parameters from before the last update, which runs
    at the same time. If `steps` is larger, each step computes with the newest parameters available.
    A slow worker then does not immediately hold up other workers, but runs are not reproducible.

    Args:
        steps: The largest number of updates that the parameters of a step may lack. If None, the
            limit is 16, because a server stores the gradients of at most 16 steps.

    Raises:
        ConfigError: `steps` is less than 1.
    """

    steps: PositiveInt | None = 1

    @property
    def staleness(self) -> int:
        """The largest number of updates that the parameters of a step may lack."""
        return NO_BOUND if self.steps is None else self.steps

    def __str__(self) -> str:
        lacking = "the last update" if self.staleness == 1 else f"up to {self.staleness} updates"
        return f"each step computes with parameters that lack {lacking}"
