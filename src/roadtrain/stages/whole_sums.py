"""WholeSums: what sums a stage's gradients elsewhere than in its data group (the summation
service; sums/service_sums.py), so that every rank gets the whole sum."""

from __future__ import annotations

from typing import Protocol

import torch


class SumUnderWay(Protocol):
    """One tensor's sum."""

    def wait(self) -> torch.Tensor:
        """The sum, on the tensor's device; valid until the same number is summed again. Raises
        PeerError, DifferError."""


class WholeSums(Protocol):
    """Of one rank. Sums are in the order of the ranks, or host by host in that order."""

    def begin(self, number: int, grads: torch.Tensor, what: str) -> SumUnderWay:
        """All ranks call it with the same numbers and `what` (for people), in one order. grads:
        fp32, flat, not to be changed before its sum is there."""

    def close(self) -> None:
        """Waits a little for the other ranks, who may still need what sums on this one."""
