"""TopK, Downcast and Delay: what makes training lossy or late, each a choice (Rule 2).

Each value checks itself; which of them go together is placement/session_plan.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from roadtrain.options.check import PositiveInt, check_options

NO_BOUND = 16  # steps whose gradients a server must then be able to put away (Rule 4)


@dataclass(frozen=True)
class TopK:
    """Only the largest elements of a gradient, by magnitude, are sent to be applied. Raises
    ConfigError."""

    # the fraction of the elements that is kept; 0.01 is 2 % of the bytes of fp32
    keep: Annotated[float, Field(gt=0, lt=1, description="a fraction between 0 and 1 (0.01: 1 %)")]
    error_feedback: bool = False  # what was not sent is added to the next gradient
    per_block: bool = False  # the largest of a whole block, not of each chunk

    def __post_init__(self) -> None:
        check_options(TopK, vars(self))

    def __str__(self) -> str:
        return (
            f"top-k, {self.keep:.2%} of the gradient's elements are kept, error feedback"
            f" {self.error_feedback}"
        )


@dataclass(frozen=True)
class Downcast:
    """Whole gradients of fp32 parameters travel to servers in 16 bits; they are summed in fp32.
    Raises ConfigError."""

    dtype: Literal["bf16", "fp16"]

    def __post_init__(self) -> None:
        check_options(Downcast, vars(self))

    def __str__(self) -> str:
        return f"gradients travel as {self.dtype}"


@dataclass(frozen=True)
class Delay:
    """How many of the last updates the parameters of a step may lack. 1: each step computes with
    the parameters from before the last step's update, which runs meanwhile. More: with the newest
    that there are, so that a slow worker does not hold up the others at once; runs differ then.
    Raises ConfigError."""

    # None: no bound but that of what servers put away, NO_BOUND steps
    steps: PositiveInt | None = 1

    def __post_init__(self) -> None:
        check_options(Delay, vars(self))

    @property
    def staleness(self) -> int:
        """The number of updates that a step lacks at most."""
        return NO_BOUND if self.steps is None else self.steps

    def __str__(self) -> str:
        lacking = "the last update" if self.staleness == 1 else f"up to {self.staleness} updates"
        return f"each step computes with parameters that lack {lacking}"
