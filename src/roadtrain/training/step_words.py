"""What the workers of servers tell each other at the end of each step: loss, tokens, and whether
one of them stops. So all end after the same step, and the run's loss is that of all.

Without a delay each hears the others' words of a step before it goes on, which it must do anyway to
get the next parameters. With a delay of k steps the words of k + 1 steps before are here without
waiting. Does NOT know how words travel (servers/protocol/messages.py, StepWords).
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
class StepOfAll:
    """What all workers said of a step."""

    loss: float  # the mean
    tokens: int  # the sum
    why: str  # one of them stops, "" where none does


class WorkerWords:
    """`optimizer`: a placed one, of one of several workers."""

    def __init__(self, optimizer: Any) -> None:
        self._worker, self._first = optimizer.session.worker, optimizer.steps_done + 1
        staleness = optimizer.session.store_plan.staleness
        self.lag = staleness + 1 if staleness else 0  # steps until words are here without waiting

    def say(self, loss: float, tokens: int, why: str) -> None:
        """To the other workers with the step that is about to end. `why`: this worker stops."""
        stops = 0 if not why else 1 if why == INTERRUPTED else 2
        self._worker.word = WORD.pack(loss, tokens, stops)

    def hear(self, step: int) -> StepOfAll | None:
        """What all said of the step that is `lag` before `step`, which has just ended; None where
        that was before this start. Raises PeerError, WireError."""
        if step - self.lag < self._first:
            return None
        words = self._worker.words(step - self.lag)
        if any(len(word) != WORD.size for word in words):
            raise WireError(f"a worker said {max(map(len, words))} bytes at the end of step {step}")
        losses, tokens, stops = zip(*map(WORD.unpack, words))
        most = min(max(stops), len(STOPS) - 1)
        return StepOfAll(sum(losses) / len(losses), sum(tokens), STOPS[most])
