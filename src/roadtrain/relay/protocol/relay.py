"""What a relay does next: it stands between the workers of one host and one server. Events in,
actions out; pure.

To its workers it is the server, to the server it is one worker:
    Pull      asked for once, whoever wants it; kept in one of `buffers` until the room is needed
              (the least recently used goes first), so a block that was pulled for the forward is
              still there for the backward
    Push ..   one worker: goes on as it is. Several: held until all have closed the chunk, then
              their sum goes on
    EndStep   goes on once all have said it
What of that any intermediary does: servers/protocol/intermediary.py.

Assumes the workers' messages in their order. Does NOT know what a step computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.intermediary import CopyRequest, Give, Intermediary, Up
from roadtrain.servers.protocol.server import agreed


@dataclass(frozen=True, slots=True)
class PushSum:
    """Add up what is held of the chunk, in the workers' order. Where there is anything, the sum
    goes to the server."""

    chunk: int


RelayEvent: TypeAlias = m.WorkerMessage | m.Pulled | m.PeerLost | m.Done[Give]
RelayAction: TypeAlias = Up | Give | m.Hold | m.Discard | PushSum


@dataclass(slots=True)
class ChunkRound:
    """What several workers have said of a chunk in this step."""

    closed: set[int] = field(default_factory=set)  # whose gradient is whole; not all: then it goes
    summed: bool = False  # the sum has gone to the server
    asked: dict[int, m.ApplyUpdate] = field(default_factory=dict)  # of some workers, not of all
    # What those who asked for the update say of the next step, in order.
    early: list[m.GradientMessage] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return bool(self.closed or self.asked or self.summed)


class RelayStateMachine(Intermediary[Give]):
    OF_WORKERS = " of this host"

    def __init__(self, workers: int, buffers: int) -> None:
        super().__init__(workers, buffers)
        # chunk -> its round, where there are several workers
        self.rounds: dict[int, ChunkRound] = {}

    def handle(self, event: RelayEvent) -> list[RelayAction]:
        """Next actions. Raises LostError where a step needs a worker that has gone, LoopError
        where they differ."""
        match event:
            case m.Pull():
                return [*self._request(CopyRequest(event, partial(Give, event)))]
            case m.Pulled(ticket):
                return [*self._pulled(ticket)]
            case m.Done(give):
                return [*self._given(give.pull)]
            case m.Push() | m.Close() | m.ApplyUpdate() | m.DiscardGrad():
                return [Up(event)] if self.workers == 1 else self._gradient(event)
            case m.EndStep() | m.Commit() | m.CommitDone() | m.PeerLost():
                return [*self._step(event)]

    def in_step(self) -> bool:
        return any(round.open for round in self.rounds.values())

    # gradients of several workers

    def _gradient(self, event: m.GradientMessage) -> list[RelayAction]:
        if not isinstance(event, m.DiscardGrad):
            self._nobody_lost()
        round = self.rounds.setdefault(event.chunk, ChunkRound())
        if event.worker in round.asked:
            round.early.append(event)
            return []
        match event:
            case m.Push():
                return [m.Hold(event)]
            case m.DiscardGrad(chunk, worker):
                again: list[RelayAction] = [Up(m.DiscardGrad(chunk))] if round.summed else []
                round.summed = False
                round.closed.discard(worker)
                return [m.Discard(chunk, worker), *again]
            case m.Close():
                return self._close(round, event)
            case m.ApplyUpdate():
                return self._update_asked(round, event)

    def _close(self, round: ChunkRound, event: m.Close | m.ApplyUpdate) -> list[RelayAction]:
        round.closed.add(event.worker)
        if len(round.closed) < self.workers:
            return []
        round.closed, round.summed = set(), True
        return [PushSum(event.chunk), Up(m.Close(event.chunk, event.step))]

    def _update_asked(self, round: ChunkRound, event: m.ApplyUpdate) -> list[RelayAction]:
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

    def check(self) -> None:
        """Assert every invariant."""
        super().check()
        for round in self.rounds.values():
            assert len(round.closed) < self.workers and len(round.asked) < self.workers
            assert all(early.worker in round.asked for early in round.early)
