"""DataGroup: the collective operations of one stage's data-parallel ranks on flat memory.
SharedCopies: those of stages that each have a copy of a parameter (tied embeddings).

On the host, gradients go from rank to rank in point-to-point messages. So each share is sent once,
and each rank sums its share in rank order, in fp32 (Rule 1). gloo's reduce-scatter would send twice
as many bytes, and its all-to-all reaches only 3.1 to 4.9 MB/s instead of 5.3 to 6.0 MB/s on links
of 50 Mbit/s. On an accelerator, NCCL determines the order of sums.

Note on copies: each stage first sums the gradients of its own ranks, and then receives the other
stages' sums of the same elements, so stages may differ in width. All stages add the sums in stage
order, so the copies stay bit-identical (Rule 1).

A method that starts an operation returns a Pending, and the caller must call its `wait`. In a group
of one rank, the method returns None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from roadtrain.kernels.sum import sum_in_order
from roadtrain.stages.flat_layout import Bucket, overlaps
from roadtrain.stages.op_queue import BACKSTOP, Pending

DEFAULT_DEADLINE_S = 600.0
# the names of these functions in torch 2.13 and in earlier versions
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankCollectives:
    """A group of ranks, with collective operations that change small tensors on `device` in place.
    `group` is None for a single rank. `deadline_s`: the timeout of one operation in seconds."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.width = 1 if group is None else dist.get_world_size(group)
        self.deadline_s = DEFAULT_DEADLINE_S
        if group is not None:
            self.deadline_s = deadline_of(group, device) / (1 if device.type == "cpu" else BACKSTOP)

    def __str__(self) -> str:
        return "a single rank" if self.group is None else ranks_of(self.group)

    def all_max(self, flags: torch.Tensor) -> Pending | None:
        """Start an all-reduce that replaces each element by its maximum over the ranks."""
        if self.width == 1:
            return None
        return dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def broadcast(self, values: torch.Tensor) -> Pending | None:
        """Start a broadcast of `values` from the group's first rank."""
        if self.width == 1:
            return None
        return dist.broadcast(values, group=self.group, group_src=0, async_op=True)


class DataGroup(RankCollectives):
    """The data-parallel ranks of a stage."""

    @property
    def exact(self) -> bool:
        """Return whether gradients are always added in rank order."""
        return self.device.type == "cpu" or self.width == 1

    @property
    def exchanges(self) -> bool:
        """Return whether a reduce-scatter needs a receive buffer."""
        return self.exact and self.width > 1

    def reduce_scatter(self, grads: torch.Tensor, arriving: torch.Tensor) -> Pending | None:
        """Start a reduce-scatter, which `sum_arrived` must complete.

        grads: this rank's gradients for the shares of all ranks, flat fp32. arriving: a receive
        buffer of the same dtype and length.
        """
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
        """Set this rank's share of `grads` to the sum of all ranks' gradients, which a
        reduce-scatter has received into `arriving`."""
        if self.exchanges:
            own = grads.view(self.width, -1)[self.rank]
            add_in_order(own, [*arriving.view(self.width, -1)])

    def all_gather(self, values: torch.Tensor) -> Pending | None:
        """Start an all-gather in place: `values` has the shares of all ranks one after another, and
        each rank provides its own share."""
        if self.width == 1:
            return None
        shares = values.view(self.width, -1)
        own = shares[self.rank]
        # gloo's own ring would use one connection for both directions
        if self.exact and self.width == 2:
            return self._exchange([own] * 2, shares.unbind())
        return _all_gather(values, own, group=self.group, async_op=True)

    def _exchange(self, sent: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Messages:
        assert self.group is not None
        return exchange_messages(sent, arriving, self.group)


class SharedCopies(RankCollectives):
    """The ranks of all stages that have a copy of the same parameters, ordered by stage and
    replica. `widths`: the number of ranks of each of these stages."""

    group: dist.ProcessGroup

    def __init__(
        self, group: dist.ProcessGroup, widths: tuple[int, ...], device: torch.device
    ) -> None:
        super().__init__(group, device)
        self.widths = widths
        # the index of this rank's stage among these stages, and of this rank within its stage
        self.stage = sum(end <= self.rank for end in accumulate(widths))
        self.replica = self.rank - sum(widths[: self.stage])
        # whether sums over the job's parameters, such as the gradient norm, include this rank's
        # copy: only the first stage's, because a shared parameter must be counted once
        self.counts = self.stage == 0

    def __str__(self) -> str:
        return f"the copies in {super().__str__()}"

    def exchange(self, bucket: Bucket, own: torch.Tensor, arriving: torch.Tensor) -> Pending:
        """Start to exchange this rank's share of the gradients with the other stages.

        own: the gradients of the share, summed over this stage, flat fp32. arriving: a receive
        buffer for the other stages' sums of the same elements, fp32 [stages - 1, len(own)].
        """
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
        """Add the sums that the other stages sent (`arriving`) to this stage's sum `own`, in stage
        order."""
        terms = [*arriving[: self.stage], own.clone(), *arriving[self.stage :]]
        add_in_order(own, terms)


class Messages:
    """Sends and receives in flight, which together are one operation of the CollectiveQueue."""

    def __init__(self, in_flight: Iterable[dist.Work | None]) -> None:
        self._in_flight = [message for message in in_flight if message is not None]

    def wait(self) -> None:
        """Wait until all messages are sent and received. If a message failed, raise torch's error
        about it."""
        for message in self._in_flight:
            message.wait()


def exchange_messages(
    sent: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Messages:
    """Start to send `sent[r]` to rank r, and to receive `arriving[r]` from it, for every other rank
    r.

    Tensors must be contiguous; empty ones are skipped. A sent tensor and the tensor that receives
    it must have the same length. All ranks must start their exchanges in the same order, because a
    receive takes the next message from the other rank.
    """
    rank, width = dist.get_rank(group), dist.get_world_size(group)
    # each rank starts with a different peer, so that the first messages do not all go to the same
    # rank
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
    """Return a name of the group for error messages, which lists the ranks."""
    return f"the group of ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"


def deadline_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the group's timeout of one operation, in seconds."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return DEFAULT_DEADLINE_S if timeout is None else float(timeout.total_seconds())


def add_in_order(total: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """Set `total` to the sum of `terms`, added from left to right. All tensors are fp32, and no
    term may share memory with `total`."""
    if total.device.type == "cpu":
        sum_in_order(total.numpy(), [(term.numpy(), "fp32") for term in terms])
        return
    total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term)
