"""GradientSum: the interface of services that sum a stage's gradients in place of the stage's
ranks. Every rank receives the complete sum.

The implementation is a function that the entry point `service` names. It returns a GradientSum, or
None if there is nothing to sum. roadtrain's own is the summation service (sums/service_sums.py):

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
    """The sum of one tensor, which may still be in flight."""

    def wait(self) -> torch.Tensor:
        """Wait for the sum and return it, on the device of the summed tensor. The result is valid
        until the next sum with the same number begins. Raises PeerError and DifferError."""


class GradientSum(Protocol):
    """The connection of one rank to a summation service. Gradients are added in rank order: all
    ranks, or first those of each host and then the hosts' sums."""

    def sum(self, number: int, identity: str, tensor: torch.Tensor) -> SumUnderWay:
        """Start a sum. All ranks must make the same calls in the same order.

        number: the number of the bucket. identity: a description of the sum, for errors. tensor: a
        flat fp32 tensor, which must not change until the sum has arrived.
        """

    def close(self) -> None:
        """Close the connection after a short wait, because other ranks may still need this rank."""


def connect_gradient_sum(
    options: ParallelOptions, control: ControlLinks, address: str, report: Callable[[str], None]
) -> GradientSum | None:
    """Connect to the service that sums the gradients of all ranks. Collective. address: this host's
    address on the data group's network. Raises ConfigError and PeerError."""
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
