"""Metrics: `metrics.jsonl` of a run directory, one line a step, every step exactly once after any resume.

A step's line is on disk before the step can be committed, so a resume only ever has to cut lines off: those of steps
that were not committed, and a torn last one. Does NOT know torch: `roadtrain status` reads it too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from roadtrain.errors import DamagedError


class Metrics:
    """Appends to `path`. Invariant: the file holds the lines of steps 0 .. next_step - 1 in order, each once."""

    def __init__(self, path: Path, next_step: int) -> None:
        """Cut everything from step `next_step` on. Raises DamagedError where an earlier step's line is missing."""
        self.path = path
        self.next_step = next_step
        kept, keep_nbytes = _read(path)
        while kept and kept[-1][0]["step"] >= next_step:
            keep_nbytes = kept.pop()[1]
        if [line["step"] for line, _ in kept] != list(range(next_step)):
            raise DamagedError(
                f"{path} holds {len(kept)} steps, {next_step} are committed",
                hint="move the file away with its run directory's other metrics, or train into a new --run.dir",
            )
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, keep_nbytes)
        os.lseek(self._file, 0, os.SEEK_END)

    def append(self, line: dict[str, Any]) -> None:
        """Write the line of step `next_step` and wait until it is on disk."""
        assert line["step"] == self.next_step, (line["step"], self.next_step)
        os.write(self._file, (json.dumps(line) + "\n").encode())
        os.fdatasync(self._file)
        self.next_step += 1

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
