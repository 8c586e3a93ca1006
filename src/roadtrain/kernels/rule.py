"""Rule: the update that turns a gradient into new parameters, run where the state is stored.

A rule is a small value. It declares the fp32 arrays (as long as the parameters) and the float64
scalars (a row per parameter) that it needs, reads hyperparameters from a torch parameter group at
each step, and updates one contiguous range in place. Users write their own by subclassing;
`roadtrain check-rule` checks it (training/check_rule.py).

Assumes: `apply` is elementwise, so a range may be cut anywhere, each piece with its own copy of the
row. A rule is picklable and keeps nothing between calls. Does NOT hold state, read files or start
threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = Sequence[np.ndarray]
Hyper = Sequence[float]


class Rule(ABC):
    """An elementwise optimizer update. Arrays and scalars carry torch's own state names ("exp_avg",
    "step"), so that checkpoints look like torch's."""

    # False: the update does not depend on the old state arrays, and servers do not read them
    reads_state: bool = True

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def arrays(self) -> tuple[str, ...]:
        """The names of the fp32 state arrays, each [N]. They start as zeros."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the float64 scalars of a parameter. They start as zeros; `apply` advances
        them."""
        return ()

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Read the hyperparameters of a torch parameter group as floats; called at each step.
        Raises RuleError if the rule cannot follow an option's value."""

    def start(self, p: Array, arrays: Arrays, row: Array, hyper: Hyper) -> None:
        """Initialize zeroed arrays and row if the rule's state does not start as zeros. p: float32
        [N]."""
        return

    @abstractmethod
    def apply(
        self,
        p: Array,
        grad: Array,
        grad_dtype: str,
        arrays: Arrays,
        row: Array,
        hyper: Hyper,
        grad_scale: float,
        copy: Array | None,
        copy_dtype: str | None,
    ) -> None:
        """Run one step. p, arrays: float32 [N] in place. grad: float32 [N], or uint16 [N] holding
        "bf16" or "fp16"; it is multiplied by grad_scale. row: float64 [len(scalars)] in place.
        copy: uint16 [N], receives p as "bf16" or "fp16".
        """

    @abstractmethod
    def reference(
        self,
        p: Array,
        grad: Array,
        grad_dtype: str,
        arrays: Arrays,
        row: Array,
        hyper: Hyper,
        grad_scale: float,
        copy: Array | None,
        copy_dtype: str | None,
    ) -> None:
        """Run the same step in plain numpy; `apply` must give the same bits."""
