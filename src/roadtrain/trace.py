"""What happened: seconds and bytes per stage, summed; the same stage names as in code, messages and simulator.

Stages: Fetch Forward Backward Push Sum Read Update Write Commit Wait. Thread-safe. Does NOT sample or print.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    seconds: float = 0.0
    nbytes: int = 0


class Stages:
    """Sums since the last `take`. Seconds of one stage add up over threads, so they may exceed the wall time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        with self._lock:
            s, n = self._sums.get(name, (0.0, 0))
            self._sums[name] = (s + seconds, n + nbytes)

    def take(self) -> dict[str, Stage]:
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: Stage(s, n) for name, (s, n) in sums.items()}
