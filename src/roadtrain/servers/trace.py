"""The total seconds and bytes of each stage of training: Fetch, Forward, Backward, Push, Sum, Read,
Update, Write, Commit and Wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StageTotals:
    seconds: float = 0.0
    nbytes: int = 0


def as_words(stages: Mapping[str, StageTotals]) -> dict[str, dict[str, float]]:
    """Return the totals in the words of a line of metrics.jsonl."""
    return {
        name: {"seconds": round(total.seconds, 6), "bytes": total.nbytes}
        for name, total in stages.items()
    }


def flat_numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of nested measurements under names such as "stages/Fetch/seconds"."""
    out: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            out |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            out[f"{prefix}{name}"] = value
    return out


class Stages:
    """The totals of each stage since the last `take`. Thread-safe.

    Seconds are summed over threads, so they may exceed the wall time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, StageTotals] = {}

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        with self._lock:
            so_far = self._sums.get(name, StageTotals())
            self._sums[name] = StageTotals(so_far.seconds + seconds, so_far.nbytes + nbytes)

    @contextmanager
    def timed(self, name: str, nbytes: int = 0) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start, nbytes)

    def totals(self) -> dict[str, StageTotals]:
        """Return the totals since the last `take`, without resetting them."""
        with self._lock:
            return dict(self._sums)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage since the last `take`, without resetting them."""
        return {name: stage.seconds for name, stage in self.totals().items()}

    def take(self) -> dict[str, StageTotals]:
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums
