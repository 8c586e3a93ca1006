"""StageLinks: messages between stages: activations forward, and their gradients back.

Each boundary between stages has two process groups, one per direction, each with its own network.
Messages between two ranks of a group arrive in the order in which they are sent. Every wait has a
timeout; the error names both ranks and the message (Rule 5).

On an accelerator, the host waits for a message only when it is AHEAD further messages ahead of the
device, or the step ends. It then waits for an event: torch's own wait with a timeout would poll.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from roadtrain.device.accelerator import accelerator_of
from roadtrain.errors import DeadlineError, LostError
from roadtrain.stages.parallelism import Parallelism, RankPosition
from roadtrain.stages.protocol.pipeline import BACKWARD, FORWARD, Peer, Transfer
from roadtrain.stages.rank_groups import Groups

Channel = tuple[int, str]  # (boundary, FORWARD or BACKWARD)
PAYLOAD = {True: "the activations", False: "the gradient of the activations"}


AHEAD = 2


@dataclass
class _Message:
    """A message that may still be in flight."""

    works: list[Any]
    tensors: list[torch.Tensor]
    transfer: Transfer
    sending: bool


def first_messages(parallelism: Parallelism) -> Iterator[Transfer]:
    """Yield a message for each pair of ranks that exchange messages in a step, in an order that is
    the same on all ranks."""
    widths = parallelism.replicas_of
    for boundary, (stage, after) in enumerate(parallelism.boundaries):
        for what, a, b in ((FORWARD, stage, after), (BACKWARD, after, stage)):
            for i in range(math.lcm(widths[a], widths[b])):
                ends = Peer(a, 0, i % widths[a]), Peer(b, 0, i % widths[b])
                yield Transfer(what, i, boundary, *ends)


class StageLinks:
    """Messages between this rank and the neighboring stages, on `device`."""

    def __init__(
        self,
        channels: Mapping[Channel, distributed.ProcessGroup],
        groups: Groups,
        rank: int,
        deadline_s: float,
        device: torch.device,
    ) -> None:
        self._channels, self._groups, self._deadline_s = channels, groups, deadline_s
        self._at, self._device = groups.position(rank), device
        self._accelerator = accelerator_of(device)
        self._side = None if self._accelerator is None else self._accelerator.new_stream()
        self._sent: list[_Message] = []
        self._receiving: dict[Transfer, _Message] = {}
        # on an accelerator, messages for which only the computing stream has waited, in order
        self._arriving: list[_Message] = []
        self.step = -1  # for error messages; -1 before the first step
        self.wait_s = 0.0  # seconds spent in `wait` and `flush`

    def connect(self) -> None:
        """Exchange a message between each pair of ranks, one pair after another. Collective.

        NCCL connects two ranks in their first message, and blocks each of them until the other has
        begun it. In the order of a step, ranks could wait for each other in a cycle.
        """
        own = self._at.stage, self._at.replica
        for transfer in first_messages(self._groups.parallelism):
            sender, receiver = ((p.stage, p.replica) for p in (transfer.sender, transfer.receiver))
            if own not in (sender, receiver):
                continue
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            if own == sender:
                self.send(transfer, [byte])
            else:
                self.post(transfer, [byte])
                self.wait(transfer)
            self.flush()

    def send(self, transfer: Transfer, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send `tensors`, which the caller must not change until they are sent."""
        group, to = self._group(transfer), self._rank_of(transfer.receiver)
        whole = [x.detach().contiguous() for x in tensors]
        with self._translated(transfer, sending=True):
            works = [distributed.isend(x, to, group) for x in whole]
        self._sent = [s for s in self._sent if not all(w.is_completed() for w in s.works)]
        self._sent.append(_Message(works, whole, transfer, sending=True))

    def post(self, transfer: Transfer, buffers: Sequence[torch.Tensor]) -> None:
        """Start to receive a message into `buffers`."""
        group, sender = self._group(transfer), self._rank_of(transfer.sender)
        whole = [x.detach() for x in buffers]
        with self._translated(transfer, sending=False):
            works = [distributed.irecv(x, sender, group) for x in whole]
        self._receiving[transfer] = _Message(works, whole, transfer, sending=False)

    def wait(self, transfer: Transfer) -> None:
        """Wait until a message is in the buffers that were passed to `post`. On an accelerator, the
        computing stream waits. Raises DeadlineError and LostError, perhaps about an earlier
        message."""
        then = time.monotonic()
        message = self._receiving.pop(transfer)
        if self._accelerator is None:
            self._wait(message)
        else:
            self._order(message)
            self._arriving.append(message)
            while len(self._arriving) > AHEAD:
                self._wait(self._arriving.pop(0))
        self.wait_s += time.monotonic() - then

    def flush(self) -> None:
        """Wait until all messages have arrived and are sent. Raises the errors of `wait`."""
        then = time.monotonic()
        for message in (*self._arriving, *self._sent):
            self._wait(message)
        self._arriving.clear()
        self._sent.clear()
        self.wait_s += time.monotonic() - then

    def _order(self, message: _Message) -> None:
        """Make the current stream of an accelerator wait for a message."""
        with self._translated(message.transfer, sending=message.sending):
            for work in message.works:
                work.wait()

    def _wait(self, message: _Message) -> None:
        """Block until a message has arrived or is sent."""
        if self._accelerator is None:
            with self._translated(message.transfer, sending=message.sending):
                for work in message.works:
                    work.wait(timedelta(seconds=self._deadline_s))
            return
        with self._accelerator.on(self._side):
            self._order(message)
        event = self._accelerator.new_event()
        event.record(self._side)
        if not self._accelerator.reaches(event, self._deadline_s):
            raise self._late(self._sentence(message.transfer, message.sending), self._deadline_s)

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
                raise self._late(sentence, took) from error
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise LostError(f"{sentence}, but lost the connection: {first}") from error

    def _late(self, sentence: str, took: float) -> DeadlineError:
        return DeadlineError(
            f"{sentence}: timed out after {took:.1f} s, deadline {self._deadline_s:.1f} s",
            hint="check that the other rank's host and network are up, and read its output",
        )

    def _sentence(self, transfer: Transfer, sending: bool) -> str:
        own = f"stage {self._at.stage}, replica {self._at.replica}"
        peer = transfer.receiver if sending else transfer.sender
        rank = self._rank_of(peer)
        other = f"stage {peer.stage} (rank {rank} on {self._groups.host(rank)})"
        what = "a message before the first step"
        if self.step >= 0:
            payload = PAYLOAD[transfer.what == FORWARD]
            what = f"{payload} of micro-batch {transfer.micro} of step {self.step}"
        way = "sends" if sending else "waits for"
        return f"{own} {way} {what} {'to' if sending else 'from'} {other}"
