"""ControlLinks: control messages between all ranks of a job. Does NOT choose their network.

Every wait has a timeout, and its error names the missing rank (Rule 5). All-gathers go through rank
0, which tells all other ranks which rank is missing, over a second group, because a gloo group is
unusable after a timeout. Nothing is unpickled (Rule 8): messages are bytes, and a receiver knows
the shapes of tensors. All ranks must make the same calls in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from roadtrain.errors import DeadlineError, LostError, PeerError, RoadtrainError

T = TypeVar("T")
ERROR_S = 2.0  # limit for sending an error to all ranks
GRACE_S = 5.0  # other ranks wait this much longer for rank 0 than rank 0 waits for all of them


@dataclass(frozen=True)
class RankPlace:
    """The cluster and host of a rank, and a description of its role for error messages."""

    cluster: str
    host: str
    role: str  # such as "stage 1, replica 0"


class ControlLinks:
    """Control messages between all ranks of `group`.

    `replies`: another process group of the same ranks, for the replies of rank 0. `places`: the
    place of every rank; equal on all ranks. `broken`: whether an all-gather failed on this rank (it
    may have succeeded on others).
    """

    broken = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        replies: dist.ProcessGroup,
        places: Sequence[RankPlace],
        deadline_s: float,
    ) -> None:
        self.group, self._replies, self.deadline_s = group, replies, deadline_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.places = tuple(places)

    def name(self, rank: int) -> str:
        """Return a rank's name for messages, such as "rank 3 (stage 1, replica 0, host b2, cluster
        b)"."""
        at = self.places[rank]
        return f"rank {rank} ({at.role}, host {at.host}, cluster {at.cluster})"

    def distance(self, source: int, target: int) -> float:
        """Return 0 for the same rank, 1 for ranks on one host, 2 for hosts of one cluster, 3 for
        two clusters."""
        if source == target:
            return 0.0
        a, b = self.places[source], self.places[target]
        if a.cluster != b.cluster:
            return 3.0
        return 2.0 if a.host != b.host else 1.0

    def gather(self, message: bytes, what: str) -> list[bytes]:
        """Return the messages of all ranks, in rank order. Collective.

        `what`: the subject of the messages, for errors. If a rank is missing, raises DeadlineError
        or LostError on every rank; the error names the missing rank.
        """
        try:
            here = self.rank == 0
            return self._gather_here(message, what) if here else self._hand_in(message, what)
        except PeerError:
            self.broken = True
            raise

    def agree(self, mine: Any, what: str, kind: Any = Any) -> list[Any]:
        """Return the values `mine` of all ranks, in rank order. Collective. `kind`: the type of the
        values, which msgspec encodes. Raises the errors of `gather`."""
        every = self.gather(msgspec.msgpack.encode(mine), what)
        return [msgspec.msgpack.decode(message, type=kind) for message in every]

    def same(self, call: Callable[[], Any], what: str) -> Any:
        """Call `call` on rank 0 only, and return its result, a value that `agree` can send, on all
        ranks. If the call raises a RoadtrainError, rank 0 raises this error, and all other ranks
        raise a LostError with its text."""
        mine = self.together(call if self.rank == 0 else lambda: None, what)
        return self.agree(mine, what)[0]

    def together(self, call: Callable[[], T], what: str) -> T:
        """Call `call` on every rank, and return the result of this rank's call. If a rank's call
        raises a RoadtrainError, that rank raises it, and all other ranks raise a LostError with its
        text."""
        failed: RoadtrainError | None = None
        try:
            out = call()
        except RoadtrainError as error:
            failed = error
        mine = "" if failed is None else str(failed) or type(failed).__name__
        sentences = self.agree(mine, what)
        if failed is not None:
            raise failed
        for rank, sentence in enumerate(sentences):
            if sentence:
                raise LostError(f"{what}: {self.name(rank)}: {sentence}")
        return out

    # point to point; with `reply`, messages use the second group

    def send(self, tensor: torch.Tensor, peer: int, what: str, *, reply: bool = False) -> None:
        """Send a contiguous host tensor to rank `peer`, and wait until it is sent.

        what: the subject, for errors. reply: whether to use the process group for replies. Raises
        DeadlineError and LostError.
        """
        group = self._replies if reply else self.group
        begin = partial(dist.isend, tensor, group=group, group_dst=peer)
        self._wait(begin, peer, what, self.deadline_s)

    def receive(
        self,
        tensor: torch.Tensor,
        peer: int,
        what: str,
        *,
        patience_s: float | None = None,
        reply: bool = False,
    ) -> None:
        """Receive a tensor from rank `peer` into `tensor`, a contiguous host tensor of the same
        shape.

        patience_s: the timeout in seconds (default: the deadline of these links). what: the
        subject, for errors. reply: whether to use the process group for replies. Raises
        DeadlineError and LostError.
        """
        group = self._replies if reply else self.group
        begin = partial(dist.irecv, tensor, group=group, group_src=peer)
        self._wait(begin, peer, what, self.deadline_s if patience_s is None else patience_s)

    def send_bytes(self, message: bytes, peer: int, what: str, *, reply: bool = False) -> None:
        self.send(torch.tensor([len(message)], dtype=torch.int64), peer, what, reply=reply)
        if message:
            body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            self.send(body, peer, what, reply=reply)

    def receive_bytes(
        self, peer: int, what: str, *, patience_s: float | None = None, reply: bool = False
    ) -> bytes:
        length = torch.empty(1, dtype=torch.int64)
        self.receive(length, peer, what, patience_s=patience_s, reply=reply)
        message = torch.empty(int(length), dtype=torch.uint8)
        if len(message):
            self.receive(message, peer, what, patience_s=patience_s, reply=reply)
        return message.numpy().tobytes()

    def _wait(self, begin: Callable[[], Any], peer: int, what: str, patience_s: float) -> None:
        me, other = self.name(self.rank), self.name(peer)
        start, patience_s = time.monotonic(), max(patience_s, 0.001)
        try:
            begin().wait(timedelta(seconds=patience_s))
        except RuntimeError as error:
            waited = time.monotonic() - start
            if waited >= 0.9 * patience_s or "imed out" in str(error):
                raise DeadlineError(
                    f"{me} waited {waited:.0f} s for {other} ({what})",
                    hint=f"check that the host and network of rank {peer} are up; read its output",
                ) from error
            raise LostError(
                f"{me} lost the connection to {other} ({what})",
                hint=f"read the output of rank {peer} to find out why it ended",
            ) from error

    def _gather_here(self, message: bytes, what: str) -> list[bytes]:
        """Run an all-gather on rank 0. If a rank is missing, send an error to all other ranks and
        raise it."""
        messages, until = [message], time.monotonic() + self.deadline_s
        for peer in range(1, self.size):
            try:
                left_s = until - time.monotonic()
                messages.append(self.receive_bytes(peer, what, patience_s=left_s))
            except (DeadlineError, LostError) as error:
                self._send_error(str(error))
                raise
        reply = msgspec.msgpack.encode((messages, ""))
        failed: RoadtrainError | None = None
        for peer in range(1, self.size):
            try:
                self.send_bytes(reply, peer, what, reply=True)
            except (DeadlineError, LostError) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return messages

    def _send_error(self, sentence: str) -> None:
        """Send an error to all other ranks at once, so that a lost rank does not delay the sends to
        others."""
        reply = msgspec.msgpack.encode(([], sentence))
        length = torch.tensor([len(reply)], dtype=torch.int64)
        body = torch.frombuffer(bytearray(reply), dtype=torch.uint8)
        works: list[Any] = []
        until = time.monotonic() + ERROR_S
        for peer in range(1, self.size):
            with suppress(RuntimeError):
                works += [
                    dist.isend(x, group=self._replies, group_dst=peer) for x in (length, body)
                ]
        for work in works:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))

    def _hand_in(self, message: bytes, what: str) -> list[bytes]:
        self.send_bytes(message, 0, what)
        patience_s = self.deadline_s + GRACE_S
        reply = self.receive_bytes(0, what, patience_s=patience_s, reply=True)
        messages, error = msgspec.msgpack.decode(reply, type=tuple[list[bytes], str])
        if error:
            raise LostError(error)
        return messages
