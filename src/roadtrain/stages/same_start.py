"""How the ranks of a stage, and the copies in other stages, begin with the same parameters.

Ranks that laid their parameters out differently are refused: their sums would mean nothing. Where
values differ those of the first rank (for copies: of the first stage) are taken, as torch's DDP
does, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash

from roadtrain.errors import ModelError
from roadtrain.stages.courier import Pending, typed
from roadtrain.stages.data_group import RanksTogether

BITS = 62  # of a digest: it and its negative are int64


def digest(*parts: Any) -> int:
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(part)
    return int(total.intdigest()) >> (64 - BITS)


def digest_of(values: Sequence[torch.Tensor]) -> int:
    return digest(*(_bytes(value).cpu().numpy() for value in values))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory where it is contiguous, else a copy."""
    return value.detach().contiguous().view(-1).view(torch.uint8)


def pair(*digests: int) -> torch.Tensor:
    """What, taken the largest of over ranks, says whether they are the same on all (`differ`)."""
    return torch.tensor([[value, -value] for value in digests], dtype=torch.int64)


def differ(largest: Sequence[Sequence[int]]) -> list[bool]:
    """Of each pair."""
    return [value != -negative for value, negative in largest]


def sync_start(
    group: RanksTogether,
    who: str,
    layout: str,
    values: Sequence[torch.Tensor],
    report: Callable[[str], None],
) -> None:
    """who: the ranks of `group` are, for people. layout: how the rank has laid out `values`.
    Collective. Raises ModelError, PeerError."""

    def wait(begin: Callable[[torch.Tensor], Pending | None], tensor: torch.Tensor) -> None:
        try:
            if (work := begin(tensor)) is not None:
                work.wait()
        except RuntimeError as error:
            told = typed(error, f"{who}: the comparison of first values", group.deadline_s)
            raise told from error

    said = pair(digest(layout.encode()), digest_of(values)).to(group.device)
    wait(group.any_of, said)
    other_layout, other_values = differ(said.tolist())
    if other_layout:
        raise ModelError(
            f"{who}: ranks have different parameters, dtypes, parameter groups or sizes of buckets",
            hint="they build the same model and optimizer, with the same options",
        )
    if other_values:
        report(f"{who}: parameters differ at the start; those of its first rank are taken")
        for value in values:
            first = _bytes(value).to(group.device)
            wait(group.from_first, first)
            value.copy_(first.view(value.dtype).view(value.shape))
