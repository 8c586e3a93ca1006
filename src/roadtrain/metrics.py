"""Metrics: `metrics.jsonl` of a run directory, one line a step, every step exactly once after any resume.

Steps count from 1: line `step` N was written when N steps were done. It is on disk before step N can be committed, so a
resume only ever cuts lines off: those of steps that were not committed, and a torn last one. Does NOT know torch:
`roadtrain status` reads it too.
"""

from __future__ import annotations

import contextlib
import json
import os
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from roadtrain.errors import DamagedError


class Metrics:
    """Appends to `path`. Invariant: the file holds the lines of consecutive steps up to `done`, each once."""

    def __init__(self, path: Path, done: int) -> None:
        """Cut the lines of all steps after `done`; `dropped` is how many. Raises DamagedError where a line of a step
        that counts is missing; an empty or absent file is a beginning."""
        self.done = done
        lines = _read(path)
        kept = list(takewhile(lambda pair: pair[0]["step"] <= done, lines))
        self.dropped = len(lines) - len(kept)
        steps = [line["step"] for line, _ in kept]
        if steps != list(range(done - len(steps) + 1, done + 1)):
            raise DamagedError(
                f"{path} has lines up to step {steps[-1]}, {done} steps are committed, some have no line",
                hint="move the file away; a new one begins with the next step",
            )
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, sum(nbytes for _, nbytes in kept))

    def append(self, line: dict[str, Any]) -> None:
        """Write the next step's line and wait until it is on disk."""
        assert line["step"] == self.done + 1, (line["step"], self.done)
        os.write(self._file, (json.dumps(line, allow_nan=False) + "\n").encode())
        os.fdatasync(self._file)
        self.done += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the file, [] if there is none. A torn last line is left out."""
    return [line for line, _ in _read(path)]


def _read(path: Path) -> list[tuple[dict[str, Any], int]]:
    """(line, its bytes) of every whole line."""
    out: list[tuple[dict[str, Any], int]] = []
    with contextlib.suppress(FileNotFoundError, ValueError):  # what is no JSON is the torn last line
        for raw in path.read_bytes().splitlines(keepends=True):
            if raw.endswith(b"\n"):
                out.append((json.loads(raw), len(raw)))
    return out
