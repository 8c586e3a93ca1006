"""Exchanges of flat memory between all ranks of a gloo group: a message a pair and direction.

gloo's own all-to-all of large buffers waits with one direction for the other: two ranks with links
of 50 Mbit/s get 3.1 to 4.8 MB/s each way, four get 3.9 to 4.9. Messages get 6.0, which is what such
a link carries, and 5.3. Does NOT sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


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
