"""Metrics: the file `metrics.jsonl` of a run directory, with exactly one line per step.

Line N (counted from 1) is on disk before step N can be committed, so a resumed run lacks no lines.
Resuming moves the lines of steps that were not committed to another file. Does not import torch,
because `roadtrain status` reads the file too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import msgspec

from roadtrain.errors import DamagedError
from roadtrain.retry import undone_on_error
from roadtrain.storage.direct import sync_directory, typed_errors, write_all

# most steps that are done but not committed, with staleness "none" (NO_BOUND of options/lossy.py)
_RANK_FILE = re.compile(r"metrics(?:\.(\d+))?\.jsonl")
_UNCOMMITTED_AT_MOST = 16


class Metrics:
    """An open metrics file.

    Invariant: the lines of the file have consecutive steps, and the last line is that of step
    `done`.
    """

    def __init__(self, path: Path, done: int, *, fresh: bool = False) -> None:
        """Open `path` and remove the lines of steps after `done`.

        If `fresh` is True or `done` is 0, the whole file is renamed, and `aside` is its new path.
        Otherwise, `dropped` is the number of removed lines.

        Raises:
            DamagedError: The line of a committed step is missing.
            FullError: The disk is full.
        """
        self.done, self.path = done, path
        lines = _read(path)
        begins = fresh or done == 0
        kept = [] if begins else list(takewhile(lambda pair: pair[0]["step"] <= done, lines))
        self.dropped = len(lines) - len(kept)
        self.aside = _rename_aside(path) if begins else None
        steps = [line["step"] for line, _ in kept]
        follow = steps == list(range(done - len(steps) + 1, done + 1))
        if not follow or (not steps and _counts(path, done)):
            raise DamagedError(
                f"{path}: {done} steps are committed, but the lines of the last steps are missing"
                f" or unreadable: the last intact line is of step {steps[-1] if steps else 0}",
                hint="the store is not affected: restore the file from a copy, or move it away, and"
                " the next step starts a new file",
            )
        self._nbytes = sum(nbytes for _, nbytes in kept)
        with typed_errors(path, "opening"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with undone_on_error(lambda: os.close(self._file)):
            sync_directory(path.parent)
            self._move_rest()

    @property
    def uncommitted(self) -> Path:
        """The file for lines of steps that were not committed."""
        return self.path.with_name(f"{self.path.stem}.uncommitted.jsonl")

    @property
    def note(self) -> str:
        """A message about lines that were moved away; "" if there are none."""
        if self.aside is not None:
            return f"metrics: {self.path} had lines of other steps, so it is now {self.aside}"
        if self.dropped:
            return (
                f"metrics: {self.dropped} steps after the last committed step were dropped; their"
                f" lines are in {self.uncommitted}"
            )
        return ""

    def append(self, line: dict[str, Any]) -> None:
        """Write the next step's line durably.

        If the disk is full, leaves the file unchanged and raises FullError.
        """
        assert line["step"] == self.done + 1, (line["step"], self.done)
        body = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            with typed_errors(self.path, f"the line of step {line['step']}", len(body)):
                write_all(self._file, body)
                os.fdatasync(self._file)
        except BaseException:
            # if this fails too, the next start removes the torn line
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._nbytes)
            raise
        self._nbytes += len(body)
        self.done += 1

    def _move_rest(self) -> None:
        """Move everything after the valid lines to the file of uncommitted lines."""
        rest = os.pread(self._file, os.fstat(self._file).st_size, self._nbytes)
        if not rest:
            return
        aside = self.uncommitted
        whole = rest[: rest.rfind(b"\n") + 1]
        why = f"not committed: training continued from step {self.done}"
        note = {"note": why, "dropped": self.dropped}
        if torn := rest[len(whole) :]:
            note["torn"] = torn.decode(errors="replace")
        body = json.dumps(note).encode() + b"\n" + whole
        with typed_errors(aside, "moving lines of steps that were not committed", len(body)):
            with open(aside, "ab", buffering=0) as file:
                write_all(file.fileno(), body)
                os.fsync(file.fileno())
            sync_directory(aside.parent)
            os.ftruncate(self._file, self._nbytes)
            os.fsync(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def metrics_files(run: Path) -> dict[int, Path]:
    """Return the metrics files in a run directory, by rank."""
    named = ((_RANK_FILE.fullmatch(path.name), path) for path in run.glob("metrics*.jsonl"))
    return dict(sorted((int(match[1] or 0), path) for match, path in named if match))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all intact lines of the file, also after a damaged line; [] if there is no file."""
    return [line for line, _ in _raw(path) if line]


def sessions_in(path: Path) -> dict[int, str]:
    """Return a dict from each step to the session that trained it ("" if the line names no
    session)."""
    return {line["step"]: line.get("session", "") for line in read_metrics(path)}


def last_alike(path: Path, many: int) -> list[dict[str, Any]]:
    """Return the lines, among the last `many`, that have the same plan as the last line."""
    return alike(read_metrics(path)[-many:])


def alike(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of the lines that have the same plan as the last line."""
    return [line for line in lines if line.get("predicted") == lines[-1].get("predicted")]


def committed_by(path: Path) -> int:
    """Return the latest step that is certainly committed according to the file; -1 for none."""
    lines = read_metrics(path)
    return committed_at(lines[-1]) if lines else -1


def committed_at(line: Mapping[str, Any]) -> int:
    """Return the latest step that is certainly committed according to the file's last line.

    A worker writes the line of step N once step N - k is committed, where k is the larger of 2 and
    the staleness. In a job with stages, each snapshot is committed before the next step's line is
    written.
    """
    if every := line.get("snapshot_every", 0):
        return (int(line["step"]) - 1) // int(every) * int(every) or -1
    staleness = line.get("lossy", {}).get("staleness", 0)
    open_steps = _UNCOMMITTED_AT_MOST if staleness == "none" else max(2, staleness)
    return max(0, int(line["step"]) - open_steps)


def missed_steps(path: Path, done: int) -> bool:
    """Return whether the last line of the file belongs to a step before `done`, because this rank
    missed steps."""
    lines = read_metrics(path)
    return bool(lines) and lines[-1]["step"] < done


def _rename_aside(path: Path) -> Path | None:
    """Rename the file, and return its new name, or None if the file is empty or missing."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.stem}.before-{n}.jsonl") for n in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    with typed_errors(path, "renaming"):
        path.rename(aside)
    sync_directory(path.parent)
    return aside


def _read(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Return (line, size in bytes) for each line before the first damaged line."""
    return list(takewhile(lambda pair: pair[0], _raw(path)))  # type: ignore[arg-type]


def _counts(path: Path, done: int) -> bool:
    """Return whether any line, even after a damaged line, belongs to a step up to `done`."""
    return any(line["step"] <= done for line, _ in _raw(path) if line)


def _raw(path: Path) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield (line, size in bytes) for every line of the file; a damaged line is None."""
    if not path.exists():
        return
    with typed_errors(path, "reading"):
        content = path.read_bytes()
    for raw in content.split(b"\n")[:-1]:
        yield line_of(raw), len(raw) + 1


def line_of(raw: bytes) -> dict[str, Any] | None:
    """Return the line of a step that is encoded in `raw`, or None if it is no such line."""
    try:
        line = msgspec.json.decode(raw)
    except ValueError:  # no JSON, or no text
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
