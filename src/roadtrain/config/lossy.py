"""TopK, Downcast and Delay: what makes training lossy or late, each a choice (Rule 2).

Each value checks itself; which of them go together is api/request.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roadtrain.errors import ConfigError

NO_BOUND = 16  # steps whose gradients a server must then be able to put away (Rule 4)
DOWNCASTS = ("bf16", "fp16")


def is_number(value: Any) -> bool:
    """Whether `value` is a whole number or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class TopK:
    """Only the largest elements of a gradient, by magnitude, are sent to be applied. Raises
    ConfigError."""

    keep: float  # the fraction of the elements that is kept; 0.01 is 2 % of the bytes of fp32
    error_feedback: bool = False  # what was not sent is added to the next gradient
    per_block: bool = False  # the largest of a whole block, not of each chunk

    def __post_init__(self) -> None:
        if not is_number(self.keep) or not 0 < self.keep < 1:
            raise ConfigError(
                f"top-k keeps a fraction between 0 and 1 of the elements, not {self.keep!r}",
                hint="keep=0.01 keeps 1 %",
            )

    def __str__(self) -> str:
        return (
            f"top-k, {self.keep:.2%} of the gradient's elements are kept, error feedback"
            f" {self.error_feedback}"
        )


@dataclass(frozen=True)
class Downcast:
    """Whole gradients of fp32 parameters travel to servers in 16 bits; they are summed in fp32.
    Raises ConfigError."""

    dtype: str  # "bf16" or "fp16"

    def __post_init__(self) -> None:
        if self.dtype not in DOWNCASTS:
            raise ConfigError(
                f"gradients cannot travel as {self.dtype!r}", hint="Downcast('bf16') or ('fp16')"
            )

    def __str__(self) -> str:
        return f"gradients travel as {self.dtype}"


@dataclass(frozen=True)
class Delay:
    """How many of the last updates the parameters of a step may lack. 1: each step computes with
    the parameters from before the last step's update, which runs meanwhile. More: with the newest
    that there are, so that a slow worker does not hold up the others at once; runs differ then.
    Raises ConfigError."""

    steps: int | None = 1  # None: no bound but that of what servers put away, NO_BOUND steps

    def __post_init__(self) -> None:
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise ConfigError(
                f"a delay of {self.steps!r} updates (the staleness of a step)",
                hint="Delay(1), Delay of more, or Delay(None): no bound; leave it out for none",
            )

    @property
    def staleness(self) -> int:
        """The number of updates that a step lacks at most."""
        return NO_BOUND if self.steps is None else self.steps

    def __str__(self) -> str:
        lacking = "the last update" if self.staleness == 1 else f"up to {self.staleness} updates"
        return f"each step computes with parameters that lack {lacking}"
