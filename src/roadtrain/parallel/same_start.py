"""How the ranks of a stage, and the copies in other stages, begin with the same parameters.

Ranks that laid their parameters out differently are refused: their sums would mean nothing. Where
values differ those of the first rank (for copies: of the first stage) are taken, as torch's DDP
does, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import xxhash

from roadtrain.errors import ModelError
from roadtrain.parallel.courier import Pending

BITS = 62  # of a digest: it and its negative are int64


class Alike(Protocol):
    """A group of ranks, as the two collective operations that are needed here."""

    def any_of(self, flags: torch.Tensor) -> Pending | None: ...

    def from_first(self, values: torch.Tensor) -> Pending | None: ...


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


def differ(largest: torch.Tensor) -> list[bool]:
    return [int(row[0]) != -int(row[1]) for row in largest]


def begin_alike(
    group: Alike,
    device: torch.device,
    layout: str,
    values: Sequence[torch.Tensor],
    who: str,
    report: Callable[[str], None],
) -> None:
    """device: of the group's tensors. layout: how the rank has laid out `values`. Collective.
    Raises ModelError."""
    said = pair(digest(layout.encode()), digest_of(values)).to(device)
    _wait(group.any_of(said))
    other_layout, other_values = differ(said)
    if other_layout:
        raise ModelError(
            f"the ranks of {who} have different parameters, dtypes, parameter groups or sizes of"
            " buckets",
            hint="they build the same model and optimizer, with the same options",
        )
    if other_values:
        report(f"{who}: parameters differ at the start; those of its first rank are taken")
        for value in values:
            first = _bytes(value)
            _wait(group.from_first(first))
            value.copy_(first.view(value.dtype).view(value.shape))


def _wait(work: Pending | None) -> None:
    if work is not None:
        work.wait()
