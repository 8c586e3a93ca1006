"""What a lab has made: names that say who made it, and undoing it once, whatever happens. Does NOT
know what it is.

Note: names of the lab. Directories and groups are called `roadtrain-lab-PID-START-KIND-...`, START
being the kernel's start time of PID, so that a later process with that PID is not taken for the
maker. What is in a directory is all that is needed to undo from outside what it stands for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from roadtrain.errors import RoadtrainError
from roadtrain.retry import retry, undone_on_error

PREFIX = "roadtrain-lab-"
UNDO_TIMEOUT_S = 10.0


def folder(kind: str, inside: Path | None = None) -> Path:
    """A new directory of this process (in the temporary directory, unless said otherwise),
    named as the note says."""
    prefix = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{kind}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=inside))


def folders(inside: Path | None = None) -> Iterator[tuple[Path, str, int, bool]]:
    """Every such directory, in the order of its name: (path, kind, PID of its maker, whether
    the maker lives)."""
    for path in sorted((inside or Path(tempfile.gettempdir())).glob(f"{PREFIX}*-*-*")):
        pid, start, kind = path.name.removeprefix(PREFIX).split("-")[:3]
        if pid.isdecimal():
            yield path, kind, int(pid), start_time(pid) == start


class Made:
    """What exists inside its context. It is undone once: at the end of the context, by an error
    while it is made, else at the end of the interpreter. A forked child does not own it."""

    def __enter__(self) -> Self:
        undo, maker = self._begin(), os.getpid()
        self._undo = weakref.finalize(self, lambda: undo() if os.getpid() == maker else None)
        with undone_on_error(self._undo):
            self._make()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def _begin(self) -> Callable[[], None]:
        """Makes the directory or group by whose name it is found; what undoes it does not hold
        `self`."""
        raise NotImplementedError

    def _make(self) -> None:
        raise NotImplementedError


def lacking(*tools: str) -> str | None:
    """Why nothing can be emulated by this process with these tools, or None when it can."""
    if os.geteuid() != 0:
        return "not root"
    return next((f"{tool} is not installed" for tool in tools if shutil.which(tool) is None), None)


def insist(undo: Callable[[], object]) -> object:
    """A dying process keeps its group and its open files for a moment, and a member may fork
    while it is moved."""
    return retry(undo, (OSError, RoadtrainError), UNDO_TIMEOUT_S)


def command(*words: str, text: str | None = None) -> str:
    """Its output; `text` is its input. RoadtrainError has a failed command's words."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, input=text)
    if done.returncode:
        raise RoadtrainError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def start_time(pid: int | str) -> str:
    """Clock ticks after boot at which the process began (proc(5), stat, field 22); "" when
    there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
