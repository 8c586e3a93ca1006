"""LabResource: a network, loop device or control group of a lab, which is removed exactly once.

Note "names". The name of a directory or control group is `roadtrain-lab-PID-START-KIND-...`. KIND
is the kind of resource, such as `net` or `loop`. PID is the process that made the resource, and
START the time at which it started, since a later process may get the same PID. If this process is
dead, any process can remove the resource.
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
    """Make a directory whose name identifies this process (see Note "names").

    `kind`: the kind of resource, such as `net`. `inside`: the parent directory (default: the
    temporary directory).
    """
    prefix = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{kind}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=inside))


def folders(inside: Path | None = None) -> Iterator[tuple[Path, str, int, bool]]:
    """Yield (path, kind, PID of the maker, True if the maker is alive) for each directory that
    `folder` has made in `inside`, sorted by name."""
    for path in sorted((inside or Path(tempfile.gettempdir())).glob(f"{PREFIX}*-*-*")):
        pid, start, kind = path.name.removeprefix(PREFIX).split("-")[:3]
        if pid.isdecimal():
            yield path, kind, int(pid), start_time(pid) == start


class LabResource:
    """A resource that exists within its context.

    The resource is removed once: when the context ends, after an error in making it, or when the
    interpreter ends. A forked child does not remove it.
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
        """Make the directory or control group by which the resource can be found. Return a function
        that removes the resource and does not refer to `self`, since `self` could otherwise not be
        garbage-collected."""
        raise NotImplementedError

    def _make(self) -> None:
        raise NotImplementedError


def why_not(*tools: str) -> str | None:
    """Return the reason why this process cannot run these tools as root, or None."""
    if os.geteuid() != 0:
        return "not root"
    return next((f"{tool} is not installed" for tool in tools if shutil.which(tool) is None), None)


def retry_undo(undo: Callable[[], object]) -> object:
    """Call `undo` until it succeeds, for up to 10 s. The first calls may fail, because a dying
    process keeps its control group and open files for a moment."""
    return retry(undo, (OSError, RoadtrainError), UNDO_TIMEOUT_S)


def command(*words: str, text: str | None = None) -> str:
    """Run a command with input `text`, and return its output. Raises RoadtrainError if the command
    fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, input=text)
    if done.returncode:
        raise RoadtrainError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def start_time(pid: int | str) -> str:
    """Return the time at which a process began, in clock ticks after boot, or "" if there is no
    such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
