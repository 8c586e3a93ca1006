"""The state machine of a relay, which is between the workers of one host and one server. Events in,
actions out; no clock, no I/O.

The workers use the relay as their server. The server sees the relay as a single worker:
    Pull      The relay pulls each version of a chunk from the server once, for all workers, and
              keeps the parameters until another chunk needs the buffer.
    Push      The gradients of a single worker are forwarded unchanged. The gradients of several
              workers are held until all are complete, and then their sum is forwarded.
    EndStep   The relay forwards one EndStep once every worker has sent an EndStep.

Assumes that messages of a worker arrive in order.
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
    """Sum the gradients held for a chunk, in worker order, and push the sum to the server. If no
    gradients are held, do nothing."""

    chunk: int


RelayEvent: TypeAlias = m.WorkerMessage | m.Pulled | m.PeerLost | m.Done[Give]
RelayAction: TypeAlias = Up | Give | m.Hold | m.Discard | PushSum


@dataclass(slots=True)
class ChunkRound:
    """The state of one chunk in the current step. Not used if the host has only one worker."""

    # Workers whose gradient is complete. Cleared when the last worker completes its gradient.
    closed: set[int] = field(default_factory=set)
    summed: bool = False  # whether the sum has been sent to the server
    # worker -> its request to update. Cleared when the last worker requests the update.
    updates: dict[int, m.ApplyUpdate] = field(default_factory=dict)
    # Messages about the next step, in order of arrival. Their senders are in `updates`.
    early: list[m.GradientMessage] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return bool(self.closed or self.updates or self.summed)


class RelayStateMachine(Intermediary[Give]):
    OF_WORKERS = " of this host"

    def __init__(self, workers: int, buffers: int) -> None:
        super().__init__(workers, buffers)
        # chunk -> its round; used with several workers only
        self.rounds: dict[int, ChunkRound] = {}

    def handle(self, event: RelayEvent) -> list[RelayAction]:
        """Handle an event and return the next actions.

        Raises LostError if a step needs a worker whose link was lost. Raises LoopError if the
        requests of several workers to update a chunk contradict each other.
        """
        match event:
            case m.Pull():
                return [*self._request(CopyRequest(event, partial(Give, event)))]
            case m.Pulled():
                return [*self._pulled(event)]
            case m.Done(give):
                return [*self._delivered(give.pull)]
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
        if event.worker in round.updates:
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
                return self._update_requested(round, event)

    def _close(self, round: ChunkRound, event: m.Close | m.ApplyUpdate) -> list[RelayAction]:
        round.closed.add(event.worker)
        if len(round.closed) < self.workers:
            return []
        round.closed, round.summed = set(), True
        return [PushSum(event.chunk), Up(m.Close(event.chunk, event.step))]

    def _update_requested(self, round: ChunkRound, event: m.ApplyUpdate) -> list[RelayAction]:
        round.updates[event.worker] = event
        out = [] if round.summed else self._close(round, event)
        if len(round.updates) < self.workers:
            return out
        update = agreed([round.updates[worker] for worker in range(self.workers)])
        out.append(Up(replace(update, worker=0)))
        early = round.early
        round.updates, round.summed, round.early = {}, False, []
        for later in early:
            out += self._gradient(later)
        return out

    def check(self) -> None:
        """Assert every invariant."""
        super().check()
        for round in self.rounds.values():
            assert len(round.closed) < self.workers and len(round.updates) < self.workers
            assert all(early.worker in round.updates for early in round.early)
