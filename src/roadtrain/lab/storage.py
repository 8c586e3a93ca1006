"""Storage of a lab: files that emulate SSDs with set rates.

Requires Linux, root and cgroup v1 blkio; `lab_available()` reports what is missing. Rates apply to
direct I/O only, because buffered writes bypass blkio. Latency is not emulated. A device's directory
has the mounted `mount/`, and a file with the image's path: `kept` if the image outlives the device,
otherwise `backing`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from roadtrain.errors import ConfigError
from roadtrain.lab.control_groups import ControlGroup, hierarchy
from roadtrain.lab.resource import LabResource, command, folder, retry_undo, why_not
from roadtrain.units import show_bytes

FEW_FILES = ("-i", "262144")  # bytes per inode; many, so that a large device has small inode tables
# options of mkfs.ext4; `nodiscard` keeps it from freeing the blocks of the file
MKFS = ("-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0")


def lab_available() -> str | None:
    """Return the reason why storage cannot be emulated on this machine, or None."""
    if why := why_not("losetup", "mount", "umount", "mkfs.ext4"):
        return why
    if not Path("/dev/loop-control").exists():
        return "no loop devices: /dev/loop-control is missing"
    if (root := hierarchy("blkio")) is None or not (
        root / "blkio.throttle.read_bps_device"
    ).exists():
        return "no block throttling: no cgroup v1 blkio hierarchy with blkio.throttle is mounted"
    return None


class LoopDevice(LabResource):
    """A mounted loop device with direct I/O, whose storage is a preallocated file of `nbytes` at
    `path`.

    Within the context, `mount` is the directory of the mounted device, and `major_minor` identifies
    the device for a Throttle. The file is removed when the context ends. With `keep`, the file
    stays, an existing file is used again, and space is allocated only as needed. Raises ConfigError
    if the file already exists (without `keep`) or has no room, and RoadtrainError if a command
    fails.
    """

    def __init__(self, path: str | Path, nbytes: int, *, keep: bool = False) -> None:
        self.path, self.nbytes, self.keep = Path(path).absolute(), nbytes, keep

    def _begin(self) -> Callable[[], None]:
        if self.path.exists() and not self.keep:
            raise ConfigError(
                f"{self.path} already exists", hint="use a new path: the lab deletes it at the end"
            )
        self.home = folder("loop")
        return partial(undo_loop, self.home)

    def _make(self) -> None:
        self.mount = self.home / "mount"
        self.mount.mkdir()
        # this file is written before the image is made, so that sweep() can remove the image
        (self.home / ("kept" if self.keep else "backing")).write_text(str(self.path))
        try:
            if not self.keep:
                with self.path.open("xb") as image:
                    os.posix_fallocate(image.fileno(), 0, self.nbytes)
            elif not self.path.exists():
                self._make_kept(self.path.with_name(f"{self.path.name}.new"))
        except OSError as cause:
            raise ConfigError(
                f"cannot make {self.path} of {show_bytes(self.nbytes)}: {cause.strerror}",
                hint="choose a smaller device, or a directory with more room",
            ) from cause
        device = command("losetup", "-f", "--show", "--direct-io=on", str(self.path)).strip()
        self.major_minor = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
        if not self.keep:
            command("mkfs.ext4", *MKFS, device)
        command("mount", "-o", "noatime", device, str(self.mount))

    def _make_kept(self, new: Path) -> None:
        """Make the image under the name `new`, then rename it, so that a kill leaves no incomplete
        image."""
        with new.open("wb") as image:
            image.truncate(self.nbytes)
        command("mkfs.ext4", *MKFS, *FEW_FILES, str(new))
        new.rename(self.path)


class Throttle(ControlGroup):
    """A control group that limits the rates at which its members together read and write each of
    `devices`, which are LoopDevices or "MAJ:MIN" numbers."""

    controller = "blkio"

    def __init__(
        self, devices: Sequence[LoopDevice | str], read_bytes_per_s: float, write_bytes_per_s: float
    ) -> None:
        names = [device if isinstance(device, str) else device.major_minor for device in devices]
        rates = ("read", int(read_bytes_per_s)), ("write", int(write_bytes_per_s))
        self.limits = [(way, f"{name} {rate}") for name in names for way, rate in rates]

    def _make(self) -> None:
        for way, limit in self.limits:
            (self.group / f"blkio.throttle.{way}_bps_device").write_text(limit)


def undo_loop(home: Path) -> None:
    if os.path.ismount(home / "mount"):
        retry_undo(lambda: command("umount", str(home / "mount")))
    if (home / "mount").exists():
        (home / "mount").rmdir()  # also unmounts the device for processes on hosts of other labs
    for name in ("backing", "kept"):
        image = Path((home / name).read_text()) if (home / name).exists() else home / "none"
        if image.exists():
            for line in command("losetup", "-j", str(image)).splitlines():
                command("losetup", "-d", line.split(":")[0])
            if name == "backing":
                image.unlink()
    shutil.rmtree(home)
