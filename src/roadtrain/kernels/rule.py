"""Rule: what turns a gradient into new parameters, next to wherever the state rests.

A rule is a small value: it says which fp32 arrays (as long as the parameters) and which float64
scalars (a row per parameter) it keeps, reads hyperparameters from a torch parameter group at each
step, and updates one contiguous range in place. Users write their own by subclassing; `roadtrain
check-rule` checks it (training/check_rule.py).

Assumes: `apply` is elementwise, so that a range may be cut anywhere, each piece with its own copy
of the row. A rule is picklable and keeps nothing between calls. Does NOT hold state, read files or
thread.
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
    """Arrays and scalars carry torch's own state names ("exp_avg", "step"), so that checkpoints
    read alike.
    `reads_state`: the update needs what was there; else the server does not read it."""

    reads_state: bool = True

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def arrays(self) -> tuple[str, ...]:
        """Names of the fp32 state arrays, each [N]. They start as zeros."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the float64 scalars that a parameter has. They start as zeros; `apply`
        advances them."""
        return ()

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Plain floats from a torch parameter group, read at each step. Raises RuleError on
        what cannot be honoured."""

    def start(self, p: Array, arrays: Arrays, row: Array, hyper: Hyper) -> None:
        """Fill zeroed arrays and row where the rule's state does not start as zeros. p: float32
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
        """One step. p, arrays: float32 [N] in place. grad: float32 [N], or uint16 [N] holding
        "bf16" or "fp16"; it is multiplied by grad_scale. row: float64 [len(scalars)] in place.
        copy: uint16 [N], gets p as "bf16" or "fp16".
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
        """The same step, written plainly: `apply` must give the same bits."""
