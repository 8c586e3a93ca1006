"""LabResource: a part of a lab (such as a network or a device), which is removed exactly once. The
part's name identifies the process that made the part.

Note "names". The name of a directory or group is `roadtrain-lab-PID-START-KIND-...`. KIND is the
kind of the part, such as `net` or `loop`. START is the time at which the kernel started the process
PID, so that a later process with the same PID is not mistaken for the maker. If the maker of a
resource is dead, any process can remove the resource with the information in its directory.
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
    """Make a directory whose name identifies this process: see Note "names". The directory is made
    in `inside`, or in the temporary directory if `inside` is None. `kind`: the kind of the part of
    the lab, such as `net`."""
    prefix = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{kind}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=inside))


def folders(inside: Path | None = None) -> Iterator[tuple[Path, str, int, bool]]:
    """Yield (path, kind, PID of the maker, True if the maker is alive) for each directory that
    `folder` has made in `inside`, sorted by name. A maker is the process that called `folder`."""
    for path in sorted((inside or Path(tempfile.gettempdir())).glob(f"{PREFIX}*-*-*")):
        pid, start, kind = path.name.removeprefix(PREFIX).split("-")[:3]
        if pid.isdecimal():
            yield path, kind, int(pid), start_time(pid) == start


class LabResource:
    """A resource that exists within its context.

    The resource is removed once: when the context ends, after an error while the resource is made,
    or when the interpreter ends. A forked child does not own the resource and does not remove it.
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
        """Make the directory or control group by which the resource can be found. Returns a
        function that removes the resource. The function must not refer to `self`, because the
        resource could otherwise not be garbage-collected."""
        raise NotImplementedError

    def _make(self) -> None:
        raise NotImplementedError


def why_not(*tools: str) -> str | None:
    """Return the reason why this process cannot emulate anything with `tools` (the process is not
    root, or a tool is not installed). Return None if there is no such reason. `tools`: names of
    programs."""
    if os.geteuid() != 0:
        return "not root"
    return next((f"{tool} is not installed" for tool in tools if shutil.which(tool) is None), None)


def retry_undo(undo: Callable[[], object]) -> object:
    """Call `undo` until `undo` succeeds. The first calls may fail, because a dying process keeps
    its group and open files for a moment, and because a process may fork while it is moved."""
    return retry(undo, (OSError, RoadtrainError), UNDO_TIMEOUT_S)


def command(*words: str, text: str | None = None) -> str:
    """Run a command with input `text`, and return its output. Raises RoadtrainError if the command
    fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, input=text)
    if done.returncode:
        raise RoadtrainError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def start_time(pid: int | str) -> str:
    """Return the time at which a process began, in clock ticks after boot (proc(5), stat, field
    22), or "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
