"""Exchange of loss, number of tokens and stop requests at the end of each step, among workers that
train with the same servers.

All workers thus stop after the same step, and worker 0 reports the mean loss. Without a delay, a
worker waits for the data of all workers before the next step. With a delay of k steps, a worker
reads the data of step n - k - 1 after step n, and does not wait.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from roadtrain.errors import WireError
from roadtrain.training.stop import INTERRUPTED

WORD = struct.Struct("<dqB")  # a worker's data of a step: loss, tokens, an index into STOPS
STOPS = ("", "another worker was interrupted", "another worker's minutes are over")


@dataclass(frozen=True)
class GlobalStep:
    """The results of a step, summarized over all workers."""

    loss: float  # mean over the workers
    tokens: int  # sum over the workers
    why: str  # why a worker asked to stop; "" if no worker did


class StepExchange:
    """The exchange of step data between one worker and the other workers.

    Args:
        optimizer: The worker's placed optimizer.

    Attributes:
        lag: The number of steps after which the data of a step is received; 0 without a delay.
    """

    def __init__(self, optimizer: Any) -> None:
        self._worker, self._first = optimizer.session.worker, optimizer.steps_done + 1
        staleness = optimizer.session.store_plan.staleness
        self.lag = staleness + 1 if staleness else 0

    def send(self, loss: float, tokens: int, why: str) -> None:
        """Send this worker's data of the current step to the other workers when the step ends.
        `why`: the reason to stop, or ""."""
        stops = 0 if not why else 1 if why == INTERRUPTED else 2
        self._worker.word = WORD.pack(loss, tokens, stops)

    def receive(self, step: int) -> GlobalStep | None:
        """Return the data of all workers for step `step - lag`, after step `step`.

        Returns None if this process was started after that earlier step. Raises PeerError or
        WireError.
        """
        if step - self.lag < self._first:
            return None
        words = self._worker.words(step - self.lag)
        if wrong := [len(word) for word in words if len(word) != WORD.size]:
            raise WireError(f"a worker's step data has {wrong[0]} bytes, expected {WORD.size}")
        losses, tokens, stops = zip(*map(WORD.unpack, words))
        most = min(max(stops), len(STOPS) - 1)
        return GlobalStep(sum(losses) / len(losses), sum(tokens), STOPS[most])
