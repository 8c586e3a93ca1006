"""What a relay does next: it stands between the workers of one host and one server. Events in,
actions out; pure.

To its workers it is the server, to the server it is one worker:
    Pull      asked for once, whoever wants it; kept in one of `buffers` until the room is needed
              (the least recently used goes first), so a block that was pulled for the forward is
              still there for the backward
    Push ..   one worker: goes on as it is. Several: held until all have closed the chunk, then
              their sum goes on
    EndStep   goes on once all have said it

Assumes the workers' messages in their order. Does NOT know what a step computes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

from roadtrain.errors import LostError
from roadtrain.protocol.messages import (
    ApplyUpdate,
    Close,
    Commit,
    CommitDone,
    Discard,
    DiscardGrad,
    Done,
    EndStep,
    GradientMessage,
    Hold,
    PeerLost,
    Pull,
    Pulled,
    Push,
    WorkerMessage,
)
from roadtrain.protocol.server import agreed

Key: TypeAlias = tuple[int, int]  # chunk, version


@dataclass(frozen=True, slots=True)
class Up:
    """A message to the server. A pull's `into` is the number of its buffer."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class Give:
    """Send what is in a buffer to the worker that asked."""

    pull: Pull
    buffer: int


@dataclass(frozen=True, slots=True)
class PushSum:
    """Add up what is held of the chunk, in the workers' order. Where there is anything, the sum
    goes to the server."""

    chunk: int


RelayEvent: TypeAlias = WorkerMessage | Pulled | PeerLost | Done[Give]
RelayAction: TypeAlias = Up | Give | Hold | Discard | PushSum


class CopyPhase(Enum):
    COMING = "coming"  # from the server: pulls wait for it
    HERE = "here"  # it may be dropped while nobody reads it


@dataclass(slots=True)
class Copy:
    """The weights part of one version of a chunk."""

    buffer: int
    phase: CopyPhase = CopyPhase.COMING
    pulls: list[Pull] = field(default_factory=list)  # that wait for it; none once it is HERE
    readers: int = 0  # sends that read it; none before it is HERE

    @property
    def droppable(self) -> bool:
        return self.phase is CopyPhase.HERE and not self.readers


@dataclass(slots=True)
class ChunkRound:
    """What several workers have said of a chunk in this step."""

    closed: set[int] = field(default_factory=set)  # whose gradient is whole; not all: then it goes
    summed: bool = False  # the sum has gone to the server
    asked: dict[int, ApplyUpdate] = field(default_factory=dict)  # of some workers, not of all
    # What those who asked for the update say of the next step, in order.
    early: list[GradientMessage] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return bool(self.closed or self.asked or self.summed)


