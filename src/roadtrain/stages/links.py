"""StageLinks: messages between stages: activations forward, and their gradients back.

Each boundary between stages has two process groups, one per direction, each with its own network.
Messages between two ranks of a group arrive in the order in which they are sent. Every wait has a
timeout; the error names both ranks and the message (Rule 5).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from roadtrain.errors import DeadlineError, LostError
from roadtrain.stages.parallelism import RankPosition
from roadtrain.stages.protocol.pipeline import FORWARD, Peer, Transfer
from roadtrain.stages.rank_groups import Groups

Channel = tuple[int, str]  # (boundary, FORWARD or BACKWARD)
PAYLOAD = {True: "the activations", False: "the gradient of the activations"}


@dataclass
class _Sent:
    """A sent message that may still be in flight."""

    works: list[Any]
    tensors: list[torch.Tensor]
    transfer: Transfer


class StageLinks:
    """Messages between this rank and the neighboring stages."""

    def __init__(
        self,
        channels: Mapping[Channel, distributed.ProcessGroup],
        groups: Groups,
        rank: int,
        deadline_s: float,
    ) -> None:
        self._channels, self._groups, self._deadline_s = channels, groups, deadline_s
        self._at = groups.position(rank)
        self._sent: list[_Sent] = []
        self._receiving: dict[Transfer, list[Any]] = {}
        self.step = 0  # for error messages
        self.wait_s = 0.0  # seconds spent in `wait` and `flush`

    def send(self, transfer: Transfer, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send `tensors`, which the caller must not change until they are sent."""
        group, to = self._group(transfer), self._rank_of(transfer.receiver)
        whole = [x.detach().contiguous() for x in tensors]
        with self._translated(transfer, sending=True):
            works = [distributed.isend(x, to, group) for x in whole]
        self._sent = [s for s in self._sent if not all(w.is_completed() for w in s.works)]
        self._sent.append(_Sent(works, whole, transfer))

    def post(self, transfer: Transfer, buffers: Sequence[torch.Tensor]) -> None:
        """Start to receive a message into `buffers`."""
        group, sender = self._group(transfer), self._rank_of(transfer.sender)
        with self._translated(transfer, sending=False):
            self._receiving[transfer] = [
                distributed.irecv(x.detach(), sender, group) for x in buffers
            ]

    def wait(self, transfer: Transfer) -> None:
        """Wait until a message is in the buffers that were passed to `post`. Raises DeadlineError
        and LostError."""
        then = time.monotonic()
        works = self._receiving.pop(transfer)
        with self._translated(transfer, sending=False):
            for work in works:
                work.wait(timedelta(seconds=self._deadline_s))
        self.wait_s += time.monotonic() - then

    def flush(self) -> None:
        """Wait until all messages are sent. Raises the errors of `wait`."""
        then = time.monotonic()
        for sent in self._sent:
            with self._translated(sent.transfer, sending=True):
                for work in sent.works:
                    work.wait(timedelta(seconds=self._deadline_s))
        self._sent.clear()
        self.wait_s += time.monotonic() - then

    def _group(self, transfer: Transfer) -> distributed.ProcessGroup:
        return self._channels[transfer.boundary, transfer.what]

    def _rank_of(self, peer: Peer) -> int:
        at = RankPosition(peer.stage, peer.replica, self._at.tensor)
        return self._groups.parallelism.rank(at)

    @contextmanager
    def _translated(self, transfer: Transfer, *, sending: bool) -> Iterator[None]:
        """Translate torch's errors about a peer to DeadlineError or LostError."""
        then = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            took, sentence = time.monotonic() - then, self._sentence(transfer, sending)
            if took >= 0.9 * self._deadline_s:
                raise DeadlineError(
                    f"{sentence}: timed out after {took:.1f} s, deadline {self._deadline_s:.1f} s",
                    hint="check that the other rank's host and network are up, and read its output",
                ) from error
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise LostError(f"{sentence}, but lost the connection: {first}") from error

    def _sentence(self, transfer: Transfer, sending: bool) -> str:
        own = f"stage {self._at.stage}, replica {self._at.replica}"
        peer = transfer.receiver if sending else transfer.sender
        rank = self._rank_of(peer)
        other = f"stage {peer.stage} (rank {rank} on {self._groups.host(rank)})"
        what = f"{PAYLOAD[transfer.what == FORWARD]} of micro-batch {transfer.micro}"
        way = "sends" if sending else "waits for"
        return f"{own} {way} {what} of step {self.step} {'to' if sending else 'from'} {other}"
