"""DataGroup: collective operations of one stage's data-parallel ranks on flat memory. SharedCopies:
collective operations of stages that each have a copy of a parameter (tied embeddings).

On the host, gradients are exchanged in point-to-point messages, one per pair and direction, which
move each share once, and are summed in rank order in fp32 (Rule 1). gloo's own reduce-scatter is an
all-reduce inside and moves twice as many bytes. On an accelerator NCCL's reduce-scatter sums in an
order of its own, which the optimizer reports.

Note: gloo's all-to-all is slower than messages, because with large buffers one direction waits for
the other. On links of 50 Mbit/s it reaches 3.1 to 4.8 MB/s each way between two ranks, 3.9 to 4.9
between four. Messages reach 6.0, the full rate of such a link, and 5.3.

Note on copies: each stage has already summed the gradients of its own ranks, and keeps them in
shares. Each rank receives the elements of its own share from every other stage, from whichever
ranks have them, so stages may differ in width. A gradient crosses the link between two stages once
each way. All stages add the sums in stage order, so the copies stay equal to the bit (Rule 1).

Methods that start an operation return it for the caller to wait for; in a group of one rank they
return None.
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
# torch 2.13 renames them
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankCollectives:
    """Collective operations on small tensors on `device`, in place. `group`: None for a single
    rank. `deadline_s`: the group's timeout of one operation."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.width = 1 if group is None else dist.get_world_size(group)
        self.deadline_s = DEFAULT_DEADLINE_S if group is None else deadline_of(group, device)

    def __str__(self) -> str:
        return "a single rank" if self.group is None else ranks_of(self.group)

    def all_max(self, flags: torch.Tensor) -> Pending | None:
        """Start an all-reduce with the maximum."""
        if self.width == 1:
            return None
        return dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def broadcast(self, values: torch.Tensor) -> Pending | None:
        """Start a broadcast from the group's first rank."""
        if self.width == 1:
            return None
        return dist.broadcast(values, group=self.group, group_src=0, async_op=True)


class DataGroup(RankCollectives):
    """The data-parallel ranks of a stage."""

    @property
    def exact(self) -> bool:
        """Whether sums are in rank order."""
        return self.device.type == "cpu" or self.width == 1

    @property
    def exchanges(self) -> bool:
        """Whether a reduce-scatter needs a receive buffer."""
        return self.exact and self.width > 1

    def reduce_scatter(self, grads: torch.Tensor, arriving: torch.Tensor) -> Pending | None:
        """Start a reduce-scatter. grads: fp32 [width * share]; arriving: fp32 receive buffer of
        the same length."""
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
        """Sum the received shares into this rank's share of `grads`."""
        if self.exchanges:
            own = grads.view(self.width, -1)[self.rank]
            add_in_order(own, [*arriving.view(self.width, -1)])

    def all_gather(self, values: torch.Tensor) -> Pending | None:
        """Start an in-place all-gather of the shares in `values` [width * share]."""
        if self.width == 1:
            return None
        shares = values.view(self.width, -1)
        own = shares[self.rank]
        if self.exact and self.width == 2:  # gloo's ring uses one connection for both directions
            return self._exchange([own] * 2, shares.unbind())
        return _all_gather(values, own, group=self.group, async_op=True)

    def _exchange(self, sent: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Messages:
        assert self.group is not None
        return exchange_messages(sent, arriving, self.group)


class SharedCopies(RankCollectives):
    """The ranks of all stages that have a copy of the same parameters. `group`: ordered by stage,
    then by replica. `widths`: the number of ranks of each of these stages."""

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
        """The index of this rank's stage among the stages that have a copy."""
        return sum(end <= self.rank for end in accumulate(self.widths))

    @property
    def replica(self) -> int:
        """The index of this rank within its stage."""
        return self.rank - sum(self.widths[: self.stage])

    @property
    def counts(self) -> bool:
        """Whether this copy is included in sums over the job: only the first stage's is."""
        return self.stage == 0

    def exchange(self, bucket: Bucket, own: torch.Tensor, arriving: torch.Tensor) -> Pending:
        """Start exchanging this rank's share with the other stages. own: fp32 [share], summed over
        the stage; arriving: fp32 [stages - 1, share], receive buffer."""
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
        """Add the received sums of the other stages into `own`, in stage order."""
        terms = [*arriving[: self.stage], own.clone(), *arriving[self.stage :]]
        add_in_order(own, terms)


class Messages:
    """Sends and receives in flight (a Pending)."""

    def __init__(self, in_flight: Iterable[dist.Work | None]) -> None:
        self._in_flight = [message for message in in_flight if message is not None]

    def wait(self) -> None:
        """Wait until all are sent and received. Raises torch's error of the first that failed."""
        for message in self._in_flight:
            message.wait()


def exchange_messages(
    sent: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Messages:
    """Start sending `sent[r]` to rank r of `group` and receiving `arriving[r]` from it, for every
    other rank. Tensors are contiguous and as long as on the other side; empty ones are skipped.

    All ranks must start their exchanges in the same order, since the messages between two ranks
    are matched in the order in which they are sent."""
    rank, width = dist.get_rank(group), dist.get_world_size(group)
    # each rank starts with a different peer, so that the first sends do not all go to one rank
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
    """Name a group by its ranks, for messages."""
    return f"the group of ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"


def deadline_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's timeout of one operation, in seconds."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return DEFAULT_DEADLINE_S if timeout is None else float(timeout.total_seconds())


def add_in_order(total: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """Set `total` to the sum of `terms`, left to right, on any device. All are fp32; no term
    shares memory with `total`."""
    if total.device.type == "cpu":
        sum_in_order(total.numpy(), [(term.numpy(), "fp32") for term in terms])
        return
    total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term)
