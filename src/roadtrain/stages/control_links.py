"""ControlLinks: what the ranks of a job tell each other beside training: small messages of all to
all, and tensors from one to another; every wait has a deadline and names whom it waits for (Rule
5).

Messages of all go through the first rank: it knows who has not come, and tells the others. It does
so over a second group, since a group of gloo is of no use once one of its waits was too long.
Nothing is unpickled (Rule 8): messages are bytes, tensors have shapes that both sides know.

Assumes: a torch process group that moves host tensors (gloo); all its ranks make the same calls in
the same order. Does NOT choose its network.
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
TELL_S = 2.0  # for a sentence to reach who listens
GRACE_S = 5.0  # how much longer the others wait for the first rank, which waits for all of them


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, and what it is called in messages."""

    cluster: str
    host: str
    role: str  # "stage 1, replica 0"


class ControlLinks:
    """`places`: of every rank of `group`, the same on all of them. `replies`: another group of the
    same ranks. `broken`: a message of all did not come through here; what the others have heard is
    not known."""

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
        """For people: "rank 3 (stage 1, replica 0, host b2, cluster b)"."""
        at = self.places[rank]
        return f"rank {rank} ({at.role}, host {at.host}, cluster {at.cluster})"

    def distance(self, source: int, target: int) -> float:
        """0: the same rank, 1: the same host, 2: the same cluster, 3: else."""
        if source == target:
            return 0.0
        a, b = self.places[source], self.places[target]
        if a.cluster != b.cluster:
            return 3.0
        return 2.0 if a.host != b.host else 1.0

    def gather(self, message: bytes, what: str) -> list[bytes]:
        """The messages of all ranks, in their order. `what`: they are about, for errors. Raises
        DeadlineError or LostError, on every rank naming the one that did not come."""
        try:
            here = self.rank == 0
            return self._gather_here(message, what) if here else self._hand_in(message, what)
        except PeerError:
            self.broken = True
            raise

    def agree(self, mine: Any, what: str) -> list[Any]:
        """As `gather`, of values that JSON has."""
        return [json.loads(one) for one in self.gather(json.dumps(mine).encode(), what)]

    def same(self, call: Callable[[], Any], what: str) -> Any:
        """The value that `call` returns on the first rank, on all ranks (as JSON has it); what it
        raises there, all raise. The others do not call."""
        mine = self.together(call if self.rank == 0 else lambda: None, what)
        return self.agree(mine, what)[0]

    def together(self, call: Callable[[], T], what: str) -> T:
        """What `call` returns here. Where it raises on any rank all raise, so that all end what
        they do together: here its error, on the others a LostError with its sentence."""
        failed: RoadtrainError | None = None
        try:
            out = call()
        except RoadtrainError as error:
            failed = error
        mine = "" if failed is None else str(failed) or type(failed).__name__
        told = self.agree(mine, what)
        if failed is not None:
            raise failed
        for rank, sentence in enumerate(told):
            if sentence:
                raise LostError(f"{what}: {self.name(rank)}: {sentence}")
        return out

    # one to another; `reply`: over the second group

    def send(self, tensor: torch.Tensor, peer: int, what: str, *, reply: bool = False) -> None:
        """`tensor`: contiguous, on the host. Returns when it may change again."""
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
        """Into `tensor`: contiguous, on the host, as long as the one that is sent."""
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
                    f"{me} waited {waited:.0f} s for {other}: {what}",
                    hint="is that host up, and its network? Its own output says what it does",
                ) from error
            raise LostError(
                f"{other} is gone, {me} talked with it: {what}",
                hint="its own output says why it ended",
            ) from error

    def _gather_here(self, message: bytes, what: str) -> list[bytes]:
        """On the first rank. The others are told who is missing before the error is raised."""
        told, until = [message], time.monotonic() + self.deadline_s
        for peer in range(1, self.size):
            try:
                left_s = until - time.monotonic()
                told.append(self.receive_bytes(peer, what, patience_s=left_s))
            except (DeadlineError, LostError) as error:
                self._tell_error(str(error))
                raise
        head = json.dumps({"lengths": [len(one) for one in told], "error": ""}).encode()
        failed: RoadtrainError | None = None
        for peer in range(1, self.size):
            try:
                for message in (head, b"".join(told)):
                    self.send_bytes(message, peer, what, reply=True)
            except (DeadlineError, LostError) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return told

    def _tell_error(self, sentence: str) -> None:
        """To all others at once: who is gone is not waited for."""
        head = json.dumps({"lengths": [], "error": sentence}).encode()
        length = torch.tensor([len(head)], dtype=torch.int64)
        body = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        works: list[Any] = []
        until = time.monotonic() + TELL_S
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
