"""The total seconds and bytes of each stage of training (Fetch, Forward, Backward, Push, Sum, Read,
Update, Write, Commit and Wait), and the intervals of time in which each lane worked on them.

A lane is a worker, a device, a disk, a link, or the update threads of a server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_INTERVALS = 4096  # intervals that are kept
KEPT_S = 30.0  # when there are too many, intervals that ended longer ago are dropped first
GRAINS = MOST_INTERVALS // 8  # then gaps shorter than the time they cover / GRAINS are closed
CLOCK = time.time() - time.perf_counter()  # so that intervals of several processes can be compared


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


class Interval(NamedTuple):
    """A lane worked on a stage from `begin` to `end`, in seconds since 1970."""

    stage: str
    lane: str
    begin: float
    end: float
    nbytes: int = 0


class Stages:
    """The totals of each stage since the last `take`, and the latest intervals. Thread-safe.

    Seconds are summed over threads, so they may exceed the wall time. At most MOST_INTERVALS are
    kept; when there are more, neighbors in a lane are joined.
    """

    def __init__(self, lane: str = "worker 0") -> None:
        self.lane = lane  # of the intervals of `timed`
        self._lock = threading.Lock()
        self._sums: dict[str, StageTotals] = {}
        self._intervals: list[Interval] = []

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        with self._lock:
            so_far = self._sums.get(name, StageTotals())
            self._sums[name] = StageTotals(so_far.seconds + seconds, so_far.nbytes + nbytes)

    def interval(self, name: str, lane: str, start: float, nbytes: int = 0) -> None:
        """Record that `lane` worked on a stage from `start`, a time of time.perf_counter(), until
        now. The totals of the stage do not change."""
        interval = Interval(name, lane, CLOCK + start, CLOCK + time.perf_counter(), nbytes)
        with self._lock:
            self._intervals.append(interval)
            if len(self._intervals) >= MOST_INTERVALS:
                self._intervals = _joined(self._intervals)

    @contextmanager
    def timed(self, name: str, nbytes: int = 0) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start, nbytes)
        self.interval(name, self.lane, start, nbytes)

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

    def intervals(self, *, take: bool = False) -> list[Interval]:
        """Return the intervals that are kept. With `take`, they are no longer kept."""
        with self._lock:
            kept = self._intervals
            self._intervals = [] if take else kept.copy()
        return kept


def _joined(intervals: list[Interval]) -> list[Interval]:
    """Drop old intervals and join neighbors of the same lane and stage, so that at most half of
    MOST_INTERVALS remain."""
    newest = intervals[-1].end
    intervals = [interval for interval in intervals if interval.end > newest - KEPT_S]
    return joined(intervals, (newest - intervals[0].begin) / GRAINS)[-MOST_INTERVALS // 2 :]


def joined(intervals: Iterable[Interval], gap_s: float) -> list[Interval]:
    """Return intervals, ordered by their ends, with neighbors of the same lane and stage joined if
    less than `gap_s` is between them."""
    last: dict[tuple[str, str], int] = {}  # (stage, lane) -> index of its last interval in `out`
    out: list[Interval] = []
    for interval in intervals:
        i = last.get(interval[:2])
        if i is not None and interval.begin - out[i].end < gap_s:
            begin, end = min(out[i].begin, interval.begin), max(out[i].end, interval.end)
            out[i] = Interval(*interval[:2], begin, end, out[i].nbytes + interval.nbytes)
        else:
            last[interval[:2]] = len(out)
            out.append(interval)
    return out