class RelayStateMachine:
    def __init__(self, workers: int, buffers: int) -> None:
        self.workers, self.n_buffers = workers, buffers
        # Free buffers and those of copies are disjoint and together all buffers.
        self.free = list(range(buffers))
        self.copies: dict[Key, Copy] = {}  # the least recently used first
        self.asked: dict[int, Key] = {}  # ticket of ours -> the copy that is COMING, each once
        # Pulls that wait for a buffer, only while none can be had.
        self.queue: deque[Pull] = deque()
        self.rounds: dict[
            int, ChunkRound
        ] = {}  # chunk -> its round, where there are several workers
        self.ending: dict[int, set[int]] = {}  # step -> the workers that ended it: some, not all
        self.commits: dict[
            int, dict[int, Any]
        ] = {}  # step -> worker -> its blob: of some, not of all
        self.committed: int | None = None  # the last step that the server was told of
        self.lost: str | None = None  # which worker has gone, and why
        self._ticket = 0

    def handle(self, event: RelayEvent) -> list[RelayAction]:
        """Next actions. Raises LostError where a step needs a worker that has gone, LoopError
        where they differ."""
        match event:
            case Pull():
                return self._pull(event)
            case Pulled(ticket):
                return self._pulled(ticket)
            case Done(give):
                return self._given(give)
            case Push() | Close() | ApplyUpdate() | DiscardGrad():
                return [Up(event)] if self.workers == 1 else self._gradient(event)
            case EndStep():
                return self._end_step(event)
            case Commit():
                return self._commit(event)
            case CommitDone(step):
                return self._committed(step)
            case PeerLost():
                return self._peer_lost(event)

    # pulls

    def _pull(self, pull: Pull) -> list[RelayAction]:
        if self.queue:
            self.queue.append(pull)
            return []
        return self._ask(pull)

    def _ask(self, pull: Pull) -> list[RelayAction]:
        """Give it, wait for what is coming, or ask the server for it."""
        key = (pull.chunk, pull.version)
        copy = self.copies.pop(key, None)
        out: list[RelayAction] = []
        if copy is None:
            if (buffer := self._room()) is None:
                self.queue.appendleft(pull)
                return []
            copy = Copy(buffer)
            self._ticket += 1
            self.asked[self._ticket] = key
            out.append(Up(replace(pull, into=buffer, ticket=self._ticket)))
        self.copies[key] = copy
        if copy.phase is CopyPhase.HERE:
            copy.readers += 1
            return [Give(pull, copy.buffer)]
        copy.pulls.append(pull)
        return out

    def _room(self) -> int | None:
        """A free buffer, else that of the least recently used copy that nobody reads."""
        if self.free:
            return self.free.pop()
        for key, copy in self.copies.items():
            if copy.droppable:
                del self.copies[key]
                return copy.buffer
        return None

    def _pulled(self, ticket: int) -> list[RelayAction]:
        copy = self.copies[self.asked.pop(ticket)]
        pulls, copy.pulls = copy.pulls, []
        copy.phase = CopyPhase.HERE
        copy.readers += len(pulls)
        return [Give(pull, copy.buffer) for pull in pulls]

    def _given(self, give: Give) -> list[RelayAction]:
        self.copies[give.pull.chunk, give.pull.version].readers -= 1
        out: list[RelayAction] = []
        while self.queue:
            waiting = len(self.queue)
            out += self._ask(self.queue.popleft())
            if len(self.queue) == waiting:
                break
        return out

    # gradients of several workers

    def _gradient(self, event: GradientMessage) -> list[RelayAction]:
        if not isinstance(event, DiscardGrad):
            self._nobody_lost()
        round = self.rounds.setdefault(event.chunk, ChunkRound())
        if event.worker in round.asked:
            round.early.append(event)
            return []
        match event:
            case Push():
                return [Hold(event)]
            case DiscardGrad(chunk, worker):
                again: list[RelayAction] = [Up(DiscardGrad(chunk))] if round.summed else []
                round.summed = False
                round.closed.discard(worker)
                return [Discard(chunk, worker), *again]
            case Close():
                return self._close(round, event)
            case ApplyUpdate():
                return self._update_asked(round, event)

    def _close(self, round: ChunkRound, event: Close | ApplyUpdate) -> list[RelayAction]:
        round.closed.add(event.worker)
        if len(round.closed) < self.workers:
            return []
        round.closed, round.summed = set(), True
        return [PushSum(event.chunk), Up(Close(event.chunk, event.step))]

    def _update_asked(self, round: ChunkRound, event: ApplyUpdate) -> list[RelayAction]:
        round.asked[event.worker] = event
        out = [] if round.summed else self._close(round, event)
        if len(round.asked) < self.workers:
            return out
        update = agreed([round.asked[worker] for worker in range(self.workers)])
        out.append(Up(replace(update, worker=0)))
        early = round.early
        round.asked, round.summed, round.early = {}, False, []
        for later in early:
            out += self._gradient(later)
        return out

    # steps

    def _end_step(self, event: EndStep) -> list[RelayAction]:
        self._nobody_lost()
        ending = self.ending.setdefault(event.step, set())
        ending.add(event.worker)
        if len(ending) < self.workers:
            return []
        del self.ending[event.step]
        return [Up(EndStep(event.step))]

    def _commit(self, event: Commit) -> list[RelayAction]:
        blobs = self.commits.setdefault(event.step, {})
        blobs[event.worker] = event.blob
        if len(blobs) < self.workers:
            return []
        del self.commits[event.step]
        return [Up(Commit(event.step, [blobs[worker] for worker in range(self.workers)]))]

    def _committed(self, step: int) -> list[RelayAction]:
        if self.committed is not None and step <= self.committed:
            return []  # another worker said so before
        self.committed = step
        return [Up(CommitDone(step))]

    # workers that go

    def _peer_lost(self, event: PeerLost) -> list[RelayAction]:
        """Nothing is lost where no step is open and none of the others begins one: they may be
        leaving too."""
        self.lost = f"worker {event.worker} of this host has gone: {event.why}"
        if self.ending or self.commits or any(round.open for round in self.rounds.values()):
            raise LostError(self.lost)
        return []

    def _nobody_lost(self) -> None:
        if self.lost is not None:
            raise LostError(self.lost)

    def check(self) -> None:
        """Assert every invariant."""
        copies = self.copies.values()
        used = [copy.buffer for copy in copies]
        assert sorted(used + self.free) == list(range(self.n_buffers))
        coming = {key for key, copy in self.copies.items() if copy.phase is CopyPhase.COMING}
        assert set(self.asked.values()) == coming and len(self.asked) == len(coming)
        for copy in copies:
            assert copy.readers >= 0
            assert not (copy.pulls if copy.phase is CopyPhase.HERE else copy.readers)
        assert not self.queue or not (self.free or any(copy.droppable for copy in copies))
        for round in self.rounds.values():
            assert len(round.closed) < self.workers and len(round.asked) < self.workers
            assert all(early.worker in round.asked for early in round.early)
        for said in (*self.ending.values(), *self.commits.values()):
            assert 0 < len(said) < self.workers
