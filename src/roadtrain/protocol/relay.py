"""What a relay does next: it stands between the workers of one host and one server. Events in,
actions out; pure.

To its workers it is the server, to the server it is one worker:
    Pull      asked for once whoever wants it; kept in one of `buffers` until the room is needed
              (the least recently used goes first), so a block that was pulled for the forward is
              still there for the
              backward
    Push ..   one worker: goes on as it is. Several: held until all have closed the chunk, then
              their sum goes on
    EndStep ..   goes on once all have said it

Assumes the workers' messages in their order. Does NOT know what a step computes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from roadtrain.errors import LostError
from roadtrain.protocol import messages
from roadtrain.protocol.server import agreed

Key = tuple[int, int]  # chunk, version


@dataclass(frozen=True, slots=True)
class Up:
    """To the server. A pull's `into` is the number of its buffer."""

    message: Any


@dataclass(frozen=True, slots=True)
class Give:
    """Send what is in `buffer` to the worker that asked."""

    pull: messages.Pull
    buffer: int


@dataclass(frozen=True, slots=True)
class PushSum:
    """Add up what is held of `chunk`, in the workers' order; where there is anything, it goes
    to the server."""

    chunk: int


@dataclass(slots=True)
class Copy:
    """Parameters in `buffer`: COMING (`here` false; `pulls` wait for them) or HERE, read by
    `readers` sends."""

    buffer: int
    here: bool = False
    pulls: list[messages.Pull] = field(default_factory=list)
    readers: int = 0


@dataclass(slots=True)
class ChunkRound:
    """Of a chunk, where there are several workers. `closed`: whose gradient is whole; `summed`: the
    sum has gone on;
    `said`: who released it; what those say of the next step waits in `early` until all have."""

    closed: set[int] = field(default_factory=set)
    summed: bool = False
    said: dict[int, messages.ApplyUpdate] = field(default_factory=dict)
    early: list[Any] = field(default_factory=list)


