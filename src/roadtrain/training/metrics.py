"""Metrics: `metrics.jsonl` of a run directory, one line a step, every step exactly once after any
resume.

Steps count from 1: line `step` N was written when N steps were done. It is on disk before step N
can be committed, so a resume only ever takes lines away: those of steps that were not committed,
and a torn last one. They are moved into a file beside it, never cut; a file of another store is
renamed. Does NOT know torch: `roadtrain status` reads it too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from roadtrain.errors import DamagedError
from roadtrain.retry import undone_on_error
from roadtrain.storage.direct import sync_directory, typed_errors, write_all

_UNCOMMITTED_AT_MOST = 16  # steps, with staleness "none": what servers put away (placing.NO_BOUND)


class Metrics:
    """Appends to `path`. Invariant: the file holds the lines of consecutive steps up to `done`,
    each once."""

    def __init__(self, path: Path, done: int, *, fresh: bool = False) -> None:
        """The lines of all steps after `done` are moved to `uncommitted`; `dropped` is how many.
        `fresh`: what the file holds is another store's, as at step 0: it is renamed, `aside` is
        its name then, else None. Raises DamagedError where a line of a step that counts is
        missing (an empty or absent file is a beginning), FullError."""
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
                f"{path}: {done} steps are committed, and not all of the last ones have a line that"
                f" can be read; the last whole one is of step {steps[-1] if steps else 0}",
                hint=(
                    "the store is not affected: restore the file from a copy, or move it away, and"
                    " a new one begins with the next step"
                ),
            )
        self._nbytes = sum(nbytes for _, nbytes in kept)
        with typed_errors(path, "opening"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with undone_on_error(lambda: os.close(self._file)):
            sync_directory(path.parent)
            self._move_rest()

    @property
    def uncommitted(self) -> Path:
        """Where the lines of steps go that were not committed."""
        return self.path.with_name(f"{self.path.stem}.uncommitted.jsonl")

    @property
    def note(self) -> str:
        """For people: where lines that do not count are now; "" where all count."""
        if self.aside is not None:
            return f"metrics: {self.path} told of other steps, it is {self.aside} now"
        if self.dropped:
            return (
                f"metrics: {self.dropped} steps after the last committed one are dropped, their"
                f" lines are in {self.uncommitted}"
            )
        return ""

    def append(self, line: dict[str, Any]) -> None:
        """Write the next step's line and wait until it is on disk. FullError: the file is as
        before."""
        assert line["step"] == self.done + 1, (line["step"], self.done)
        body = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            with typed_errors(self.path, f"the line of step {line['step']}", len(body)):
                write_all(self._file, body)
                os.fdatasync(self._file)
        except BaseException:
            # else the next start does it: a torn line counts for nothing
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._nbytes)
            raise
        self._nbytes += len(body)
        self.done += 1

    def _move_rest(self) -> None:
        """What lies behind the lines that count goes to the file of what was not committed."""
        rest = os.pread(self._file, os.fstat(self._file).st_size, self._nbytes)
        if not rest:
            return
        aside = self.uncommitted
        whole = rest[: rest.rfind(b"\n") + 1]
        said = f"not committed: training went on from step {self.done}"
        note = {"note": said, "dropped": self.dropped}
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the file, [] if there is none. A torn last line is left out."""
    return [line for line, _ in _read(path)]


def sessions_in(path: Path) -> dict[int, str]:
    """Step -> the session that trained it, "" where the line does not say."""
    return {line["step"]: line.get("session", "") for line in read_metrics(path)}


def last_alike(path: Path, many: int) -> list[dict[str, Any]]:
    """Of the last `many` lines those of the plan that the last one is of: a run that was planned
    anew, or that fewer hosts took over, has steps of several in one file."""
    lines = read_metrics(path)[-many:]
    return [line for line in lines if line.get("predicted") == lines[-1].get("predicted")]


def committed_by(path: Path) -> int:
    """The step that the lines of a file prove committed, -1 for none: a step's line is written
    once all steps but the last two, or but as many as its staleness allows, are committed
    (`Worker.end_step`). Where a line says "snapshot_every", only steps that this divides are ever
    committed, each before the next step's line is written."""
    lines = read_metrics(path)
    if not lines:
        return -1
    if every := lines[-1].get("snapshot_every", 0):
        return (int(lines[-1]["step"]) - 1) // int(every) * int(every) or -1
    staleness = lines[-1].get("lossy", {}).get("staleness", 0)
    open_steps = _UNCOMMITTED_AT_MOST if staleness == "none" else max(2, staleness)
    return max(0, int(lines[-1]["step"]) - open_steps)


def was_away(path: Path, done: int) -> bool:
    """Whether this file's last line is of a step before `done`: with other stages or hosts, this
    rank, or this host as the first one, was not there in the steps since."""
    known = read_metrics(path)
    return bool(known) and known[-1]["step"] < done


def _rename_aside(path: Path) -> Path | None:
    """The file's new name; None where it holds nothing."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.stem}.before-{n}.jsonl") for n in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    with typed_errors(path, "renaming"):
        path.rename(aside)
    sync_directory(path.parent)
    return aside


def _read(path: Path) -> list[tuple[dict[str, Any], int]]:
    """(line, its bytes) of every whole line."""
    return list(takewhile(lambda pair: pair[0], _raw(path)))  # type: ignore[arg-type]


def _counts(path: Path, done: int) -> bool:
    """Whether any line of the file, behind whatever is damaged, is of a step up to `done`."""
    return any(line["step"] <= done for line, _ in _raw(path) if line)


def _raw(path: Path) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """(line, its bytes) for every line; None for what is no line of ours, as a torn last one."""
    if not path.exists():
        return
    with typed_errors(path, "reading"):
        content = path.read_bytes()
    for raw in content.split(b"\n")[:-1]:
        line = None
        with contextlib.suppress(ValueError):
            line = json.loads(raw)
        ours = isinstance(line, dict) and isinstance(line.get("step"), int)
        yield line if ours else None, len(raw) + 1
