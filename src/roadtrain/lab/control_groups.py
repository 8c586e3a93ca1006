"""Control groups (cgroups) of a lab. Does NOT set limits (cpus.py, storage.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from roadtrain.lab.resource import LabResource, folder, retry_undo


class ControlGroup(LabResource):
    """A control group in the top level of a controller's hierarchy (cgroup version 1 or 2).

    At the end of the context the group is removed. Its processes then move to the control group of
    the process that created it.
    """

    controller: str
    """The kernel's name of the controller: `blkio` or `cpu`."""

    group: Path
    """The group's directory. It exists within the context."""

    def _begin(self) -> Callable[[], None]:
        root, back = hierarchy(self.controller), own_group(self.controller)
        assert root is not None and back is not None, "ask whether it is available first"
        self.group = folder(self.controller, root)
        return partial(undo_group, self.group, back)

    def enter_process(self, pid: int) -> None:
        """Move a process with all its threads into the group. Threads and children made later also
        belong to the group."""
        (self.group / "cgroup.procs").write_text(str(pid))


def hierarchy(controller: str) -> Path | None:
    """Return the root directory of the cgroup hierarchy that has `controller`, or None. Version 1
    is preferred to version 2."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for _, at, kind, how, *_ in mounts:
        if kind == "cgroup" and controller in how.split(","):
            return Path(at)
    for _, at, kind, *_ in mounts:
        if kind == "cgroup2" and controller in _words(Path(at) / "cgroup.controllers"):
            return Path(at)
    return None


def is_version_2(root: Path) -> bool:
    return (root / "cgroup.controllers").exists()


def undo_group(group: Path, back: Path) -> None:
    """Move all processes in the control group `group` to the control group `back`, and remove
    `group`."""

    def empty_and_remove() -> None:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (back / "cgroup.procs").write_text(pid)
        group.rmdir()

    retry_undo(empty_and_remove)


def own_group(controller: str) -> Path | None:
    """Return the directory of this process's group in the controller's hierarchy, or None."""
    if (root := hierarchy(controller)) is None:
        return None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, at = line.split(":", 2)
        if (kinds == "") if is_version_2(root) else (controller in kinds.split(",")):
            return root / at.lstrip("/")
    return None


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
