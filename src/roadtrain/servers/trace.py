"""The total seconds and bytes of each stage of training (Fetch, Forward, Backward, Push, Sum, Read,
Update, Write, Commit and Wait), and the spans of time in which each lane worked on them.

A lane is a worker, a device, a disk, a link, or the update threads of a server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_SPANS = 4096  # spans that are kept
KEPT_S = 30.0  # when there are too many, spans that ended longer ago are dropped first
GRAINS = MOST_SPANS // 8  # then gaps shorter than the time they cover / GRAINS are closed
CLOCK = time.time() - time.perf_counter()  # so that spans of several processes can be compared


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


class Span(NamedTuple):
    """A lane worked on a stage from `begin` to `end`, in seconds since 1970."""

    stage: str
    lane: str
    begin: float
    end: float
    nbytes: int = 0


class Stages:
    """The totals of each stage since the last `take`, and the latest spans. Thread-safe.

    Seconds are summed over threads, so they may exceed the wall time. At most MOST_SPANS spans are
    kept; when there are more, neighbors in a lane are joined.
    """

    def __init__(self, lane: str = "worker 0") -> None:
        self.lane = lane  # of the spans of `timed`
        self._lock = threading.Lock()
        self._sums: dict[str, StageTotals] = {}
        self._spans: list[Span] = []

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        with self._lock:
            so_far = self._sums.get(name, StageTotals())
            self._sums[name] = StageTotals(so_far.seconds + seconds, so_far.nbytes + nbytes)

    def span(self, name: str, lane: str, start: float, nbytes: int = 0) -> None:
        """Record that `lane` worked on a stage from `start`, a time of time.perf_counter(), until
        now. The totals of the stage do not change."""
        span = Span(name, lane, CLOCK + start, CLOCK + time.perf_counter(), nbytes)
        with self._lock:
            self._spans.append(span)
            if len(self._spans) >= MOST_SPANS:
                self._spans = _joined(self._spans)

    @contextmanager
    def timed(self, name: str, nbytes: int = 0) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start, nbytes)
        self.span(name, self.lane, start, nbytes)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage since the last `take`, without resetting them."""
        with self._lock:
            return {name: stage.seconds for name, stage in self._sums.items()}

    def take(self) -> dict[str, StageTotals]:
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums

    def spans(self, *, take: bool = False) -> list[Span]:
        """Return the spans that are kept. With `take`, they are no longer kept."""
        with self._lock:
            kept = self._spans
            self._spans = [] if take else kept.copy()
        return kept


def _joined(spans: list[Span]) -> list[Span]:
    """Drop old spans and join neighbors of the same lane and stage, so that at most MOST_SPANS / 2
    remain."""
    newest = spans[-1].end
    spans = [span for span in spans if span.end > newest - KEPT_S]
    return joined(spans, (newest - spans[0].begin) / GRAINS)[-MOST_SPANS // 2 :]


def joined(spans: Iterable[Span], gap_s: float) -> list[Span]:
    """Return spans, ordered by their ends, with neighbors of the same lane and stage joined if less
    than `gap_s` is between them."""
    last: dict[tuple[str, str], int] = {}  # (stage, lane) -> index of its last span in `out`
    out: list[Span] = []
    for span in spans:
        i = last.get(span[:2])
        if i is not None and span.begin - out[i].end < gap_s:
            begin, end = min(out[i].begin, span.begin), max(out[i].end, span.end)
            out[i] = Span(*span[:2], begin, end, out[i].nbytes + span.nbytes)
        else:
            last[span[:2]] = len(out)
            out.append(span)
    return out
