"""SharedCopies: parameters of which several stages have a copy each (tied embeddings), and how the
copies get one gradient.

Each stage has summed its own ranks' gradients and has them in shares. Each rank gets, from every
other stage, the elements of its own share, wherever that stage has them, so that the stages may be
of different widths; a gradient crosses a link between two stages once each way. The sums of the
stages are added in the order of the stages on all of them, so the copies stay equal, bit for bit
(Rule 1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from roadtrain.kernels.sum import sum_in_order
from roadtrain.stages.courier import Pending
from roadtrain.stages.data_group import RanksTogether, exchange_messages
from roadtrain.stages.flat_layout import Bucket, overlaps


class SharedCopies(RanksTogether):
    """`group`: all ranks of the stages that have a copy, stage by stage, replica by replica.
    `widths`: ranks of each of these stages."""

    def __init__(
        self, group: dist.ProcessGroup, widths: tuple[int, ...], device: torch.device
    ) -> None:
        super().__init__(group, device)
        self.widths = widths

    def __str__(self) -> str:
        return f"the copies in {super().__str__()}"

    @property
    def stage(self) -> int:
        """Which of the stages that have a copy this rank is in."""
        return sum(end <= self.rank for end in accumulate(self.widths))

    @property
    def replica(self) -> int:
        """Which of its stage's ranks this is."""
        return self.rank - sum(self.widths[: self.stage])

    @property
    def counts(self) -> bool:
        """Of all copies the first stage's counts in what is added up over the job."""
        return self.stage == 0

    def exchange(self, bucket: Bucket, own: torch.Tensor, arriving: torch.Tensor) -> Pending:
        """Begin. own: fp32 [share], summed over the stage; arriving: fp32 [stages - 1, share]."""
        assert self.group is not None
        others = len(self.widths) - 1
        place = bucket.of_rank(self.replica)
        splits = overlaps(bucket.numel, place.start, place.stop, self.widths)
        first = sum(self.widths[: self.stage])
        splits[first : first + self.widths[self.stage]] = [0] * self.widths[self.stage]
        sent = own if others == 1 else own.repeat(others)
        if own.device.type == "cpu":
            parts = sent.split(splits), arriving.view(-1).split(splits)
            return exchange_messages(*parts, self.group)
        work = dist.all_to_all_single(
            arriving.view(-1), sent, splits, splits, group=self.group, async_op=True
        )
        assert work is not None
        return work

    def sum_arrived(self, own: torch.Tensor, arriving: torch.Tensor) -> None:
        """own: the sum over all stages in their order. arriving: as exchanged."""
        terms = [*arriving[: self.stage], own.clone(), *arriving[self.stage :]]
        add_in_order(own, terms)


def links_of(
    shared: Mapping[str, SharedCopies], trainable: Collection[str]
) -> list[tuple[list[str], SharedCopies]]:
    """The names that each group of stages shares, in an order that is the same everywhere."""
    by_group: dict[int, tuple[list[str], SharedCopies]] = {}
    for name, copies in sorted(shared.items()):
        if name in trainable:
            by_group.setdefault(id(copies.group), ([], copies))[0].append(name)
    return list(by_group.values())


def add_in_order(total: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """total = the sum of `terms` (fp32, apart from `total`), left to right, wherever they are."""
    if total.device.type == "cpu":
        sum_in_order(total.numpy(), [(term.numpy(), "fp32") for term in terms])
        return
    total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term)
