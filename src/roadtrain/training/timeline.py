"""The file `timeline.jsonl` of a run directory: the last steps, for `roadtrain show`.

A line is {"step": N, "intervals": [[stage, lane, begin, end, bytes], ...]}, with times in seconds
since 1970. A thread writes the lines, so that no step waits for the file: if the thread is late,
or the disk is full, lines are dropped. A file that has grown beyond FILE_BYTES is renamed, so there
are at most two files. Does not import torch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from roadtrain.servers.trace import Interval

FILE_BYTES = 4 * 2**20
QUEUED = 4  # most steps that wait for the thread
END_S = 5.0  # the longest wait for the thread at the end


class TimelineLine(msgspec.Struct):
    """The intervals of a step."""

    step: int
    intervals: list[Interval]


def timeline_of(metrics: Path) -> Path:
    """Return the path of the timeline that belongs to a metrics file."""
    return metrics.with_name(metrics.name.replace("metrics", "timeline", 1))


def before_of(timeline: Path) -> Path:
    """Return the path to which a timeline that has grown too long is renamed."""
    return timeline.with_suffix(".before.jsonl")


class Timeline:
    """An open timeline. If it cannot be written, `report` is called once, and training goes on."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self.path, self._report = path, report
        self._lines: queue.Queue[TimelineLine | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="timeline", daemon=True)

    def add(self, step: int, intervals: Sequence[Interval]) -> None:
        if self._thread.is_alive() and not self._lines.full():
            self._lines.put_nowait(TimelineLine(step, list(intervals)))

    def _write_all(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                with open(self.path, "ab") as file:
                    file.write(msgspec.json.encode(line) + b"\n")
                    size = file.tell()
                if size > FILE_BYTES:
                    self.path.replace(before_of(self.path))
        except OSError as error:
            self._report(f"{self.path}: no further intervals are written: {error.strerror}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._lines.put(None, timeout=END_S if self._thread.is_alive() else 0)
        except queue.Full:
            return
        self._thread.join(END_S)
