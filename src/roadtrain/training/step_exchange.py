"""Exchange of loss, tokens and stop requests among the workers of servers at the end of each step,
so that all stop after the same step and worker 0 can report the loss of the whole run.

Without a delay, each worker receives the others' data of a step before the next one, together with
the next parameters. With a delay of k steps, the data of k + 1 steps before is available without
waiting. The data is carried by servers/protocol/messages.py, StepWords.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from roadtrain.errors import WireError
from roadtrain.training.stop import INTERRUPTED

WORD = struct.Struct("<dqB")  # loss, tokens, an index into STOPS
STOPS = ("", "another worker was interrupted", "another worker's minutes are over")


@dataclass(frozen=True)
class GlobalStep:
    """A step of all workers together."""

    loss: float  # mean over the workers
    tokens: int  # sum
    why: str  # why a worker stops; "" if none does


class StepExchange:
    """The exchange of one worker; `optimizer` is its placed optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._worker, self._first = optimizer.session.worker, optimizer.steps_done + 1
        staleness = optimizer.session.store_plan.staleness
        self.lag = staleness + 1 if staleness else 0  # steps until the data is there

    def send(self, loss: float, tokens: int, why: str) -> None:
        """Send data to the other workers with the step that is about to end; `why` it stops."""
        stops = 0 if not why else 1 if why == INTERRUPTED else 2
        self._worker.word = WORD.pack(loss, tokens, stops)

    def receive(self, step: int) -> GlobalStep | None:
        """Return the step `lag` before `step`, which has just ended; None if that was before this
        start. Raises PeerError or WireError."""
        if step - self.lag < self._first:
            return None
        words = self._worker.words(step - self.lag)
        if any(len(word) != WORD.size for word in words):
            raise WireError(f"{max(map(len, words))} bytes from a worker for step {step}")
        losses, tokens, stops = zip(*map(WORD.unpack, words))
        most = min(max(stops), len(STOPS) - 1)
        return GlobalStep(sum(losses) / len(losses), sum(tokens), STOPS[most])
