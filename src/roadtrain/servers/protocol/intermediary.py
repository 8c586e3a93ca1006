"""The state machine of an intermediary (a relay or a fan-in), a process between several workers and
one server:

    Pull            A version of a chunk is pulled once. The copy stays in a buffer until the buffer
                    is needed (least recently used first).
    EndStep, Commit Forwarded once all workers have sent them.
    CommitDone      Forwarded once any worker has sent it.
    PeerLost        Raises LostError in the middle of a step. Between steps, LostError is raised as
                    soon as another worker begins a step.

Subclasses handle gradients, and decide which worker gets a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from msgspec.structs import replace

from roadtrain.errors import LostError
from roadtrain.servers.protocol import messages as m

Key: TypeAlias = tuple[int, int]  # chunk, version
StepEvent: TypeAlias = m.EndStep | m.Commit | m.CommitDone | m.PeerLost


@dataclass(frozen=True, slots=True)
class Up:
    """Send a message to the server. In a Pull, `into` is the number of a buffer."""

    message: m.WorkerMessage


D = TypeVar("D")  # the action that delivers a copy to workers


@dataclass(frozen=True, slots=True)
class CopyRequest(Generic[D]):
    """A worker's request for a copy of a chunk."""

    pull: m.Pull
    deliver: Callable[[int], D]  # makes the action from the number of the buffer

    @property
    def key(self) -> Key:
        return self.pull.chunk, self.pull.version


@dataclass(frozen=True, slots=True)
class Give:
    """Send the contents of a buffer to the worker that sent `pull`."""

    pull: m.Pull
    buffer: int


class CopyPhase(Enum):
    COMING = "coming"  # the copy was requested from the server; requests of workers wait
    HERE = "here"  # the copy has arrived; it may be dropped while nothing reads it


@dataclass(slots=True)
class Copy(Generic[D]):
    """The weights part of one version of a chunk."""

    buffer: int
    phase: CopyPhase = CopyPhase.COMING
    # requests that wait for the copy; empty if it is HERE
    requests: list[CopyRequest[D]] = field(default_factory=list)
    readers: int = 0  # number of sends that read the copy; 0 if it is not HERE

    @property
    def droppable(self) -> bool:
        return self.phase is CopyPhase.HERE and not self.readers


