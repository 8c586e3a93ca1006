"""Rule: the update that computes new parameters from a gradient, in the process that stores the
state.

A rule has fp32 state arrays as long as the parameters, and a row of float64 scalars per parameter.
Users write their own rules as subclasses; `roadtrain check-rule` checks them.

`apply` is elementwise: a range may be cut anywhere, and each piece is then updated with its own
copy of the row. A rule is picklable and keeps nothing between calls. Does NOT read files or start
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
    """An elementwise optimizer update. Arrays and scalars have torch's names ("exp_avg", "step"),
    so that checkpoints look like those of torch."""

    # False if the update does not depend on the old state arrays, so that servers do not read them
    reads_state: bool = True

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def arrays(self) -> tuple[str, ...]:
        """The names of the fp32 state arrays, each [N]. The arrays start as zeros."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the float64 scalars in the row of a parameter. The scalars start as zeros,
        and `apply` changes them (for example, it adds 1 to "step")."""
        return ()

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the hyperparameters of a torch parameter group as floats. Called at each step.
        Raises RuleError if the rule does not support an option's value."""

    def start(self, p: Array, arrays: Arrays, row: Array, hyper: Hyper) -> None:
        """Set the arrays and the row to their first values. Not needed if these are zeros. p:
        float32 [N]."""
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
        """Run one step, which updates p, arrays and row in place.

        p, arrays: float32 [N]. row: float64 [len(scalars)]. grad: float32 [N], or uint16 [N] with
        the bits of grad_dtype, "bf16" or "fp16"; the step multiplies grad by grad_scale. copy:
        None, or uint16 [N], which receives the new p in copy_dtype, "bf16" or "fp16".
        """

    @abstractmethod
    def reference(self, *args: Any) -> None:
        """Run the step of `apply`, with the same arguments, in plain numpy. `apply` must give the
        same bits."""