class RelayStateMachine:
    """Invariants (`check`): free buffers and those of copies are disjoint and together all
    buffers; `asked` names the copies that are coming; a pull waits in `queue` only while no
    buffer can be had."""

    def __init__(self, workers: int, buffers: int) -> None:
        self.workers, self.n_buffers = workers, buffers
        self.free = list(range(buffers))
        self.copies: dict[Key, Copy] = {}  # the least recently used first
        self.asked: dict[int, Key] = {}  # ticket of ours
        self.queue: deque[messages.Pull] = deque()
        self.meetings: dict[int, ChunkRound] = {}
        self.seals: dict[int, set[int]] = {}
        self.commits: dict[int, dict[int, Any]] = {}
        self.committed = -1
        self.gone = ""
        self._ticket = 0

    def handle(self, event: Any) -> list[Any]:
        """Next actions. Raises LostError where a step needs a worker that has gone, LoopError
        where they differ."""
        if isinstance(event, messages.Done):
            return self._given(event.action)
        return getattr(self, "_on_" + type(event).__name__)(event)  # type: ignore[no-any-return]

    # pulls

    def _on_Pull(self, pull: messages.Pull) -> list[Any]:
        if self.queue:
            self.queue.append(pull)
            return []
        return self._pull(pull)

    def _pull(self, pull: messages.Pull) -> list[Any]:
        key = (pull.chunk, pull.version)
        copy, out = self.copies.pop(key, None), list[Any]()
        if copy is None:
            if (buffer := self._room()) is None:
                self.queue.appendleft(pull)
                return []
            copy = Copy(buffer)
            self._ticket += 1
            self.asked[self._ticket] = key
            out.append(Up(replace(pull, into=buffer, ticket=self._ticket)))
        self.copies[key] = copy
        if copy.here:
            copy.readers += 1
            return [Give(pull, copy.buffer)]
        copy.pulls.append(pull)
        return out

    def _room(self) -> int | None:
        if self.free:
            return self.free.pop()
        for key, copy in self.copies.items():
            if copy.here and not copy.readers:
                del self.copies[key]
                return copy.buffer
        return None

    def _queued(self) -> list[Any]:
        out: list[Any] = []
        while self.queue:
            n = len(self.queue)
            out += self._pull(self.queue.popleft())
            if len(self.queue) == n:
                break
        return out

    def _on_Pulled(self, event: messages.Pulled) -> list[Any]:
        copy = self.copies[self.asked.pop(event.ticket)]
        copy.here, pulls, copy.pulls = True, copy.pulls, []
        copy.readers += len(pulls)
        return [Give(pull, copy.buffer) for pull in pulls]

    def _given(self, give: Give) -> list[Any]:
        self.copies[give.pull.chunk, give.pull.version].readers -= 1
        return self._queued()

    # gradients

    def _chunk(
        self, event: messages.Push | messages.Close | messages.ApplyUpdate | messages.DiscardGrad
    ) -> list[Any]:
        if self.workers == 1:
            return [Up(event)]
        if self.gone and not isinstance(event, messages.DiscardGrad):
            raise LostError(self.gone)
        meeting = self.meetings.setdefault(event.chunk, ChunkRound())
        if event.worker in meeting.said:
            meeting.early.append(event)
            return []
        match event:
            case messages.Push():
                return [messages.Hold(event)]
            case messages.DiscardGrad(chunk, worker):
                again = [Up(messages.DiscardGrad(chunk))] if meeting.summed else []
                meeting.summed = False
                meeting.closed.discard(worker)
                return [messages.Discard(chunk, worker), *again]
            case messages.Close():
                return self._close(meeting, event)
        meeting.said[event.worker] = event
        out = [] if meeting.summed else self._close(meeting, event)
        if len(meeting.said) == self.workers:
            out.append(
                Up(replace(agreed([meeting.said[w] for w in range(self.workers)]), worker=0))
            )
            meeting.said, meeting.summed = {}, False
            early, meeting.early = meeting.early, []
            out += [action for later in early for action in self._chunk(later)]
        return out

    _on_Push = _on_Close = _on_ApplyUpdate = _on_DiscardGrad = _chunk

    def _close(
        self, meeting: ChunkRound, event: messages.Close | messages.ApplyUpdate
    ) -> list[Any]:
        meeting.closed.add(event.worker)
        if len(meeting.closed) < self.workers:
            return []
        meeting.closed, meeting.summed = set(), True
        return [PushSum(event.chunk), Up(messages.Close(event.chunk, event.step))]

    # steps

    def _on_EndStep(self, event: messages.EndStep) -> list[Any]:
        if self.gone:
            raise LostError(self.gone)
        sealed = self.seals.setdefault(event.step, set())
        sealed.add(event.worker)
        return (
            [Up(messages.EndStep(event.step))]
            if len(sealed) == self.workers and self.seals.pop(event.step)
            else []
        )

    def _on_Commit(self, event: messages.Commit) -> list[Any]:
        blobs = self.commits.setdefault(event.step, {})
        blobs[event.worker] = event.blob
        if len(blobs) < self.workers:
            return []
        del self.commits[event.step]
        return [Up(messages.Commit(event.step, [blobs[w] for w in range(self.workers)]))]

    def _on_CommitDone(self, event: messages.CommitDone) -> list[Any]:
        first, self.committed = event.step > self.committed, max(self.committed, event.step)
        return [Up(event)] if first else []

    def _on_PeerLost(self, event: messages.PeerLost) -> list[Any]:
        """Nothing is lost where no step is open and none of the others begins one: they may be
        leaving too."""
        self.gone = f"worker {event.worker} of this host has gone: {event.why}"
        if (
            self.seals
            or self.commits
            or any(m.closed or m.said or m.summed for m in self.meetings.values())
        ):
            raise LostError(self.gone)
        return []

    def check(self) -> None:
        """Assert every invariant."""
        used = [copy.buffer for copy in self.copies.values()]
        assert sorted(used + self.free) == list(range(self.n_buffers))
        assert set(self.asked.values()) == {
            key for key, copy in self.copies.items() if not copy.here
        }
        for copy in self.copies.values():
            assert copy.readers >= 0 and (not copy.here or not copy.pulls)
        if self.queue:
            assert not self.free and all(
                copy.readers or not copy.here for copy in self.copies.values()
            )
