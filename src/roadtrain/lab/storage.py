"""Storage of a lab: files as SSDs with set rates.

Assumes Linux, root, cgroup v1 blkio: `lab_available()` says what is missing. Rates hold for direct
I/O only, buffered writes escape blkio. Latency is NOT emulated. Everything made is undone when its
context ends, also by an error, else when the process ends; what a SIGKILL left is found by its name
and removed by `sweep()`. The directory of a LoopDevice holds `mount/` and `backing`, a file with
the path of the image.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from roadtrain.errors import ConfigError
from roadtrain.lab.made import Made, command, folder, insist, lacking
from roadtrain.units import show_bytes

# a discard frees the blocks
MKFS = ("-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0")


def lab_available() -> str | None:
    """Why storage cannot be emulated here, or None when it can."""
    if why := lacking("losetup", "mount", "umount", "mkfs.ext4"):
        return why
    if not Path("/dev/loop-control").exists():
        return "no loop devices: /dev/loop-control is missing"
    if (root := blkio_root()) is None or not (root / "blkio.throttle.read_bps_device").exists():
        return "no block throttling: no cgroup v1 blkio hierarchy with blkio.throttle is mounted"
    return None


class LoopDevice(Made):
    """A preallocated file of `nbytes` at `path` behind a loop device with direct I/O, formatted and
    mounted noatime.

    Inside the context `.mount` is the directory to write into and `.major_minor` names the device
    for a Throttle. The file must not exist before and must fit (ConfigError), and is removed with
    the rest. RoadtrainError has a failed command's words.
    """

    def __init__(self, path: str | Path, nbytes: int) -> None:
        self.path, self.nbytes = Path(path).absolute(), nbytes

    def _begin(self) -> Callable[[], None]:
        if self.path.exists():
            raise ConfigError(
                f"{self.path} exists", hint="name a file that does not: it is removed at the end"
            )
        self.home = folder("loop")
        return partial(undo_loop, self.home)

    def _make(self) -> None:
        self.mount = self.home / "mount"
        self.mount.mkdir()
        # before the file: sweep() needs no more than this
        (self.home / "backing").write_text(str(self.path))
        try:
            with self.path.open("xb") as image:
                os.posix_fallocate(image.fileno(), 0, self.nbytes)
        except OSError as cause:
            raise ConfigError(
                f"{self.path} of {show_bytes(self.nbytes)}: {cause.strerror}",
                hint="a smaller device, or a directory with more room",
            ) from cause
        device = command("losetup", "-f", "--show", "--direct-io=on", str(self.path)).strip()
        self.major_minor = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
        command("mkfs.ext4", *MKFS, device)
        command("mount", "-o", "noatime", device, str(self.mount))


class Throttle(Made):
    """A control group that holds its members, all together, to these rates on each of the devices
    (or "MAJ:MIN"s).

    On exit its members go to the group of the process that made it, and the group is removed.
    """

    def __init__(
        self, devices: Sequence[LoopDevice | str], read_bytes_per_s: float, write_bytes_per_s: float
    ) -> None:
        names = [device if isinstance(device, str) else device.major_minor for device in devices]
        rates = ("read", int(read_bytes_per_s)), ("write", int(write_bytes_per_s))
        self.limits = [(way, f"{name} {rate}") for name in names for way, rate in rates]

    def _begin(self) -> Callable[[], None]:
        root, back = blkio_root(), _blkio_group()
        assert root is not None and back is not None, "ask lab_available() first"
        self.group = folder("rate", root)
        return partial(undo_group, self.group, back)

    def _make(self) -> None:
        for way, limit in self.limits:
            (self.group / f"blkio.throttle.{way}_bps_device").write_text(limit)

    def enter_process(self, pid: int) -> None:
        """Moves the process with all its threads; threads and processes that it starts later
        follow it."""
        (self.group / "cgroup.procs").write_text(str(pid))


def undo_loop(home: Path) -> None:
    if os.path.ismount(home / "mount"):
        insist(lambda: command("umount", str(home / "mount")))
    backing = Path((home / "backing").read_text()) if (home / "backing").exists() else home / "none"
    if backing.exists():
        for line in command("losetup", "-j", str(backing)).splitlines():
            command("losetup", "-d", line.split(":")[0])
        backing.unlink()
    shutil.rmtree(home)


def undo_group(group: Path, back: Path) -> None:
    def empty_and_remove() -> None:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (back / "cgroup.procs").write_text(pid)
        group.rmdir()

    insist(empty_and_remove)


def blkio_root() -> Path | None:
    lines = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return next(
        (
            Path(at)
            for _, at, kind, how, *_ in lines
            if kind == "cgroup" and "blkio" in how.split(",")
        ),
        None,
    )


def _blkio_group() -> Path | None:
    root = blkio_root()
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(
        (root / at.lstrip("/") for _, kinds, at in lines if root and "blkio" in kinds.split(",")),
        None,
    )
