"""LabResource: something that a lab has made, whose name identifies its maker, and which is undone
exactly once.

Note "names". Directories and groups are called `roadtrain-lab-PID-START-KIND-...`. START is the
kernel's start time of PID, so that a later process with the same PID is not mistaken for the maker.
The content of the directory suffices to undo from outside what it stands for.
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
    """Make a directory of this process, named as described above, by default in the temporary
    directory."""
    prefix = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{kind}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=inside))


def folders(inside: Path | None = None) -> Iterator[tuple[Path, str, int, bool]]:
    """Yield every such directory, sorted by name: (path, kind, PID of its maker, whether the maker
    is alive)."""
    for path in sorted((inside or Path(tempfile.gettempdir())).glob(f"{PREFIX}*-*-*")):
        pid, start, kind = path.name.removeprefix(PREFIX).split("-")[:3]
        if pid.isdecimal():
            yield path, kind, int(pid), start_time(pid) == start


class LabResource:
    """A resource that exists within its context.

    It is undone once: when the context ends, after an error while it is made, or else when the
    interpreter ends. A forked child does not own it.
    """

    def __enter__(self) -> Self:
        undo, maker = self._begin(), os.getpid()
        self._undo = weakref.finalize(self, lambda: undo() if os.getpid() == maker else None)
        with undone_on_error(self._undo):
            self._make()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def _begin(self) -> Callable[[], None]:
        """Make the directory or group by which it can be found. Returns a function that undoes it
        and does not hold `self`."""
        raise NotImplementedError

    def _make(self) -> None:
        raise NotImplementedError


def why_not(*tools: str) -> str | None:
    """Return why this process cannot emulate anything with these tools, or None if it can."""
    if os.geteuid() != 0:
        return "not root"
    return next((f"{tool} is not installed" for tool in tools if shutil.which(tool) is None), None)


def retry_undo(undo: Callable[[], object]) -> object:
    """Retry `undo`: a dying process keeps its group and open files for a moment, and a process may
    fork while it is moved."""
    return retry(undo, (OSError, RoadtrainError), UNDO_TIMEOUT_S)


def command(*words: str, text: str | None = None) -> str:
    """Run a command with input `text`, and return its output. Raises RoadtrainError."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, input=text)
    if done.returncode:
        raise RoadtrainError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def start_time(pid: int | str) -> str:
    """Return the clock ticks after boot at which a process began (proc(5), stat, field 22); "" for
    no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
