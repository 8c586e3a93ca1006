"""Metrics: `metrics.jsonl` of a run directory, one line a step, every step exactly once after any resume.

Steps count from 1: line `step` N was written when N steps were done. It is on disk before step N can be committed, so a
resume only ever cuts lines off: those of steps that were not committed, and a torn last one. Does NOT know torch:
`roadtrain status` reads it too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from roadtrain.errors import DamagedError


class Metrics:
    """Appends to `path`. Invariant: the file holds the lines of consecutive steps up to `done`, each once."""

    def __init__(self, path: Path, done: int) -> None:
        """Cut the lines of all steps after `done`; `dropped` is how many. Raises DamagedError where a line of a step
        that counts is missing; an empty or absent file is a beginning."""
        self.path = path
        self.done = done
        kept, end = _read(path)
        found = len(kept)
        while kept and kept[-1][0]["step"] > done:
            end = kept.pop()[1]
        self.dropped = found - len(kept)
        steps = [line["step"] for line, _ in kept]
        if steps != list(range(done - len(steps) + 1, done + 1)):
            raise DamagedError(
                f"{path} has lines up to step {steps[-1]}, {done} steps are committed, some have no line",
                hint="move the file away; a new one begins with the next step",
            )
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, end)
        os.lseek(self._file, 0, os.SEEK_END)

    def append(self, line: dict[str, Any]) -> None:
        """Write the next step's line and wait until it is on disk."""
        assert line["step"] == self.done + 1, (line["step"], self.done)
        os.write(self._file, (json.dumps(line, allow_nan=False) + "\n").encode())
        os.fdatasync(self._file)
        self.done += 1

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the file, [] if there is none. A torn last line is left out."""
    return [line for line, _ in _read(path)[0]]


def _read(path: Path) -> tuple[list[tuple[dict[str, Any], int]], int]:
    """(line, its first byte) of every whole line, and the byte where the last of them ends."""
    out: list[tuple[dict[str, Any], int]] = []
    at = 0
    for raw in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        if not raw.endswith(b"\n"):
            break
        try:
            line = json.loads(raw)
        except ValueError:
            break
        out.append((line, at))
        at += len(raw)
    return out, at
