"""A cluster emulated on one machine, storage first: files as SSDs with set rates, and a set interconnect.

Assumes Linux, root, cgroup v1 blkio: `lab_available()` says what is missing. Rates hold for direct I/O only, buffered
writes escape blkio. Latency is NOT emulated. Everything made is undone when its context ends, also by an error, else
when the process ends; what a SIGKILL left is found by its name and removed by `sweep()`.

Note: names of the lab. Directories and groups are called `roadtrain-lab-PID-START-...`, START being the kernel's start
time of PID, so that a later process with that PID is not taken for the maker. A directory holds `mount/` and
`backing`, a file with the path of the image: all that is needed to undo it from outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from roadtrain.errors import ConfigError, RoadtrainError

PREFIX = "roadtrain-lab-"
UNDO_TIMEOUT_S = 10.0
MKFS = ("-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0")  # a discard frees the blocks


def lab_available() -> str | None:
    """Why storage cannot be emulated here, or None when it can."""
    if os.geteuid() != 0:
        return "not root"
    for tool in ("losetup", "mount", "umount", "mkfs.ext4"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not Path("/dev/loop-control").exists():
        return "no loop devices: /dev/loop-control is missing"
    if (root := _blkio_root()) is None or not (root / "blkio.throttle.read_bps_device").exists():
        return "no block throttling: no cgroup v1 blkio hierarchy with blkio.throttle is mounted"
    return None


def _undone_later(owner: object, undo: Callable[[], None]) -> Callable[[], object]:
    """Runs `undo` once: when called, else at the end of the interpreter. A forked child does not own what is undone."""
    maker = os.getpid()
    return weakref.finalize(owner, lambda: undo() if os.getpid() == maker else None)


class LoopDevice:
    """A preallocated file of `nbytes` at `path` behind a loop device with direct I/O, formatted and mounted noatime.

    Inside the context `.mount` is the directory to write into and `.major_minor` names the device for a Throttle. The
    file must not exist before (ConfigError) and is removed with the rest. RoadtrainError has a failed command's words.
    """

    def __init__(self, path: str | Path, nbytes: int, fs: str = "ext4") -> None:
        self.path, self.nbytes, self.fs = Path(path).absolute(), nbytes, fs

    def __enter__(self) -> LoopDevice:
        if self.path.exists():
            raise ConfigError(f"{self.path} exists", hint="name a file that does not: it is removed at the end")
        home = _folder("loop")
        self._undo = _undone_later(self, lambda: _undo_loop(home))
        try:
            self.mount = home / "mount"
            self.mount.mkdir()
            (home / "backing").write_text(str(self.path))  # before the file: sweep() needs no more than this
            with self.path.open("xb") as image:
                os.posix_fallocate(image.fileno(), 0, self.nbytes)
            device = _command("losetup", "-f", "--show", "--direct-io=on", str(self.path)).strip()
            self.major_minor = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
            _command(f"mkfs.{self.fs}", *(MKFS if self.fs == "ext4" else ()), device)
            _command("mount", "-o", "noatime", device, str(self.mount))
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()


class Throttle:
    """A control group that holds its members, all together, to these rates on each of the devices (or "MAJ:MIN"s).

    On exit its members go to the group of the process that made it, and the group is removed.
    """

    def __init__(self, devices: Sequence[LoopDevice | str], read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        names = [device if isinstance(device, str) else device.major_minor for device in devices]
        rates = ("read", int(read_bytes_per_s)), ("write", int(write_bytes_per_s))
        self.limits = [(way, f"{name} {rate}") for name in names for way, rate in rates]

    def __enter__(self) -> Throttle:
        root, back = _blkio_root(), _blkio_group()
        assert root is not None and back is not None, "ask lab_available() first"
        group = self.group = _folder("rate", root)
        self._undo = _undone_later(self, lambda: _undo_group(group, back))
        try:
            for way, limit in self.limits:
                (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def enter_process(self, pid: int) -> None:
        """Moves the process with all its threads; threads and processes that it starts later follow it."""
        (self.group / "cgroup.procs").write_text(str(pid))


class TokenLink:
    """One direction of an emulated interconnect inside this process: `take(n)` returns when n bytes have crossed.

    Bytes cross in the order of the calls, at `bytes_per_s` while anyone waits; full duplex is two of these. `nbytes`
    counts what was asked for so far. Sleeping holds no lock and no GIL.

    Note: late wakers. A sleep ends 0.1 ms late, often more; at 4 GB/s, 1 MB takes 0.25 ms. So the last taker's
    lateness is given back: the next piece begins when the link came free, unless the caller idled beyond that lateness.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.nbytes = bytes_per_s, 0
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the last piece accepted so far will have crossed; never decreases
        self._late_s = 0.0  # how late the taker of that piece woke; 0 while it still sleeps

    def take(self, nbytes: int) -> None:
        with self._lock:
            begin = max(self._free_at, time.perf_counter() - self._late_s)
            done = self._free_at = begin + nbytes / self.bytes_per_s
            self.nbytes, self._late_s = self.nbytes + nbytes, 0.0
        while (left := done - time.perf_counter()) > 0:
            time.sleep(left)
        with self._lock:
            if self._free_at == done:
                self._late_s = time.perf_counter() - done


def sweep() -> list[str]:
    """Removes what lab processes that no longer live have left; returns what it removed, for printing."""
    root = _blkio_root()
    homes, groups = list(_orphans(Path(tempfile.gettempdir()))), list(_orphans(root)) if root else []
    for home in homes:
        _undo_loop(home)
    for group in groups:
        _undo_group(group, group.parent)
    return [str(path) for path in homes + groups]


def _orphans(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.glob(f"{PREFIX}*-*-*")):
        pid, start = path.name.removeprefix(PREFIX).split("-")[:2]
        if _start_time(pid) != start:
            yield path


def _undo_loop(home: Path) -> None:
    if os.path.ismount(home / "mount"):
        _insist(lambda: _command("umount", str(home / "mount")))
    backing = Path((home / "backing").read_text()) if (home / "backing").exists() else home / "none"
    if backing.exists():
        for line in _command("losetup", "-j", str(backing)).splitlines():
            _command("losetup", "-d", line.split(":")[0])
        backing.unlink()
    shutil.rmtree(home)


def _undo_group(group: Path, back: Path) -> None:
    def empty_and_remove() -> None:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (back / "cgroup.procs").write_text(pid)
        group.rmdir()

    _insist(empty_and_remove)


def _insist(undo: Callable[[], object]) -> object:
    """A dying process keeps its group and its open files for a moment, and a member may fork while it is moved."""
    deadline = time.monotonic() + UNDO_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, RoadtrainError):
            return undo()
        time.sleep(0.05)
    return undo()


def _command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RoadtrainError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _folder(kind: str, inside: Path | None = None) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{_start_time(os.getpid())}-{kind}-", dir=inside))


def _start_time(pid: int | str) -> str:
    """Clock ticks after boot at which the process began (proc(5), stat, field 22); "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _blkio_root() -> Path | None:
    lines = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return next((Path(at) for _, at, kind, how, *_ in lines if kind == "cgroup" and "blkio" in how.split(",")), None)


def _blkio_group() -> Path | None:
    root = _blkio_root()
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next((root / at.lstrip("/") for _, kinds, at in lines if root and "blkio" in kinds.split(",")), None)