class Intermediary(Generic[D]):
    OF_WORKERS: ClassVar[str] = ""  # text after "worker N" in messages, as " of this host"

    def __init__(self, workers: int, buffers: int) -> None:
        self.workers, self.n_buffers = workers, buffers
        # Free buffers. Each buffer is either free or belongs to exactly one copy.
        self.free = list(range(buffers))
        self.copies: dict[Key, Copy[D]] = {}  # the least recently used first
        # (ticket of our pull, chunk) -> the copy, which is COMING. Pulls that follow a worker's
        # message about a block have the same ticket, so that they are one message to the server.
        self.pulling: dict[tuple[int, int], Key] = {}
        # Requests that wait for a buffer; empty while a buffer is free.
        self.queue: deque[CopyRequest[D]] = deque()
        # step -> worker -> its word at the end of the step. A step is removed when all workers have
        # ended it.
        self.ending: dict[int, dict[int, bytes]] = {}
        # step -> worker -> its blob. A step is removed when the blobs of all workers have arrived.
        self.commits: dict[int, dict[int, Any]] = {}
        self.committed: int | None = None  # the last step whose CommitDone was sent to the server
        self.lost: str | None = None  # message about the worker that was lost
        self._ticket, self._follows = 0, (-1, -1)  # the last ticket; (worker, ticket) it belongs to

    # copies

    def buffer_for(self, ticket: int, chunk: int) -> int | None:
        """Return the buffer for the answer to the pull `ticket`, or None if there is no such
        pull.
        """
        key = self.pulling.get((ticket, chunk))
        return None if key is None else self.copies[key].buffer

    def _request(self, request: CopyRequest[D]) -> list[Up | D]:
        if self.queue:
            self.queue.append(request)
            return []
        return self._ask(request)

    def _ask(self, request: CopyRequest[D]) -> list[Up | D]:
        """Deliver the requested copy if it has arrived. Otherwise pull it, or wait for it."""
        copy = self.copies.pop(request.key, None)
        out: list[Up | D] = []
        if copy is None:
            if (buffer := self._room()) is None:
                self.queue.appendleft(request)
                return []
            copy = Copy(buffer)
            pull = request.pull
            follows = pull.worker, pull.ticket
            if follows != self._follows or (self._ticket, pull.chunk) in self.pulling:
                self._ticket, self._follows = self._ticket + 1, follows
            self.pulling[self._ticket, pull.chunk] = request.key
            out.append(Up(replace(pull, into=buffer, ticket=self._ticket)))
        self.copies[request.key] = copy
        if copy.phase is CopyPhase.HERE:
            copy.readers += 1
            return [request.deliver(copy.buffer)]
        copy.requests.append(request)
        return out

    def _room(self) -> int | None:
        """Return a free buffer, or the least recently used one that nothing reads, else None."""
        if self.free:
            return self.free.pop()
        for key, copy in self.copies.items():
            if copy.droppable:
                del self.copies[key]
                return copy.buffer
        return None

    def _pulled(self, pulled: m.Pulled) -> list[D]:
        copy = self.copies[self.pulling.pop((pulled.ticket, pulled.chunk))]
        requests, copy.requests = copy.requests, []
        copy.phase = CopyPhase.HERE
        copy.readers += len(requests)
        return [request.deliver(copy.buffer) for request in requests]

    def _delivered(self, pull: m.Pull) -> list[Up | D]:
        """Record that the worker has got its copy, and serve waiting requests."""
        self.copies[pull.chunk, pull.version].readers -= 1
        out: list[Up | D] = []
        while self.queue:
            waiting = len(self.queue)
            out += self._ask(self.queue.popleft())
            if len(self.queue) == waiting:
                break
        return out

    # steps

    def _step(self, event: StepEvent) -> list[Up]:
        match event:
            case m.EndStep():
                return self._end_step(event)
            case m.Commit():
                return self._commit(event)
            case m.CommitDone(step):
                return self._committed(step)
            case m.PeerLost():
                self._peer_lost(event)
                return []

    def _end_step(self, event: m.EndStep) -> list[Up]:
        self._nobody_lost()
        ending = self.ending.setdefault(event.step, {})
        ending[event.worker] = event.word
        if len(ending) < self.workers:
            return []
        del self.ending[event.step]
        words = [ending[worker] for worker in sorted(ending)]
        return [Up(m.EndStep(event.step, word=words if any(words) else b""))]

    def _commit(self, event: m.Commit) -> list[Up]:
        blobs = self.commits.setdefault(event.step, {})
        blobs[event.worker] = event.blob
        if len(blobs) < self.workers:
            return []
        del self.commits[event.step]
        return [Up(m.Commit(event.step, [blobs[worker] for worker in range(self.workers)]))]

    def _committed(self, step: int) -> list[Up]:
        if self.committed is not None and step <= self.committed:
            return []  # another worker has reported it
        self.committed = step
        return [Up(m.CommitDone(step))]

    # lost workers

    def in_step(self) -> bool:
        """Return whether any chunk is in the middle of a step."""
        raise NotImplementedError

    def _peer_lost(self, event: m.PeerLost) -> None:
        """Record a lost worker. Raises LostError only if a step is open, because between steps all
        workers may be leaving.
        """
        self.lost = f"worker {event.worker}{self.OF_WORKERS} was lost: {event.why}"
        if self.ending or self.commits or self.in_step():
            raise LostError(self.lost)

    def _nobody_lost(self) -> None:
        if self.lost is not None:
            raise LostError(self.lost)

    def check(self) -> None:
        """Assert every invariant."""
        copies = self.copies.values()
        used = [copy.buffer for copy in copies]
        assert sorted(used + self.free) == list(range(self.n_buffers))
        coming = {key for key, copy in self.copies.items() if copy.phase is CopyPhase.COMING}
        assert set(self.pulling.values()) == coming and len(self.pulling) == len(coming)
        for copy in copies:
            assert copy.readers >= 0
            assert not (copy.requests if copy.phase is CopyPhase.HERE else copy.readers)
        assert not self.queue or not (self.free or any(copy.droppable for copy in copies))
        for received in (*self.ending.values(), *self.commits.values()):
            assert 0 < len(received) < self.workers
