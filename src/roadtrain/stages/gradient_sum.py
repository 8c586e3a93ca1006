"""GradientSum: the interface of sums of a stage's gradients outside of its data group, which give
every rank the whole sum, and the look-up of its implementation.

An entry point names a function that is called as below and returns a GradientSum, or None where
there is nothing to sum; `service` is the summation service (sums/service_sums.py):

    [project.entry-points."roadtrain.gradient_sums"]
    service = "roadtrain.sums.service_sums:connect_sums"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from roadtrain.stages.control_links import ControlLinks
from roadtrain.stages.parallel_options import ParallelOptions
from roadtrain.transport.plugins import load


class SumUnderWay(Protocol):
    """One tensor's sum."""

    def wait(self) -> torch.Tensor:
        """The sum, on the tensor's device; valid until the same number is summed again. Raises
        PeerError, DifferError."""


class GradientSum(Protocol):
    """One rank's side. Sums are in the order of the ranks, or host by host in that order."""

    def sum(self, number: int, identity: str, tensor: torch.Tensor) -> SumUnderWay:
        """Begin a sum. All ranks call it with the same numbers and the same `identity` (which says
        in words what is summed), in one order. tensor: fp32, flat, not to be changed before its sum
        is there."""

    def close(self) -> None:
        """Wait a little for the other ranks, who may still need what sums on this one."""


def connect_gradient_sum(
    options: ParallelOptions, control: ControlLinks, address: str, report: Callable[[str], None]
) -> GradientSum | None:
    """The sum of this rank's gradients with those of all ranks of the job by the summation service.
    address: this host's, as the other ranks reach it. Collective. Raises ConfigError, PeerError."""
    connect = load("roadtrain.gradient_sums", "service")
    found: GradientSum | None = connect(
        options.reducers,
        options.reducers_token_file,
        control,
        alone=options.reducers_alone,
        hosts=[place.host for place in control.places],
        address=address,
        deadline_s=options.deadline_s,
        report=report,
    )
    return found
