"""DataGroup: the collective operations of one stage's data-parallel ranks on flat memory.
SharedCopies: those of stages that have a copy of a parameter each (tied embeddings).

On the host gradients are exchanged in messages, one a pair and direction, which move each share
once, and are summed in the order of the ranks in fp32 (Rule 1). gloo's own reduce-scatter is an
all-reduce inside and moves twice as much. On an accelerator NCCL's reduce-scatter sums in an order
of its own, which is said.

Note: messages instead of gloo's all-to-all. With large buffers that waits with one direction for
the other: two ranks with links of 50 Mbit/s get 3.1 to 4.8 MB/s each way, four get 3.9 to 4.9.
Messages get 6.0, which is what such a link carries, and 5.3.

Note: copies. Each stage has summed its own ranks' gradients and has them in shares. Each rank gets,
from every other stage, the elements of its own share, wherever that stage has them, so that the
stages may be of different widths; a gradient crosses a link between two stages once each way. The
sums of the stages are added in the order of the stages on all of them, so the copies stay equal,
bit for bit (Rule 1).

An operation that has begun is returned, to be waited for; a group of one begins none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from roadtrain.kernels.sum import sum_in_order
from roadtrain.stages.flat_layout import Bucket, overlaps
from roadtrain.stages.op_queue import Pending

DEFAULT_DEADLINE_S = 600.0
# torch 2.13 renames it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankCollectives:
    """What all ranks of a group do with small tensors on `device`, in place. `group`: None for one
    rank alone. `deadline_s`: that the group gives one operation."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.width = 1 if group is None else dist.get_world_size(group)
        self.deadline_s = DEFAULT_DEADLINE_S if group is None else deadline_of(group, device)

    def __str__(self) -> str:
        return "a group of one" if self.group is None else ranks_of(self.group)

    def all_max(self, flags: torch.Tensor) -> Pending | None:
        """Begin: the largest of each element over the ranks."""
        if self.width == 1:
            return None
        return dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def broadcast(self, values: torch.Tensor) -> Pending | None:
        """Begin: those of the group's first rank."""
        if self.width == 1:
            return None
        return dist.broadcast(values, group=self.group, group_src=0, async_op=True)


class DataGroup(RankCollectives):
    """The data-parallel ranks of a stage."""

    @property
    def exact(self) -> bool:
        """Whether sums are in the order of the ranks."""
        return self.device.type == "cpu" or self.width == 1

    @property
    def exchanges(self) -> bool:
        """Whether a reduce-scatter needs memory for what arrives."""
        return self.exact and self.width > 1

    def reduce_scatter(self, grads: torch.Tensor, arriving: torch.Tensor) -> Pending | None:
        """Begin. grads: fp32 [width * share]; arriving: fp32 of the same length, memory to use."""
        if self.width == 1:
            return None
        shares = grads.view(self.width, -1)
        own = shares[self.rank]
        if not self.exact:
            return _reduce_scatter(own, grads, group=self.group, async_op=True)
        places = arriving.view(self.width, -1)
        places[self.rank].copy_(own)
        return self._exchange(shares.unbind(), places.unbind())

    def sum_arrived(self, grads: torch.Tensor, arriving: torch.Tensor) -> None:
        """The sum over ranks of the own share, into the own share of `grads`."""
        if self.exchanges:
            own = grads.view(self.width, -1)[self.rank]
            add_in_order(own, [*arriving.view(self.width, -1)])

    def all_gather(self, values: torch.Tensor) -> Pending | None:
        """Begin, in place: each rank's share of `values` [width * share] comes to all."""
        if self.width == 1:
            return None
        shares = values.view(self.width, -1)
        own = shares[self.rank]
        if self.exact and self.width == 2:  # in gloo's ring both directions share a connection
            return self._exchange([own] * 2, shares.unbind())
        return _all_gather(values, own, group=self.group, async_op=True)

    def _exchange(self, sent: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Messages:
        assert self.group is not None
        return exchange_messages(sent, arriving, self.group)


class SharedCopies(RankCollectives):
    """`group`: all ranks of the stages that have a copy, stage by stage, replica by replica.
    `widths`: ranks of each of these stages."""

    group: dist.ProcessGroup

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


class Messages:
    """Messages under way (a Pending)."""

    def __init__(self, under_way: Iterable[dist.Work | None]) -> None:
        self._under_way = [message for message in under_way if message is not None]

    def wait(self) -> None:
        """All have been sent and received. Raises torch's error of the first that was not."""
        for message in self._under_way:
            message.wait()


def exchange_messages(
    sent: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Messages:
    """Begin: `sent[r]` goes to rank r of `group`, `arriving[r]` comes from it; each is contiguous
    and as long as the other side's. Empty ones and a rank's own are left out.

    All ranks begin their exchanges in the same order: messages of a pair arrive in the order in
    which they are sent."""
    rank, width = dist.get_rank(group), dist.get_world_size(group)
    # each rank begins with another one, so that not all send to the same at first
    others = [(rank + step) % width for step in range(1, width)]
    receives = [
        dist.irecv(arriving[other], group=group, group_src=other)
        for other in reversed(others)
        if arriving[other].numel()
    ]
    sends = [
        dist.isend(sent[other], group=group, group_dst=other)
        for other in others
        if sent[other].numel()
    ]
    return Messages([*receives, *sends])


def ranks_of(group: dist.ProcessGroup) -> str:
    """For people."""
    return f"the group of ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"


def deadline_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that the group gives one operation."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return DEFAULT_DEADLINE_S if timeout is None else float(timeout.total_seconds())


def add_in_order(total: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """total = the sum of `terms` (fp32, apart from `total`), left to right, wherever they are."""
    if total.device.type == "cpu":
        sum_in_order(total.numpy(), [(term.numpy(), "fp32") for term in terms])
        return
    total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term)
