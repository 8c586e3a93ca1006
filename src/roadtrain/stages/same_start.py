"""Give all ranks of a stage the same initial values, and so all stages that have copies of a
parameter.

Ranks with different layouts of their parameters are refused, because sums over them would be
meaningless. If values differ, all ranks get the values of the first rank, as in torch's DDP, and
the difference is reported. For copies of a parameter, the first rank of the first stage is used.
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


def digest_of(values: Sequence[torch.Tensor]) -> int:
    return digest(*(_bytes(value).cpu().numpy() for value in values))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor as bytes, or a copy if the tensor is not contiguous."""
    return value.detach().contiguous().view(-1).view(torch.uint8)


def pair(*digests: int) -> torch.Tensor:
    """Return an int64 tensor [digests, 2] of each digest and its negative. The maximum of this
    tensor over all ranks shows whether all ranks have the same digest (`differ`)."""
    return torch.tensor([[value, -value] for value in digests], dtype=torch.int64)


def differ(largest: Sequence[Sequence[int]]) -> list[bool]:
    """Return, for each digest, whether it differs between ranks. largest: the maximum of the result
    of `pair` over all ranks."""
    return [value != -negative for value, negative in largest]


def sync_start(
    group: RankCollectives,
    who: str,
    layout: str,
    values: Sequence[torch.Tensor],
    report: Callable[[str], None],
) -> None:
    """Check that all ranks of `group` have the same `layout`, and overwrite their `values` by those
    of the first rank. Collective. who: the group's name in messages. layout: a description of how
    the rank arranges `values`. Raises ModelError if layouts differ, and PeerError."""

    def wait(begin: Callable[[torch.Tensor], Pending | None], tensor: torch.Tensor) -> None:
        try:
            if (work := begin(tensor)) is not None:
                work.wait()
        except RuntimeError as error:
            what = f"{who}: the comparison of initial values"
            raise typed(error, what, group.deadline_s) from error

    digests = pair(digest(layout.encode()), digest_of(values)).to(group.device)
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
