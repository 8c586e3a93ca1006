"""Make the initial values of parameters the same on all ranks of a stage, and in all stages that
have a copy of a parameter.

All get the values of the first rank (of the first stage), as in torch's DDP, and a difference is
reported. Ranks with different layouts of their parameters are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash

from roadtrain.errors import ModelError
from roadtrain.stages.data_group import RankCollectives
from roadtrain.stages.op_queue import Pending, typed

BITS = 62  # number of bits of a digest, so that the digest and its negative fit into int64


def digest(*parts: Any) -> int:
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(part)
    return int(total.intdigest()) >> (64 - BITS)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the tensor: a view if it is contiguous, otherwise a copy."""
    return value.detach().contiguous().view(-1).view(torch.uint8)


def pair(*digests: int) -> torch.Tensor:
    """Return an int64 tensor [digests, 2] with each digest and its negative. Its maximum over ranks
    shows whether all ranks have the same digests (`differ`)."""
    return torch.tensor([[value, -value] for value in digests], dtype=torch.int64)


def differ(largest: Sequence[Sequence[int]]) -> list[bool]:
    """Return, for each digest, whether ranks disagree. largest: the maximum over ranks of `pair`'s
    tensor."""
    return [value != -negative for value, negative in largest]


def sync_start(
    group: RankCollectives,
    who: str,
    layout: str,
    values: Sequence[torch.Tensor],
    report: Callable[[str], None],
) -> None:
    """Check that all ranks of `group` have the same `layout`, and overwrite `values` by those of
    the first rank. Collective.

    who: the group's name in messages. layout: a description of how the rank arranges `values`.
    Raises ModelError if layouts differ, and PeerError if the communication fails.
    """

    def wait(begin: Callable[[torch.Tensor], Pending | None], tensor: torch.Tensor) -> None:
        try:
            if (work := begin(tensor)) is not None:
                work.wait()
        except RuntimeError as error:
            what = f"{who}: the comparison of initial values"
            raise typed(error, what, group.deadline_s) from error

    of_values = digest(*(_bytes(value).cpu().numpy() for value in values))
    digests = pair(digest(layout.encode()), of_values).to(group.device)
    wait(group.all_max, digests)
    other_layout, other_values = differ(digests.tolist())
    if other_layout:
        raise ModelError(
            f"{who}: ranks have different parameters, dtypes, parameter groups or bucket sizes",
            hint="build the same model and optimizer, with the same options, on all ranks",
        )
    if other_values:
        report(f"{who}: parameters differ at the start; those of the first rank are used")
        for value in values:
            first = _bytes(value).to(group.device)
            wait(group.broadcast, first)
            value.copy_(first.view(value.dtype).view(value.shape))
