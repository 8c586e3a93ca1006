"""ControlLinks: communication between the ranks of a job outside of training: all-gathers of small
messages, and point-to-point tensors. Every wait has a timeout, and its error names the missing
rank (Rule 5).

All-gathers go through rank 0, which can tell which rank is missing and report it to the others. It
replies over a second group, because a gloo group is unusable after a timeout. Nothing is unpickled
(Rule 8): messages are bytes, and both sides know the shapes of tensors.

Assumes a torch process group that moves host tensors (gloo), all of whose ranks make the same calls
in the same order. Does NOT choose its network.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from roadtrain.errors import DeadlineError, LostError, PeerError, RoadtrainError

T = TypeVar("T")
ERROR_S = 2.0  # timeout of sending an error to all ranks
GRACE_S = 5.0  # the other ranks wait this much longer than rank 0, which waits for all of them


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank: its cluster, its host, and its role in messages."""

    cluster: str
    host: str
    role: str  # "stage 1, replica 0"


class ControlLinks:
    """Messages between all ranks of `group`. `replies`: another group of the same ranks. `places`:
    of every rank, the same value on all ranks. `broken`: an all-gather failed on this rank, so the
    other ranks may or may not have completed it."""

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
        """Name a rank for messages: "rank 3 (stage 1, replica 0, host b2, cluster b)"."""
        at = self.places[rank]
        return f"rank {rank} ({at.role}, host {at.host}, cluster {at.cluster})"

    def distance(self, source: int, target: int) -> float:
        """0: the same rank, 1: the same host, 2: the same cluster, 3: different clusters."""
        if source == target:
            return 0.0
        a, b = self.places[source], self.places[target]
        if a.cluster != b.cluster:
            return 3.0
        return 2.0 if a.host != b.host else 1.0

    def gather(self, message: bytes, what: str) -> list[bytes]:
        """All-gather: return the messages of all ranks, in rank order. `what`: their subject, for
        errors. Raises DeadlineError or LostError, which name the missing rank on every rank."""
        try:
            here = self.rank == 0
            return self._gather_here(message, what) if here else self._hand_in(message, what)
        except PeerError:
            self.broken = True
            raise

    def agree(self, mine: Any, what: str) -> list[Any]:
        """All-gather JSON values: return those of all ranks, in rank order. Raises like
        `gather`."""
        return [json.loads(text) for text in self.gather(json.dumps(mine).encode(), what)]

    def same(self, call: Callable[[], Any], what: str) -> Any:
        """Call `call` on rank 0 only and return its (JSON) value on all ranks. If it raises, all
        ranks raise, as in `together`."""
        mine = self.together(call if self.rank == 0 else lambda: None, what)
        return self.agree(mine, what)[0]

    def together(self, call: Callable[[], T], what: str) -> T:
        """Call `call` on every rank and return its local value. If it raises on any rank, all ranks
        raise: the failing rank its own error, the others a LostError with the same text."""
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

    # point to point; `reply`: over the second group

    def send(self, tensor: torch.Tensor, peer: int, what: str, *, reply: bool = False) -> None:
        """Send a contiguous host tensor; it may be changed after the return. Raises DeadlineError,
        LostError."""
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
        """Receive into a contiguous host tensor of the sent shape. `patience_s`: timeout in
        seconds; None: that of the links. Raises DeadlineError, LostError."""
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
        """Raises DeadlineError, LostError."""
        me, other = self.name(self.rank), self.name(peer)
        start, patience_s = time.monotonic(), max(patience_s, 0.001)
        try:
            begin().wait(timedelta(seconds=patience_s))
        except RuntimeError as error:
            waited = time.monotonic() - start
            if waited >= 0.9 * patience_s or "imed out" in str(error):
                raise DeadlineError(
                    f"{me} waited {waited:.0f} s for {other} ({what})",
                    hint="check that its host and network are up, and read its output",
                ) from error
            raise LostError(
                f"{me} lost the connection to {other} ({what})",
                hint="read its output to find out why it ended",
            ) from error

    def _gather_here(self, message: bytes, what: str) -> list[bytes]:
        """Gather on rank 0. If a rank is missing, send the error to all others, then raise it."""
        messages, until = [message], time.monotonic() + self.deadline_s
        for peer in range(1, self.size):
            try:
                left_s = until - time.monotonic()
                messages.append(self.receive_bytes(peer, what, patience_s=left_s))
            except (DeadlineError, LostError) as error:
                self._send_error(str(error))
                raise
        head = json.dumps({"lengths": [len(m) for m in messages], "error": ""}).encode()
        failed: RoadtrainError | None = None
        for peer in range(1, self.size):
            try:
                for message in (head, b"".join(messages)):
                    self.send_bytes(message, peer, what, reply=True)
            except (DeadlineError, LostError) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return messages

    def _send_error(self, sentence: str) -> None:
        """Send an error to all other ranks at once, without waiting for lost ranks."""
        head = json.dumps({"lengths": [], "error": sentence}).encode()
        length = torch.tensor([len(head)], dtype=torch.int64)
        body = torch.frombuffer(bytearray(head), dtype=torch.uint8)
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
        head = json.loads(self.receive_bytes(0, what, patience_s=patience_s, reply=True))
        if head["error"]:
            raise LostError(head["error"])
        body, out, at = self.receive_bytes(0, what, reply=True), list[bytes](), 0
        for length in head["lengths"]:
            out.append(body[at : at + length])
            at += length
        return out
