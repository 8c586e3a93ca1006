"""Emulate power cuts: track the durable content of directories, and restore this content after a
power cut.

After the process under test has called `Power.install`, every successful fsync and fdatasync copies
the content that has become durable to a shadow directory. After the process has been killed, the
test calls `cut`. The directories then hold everything that was synced. Of the data that was not
synced, they hold all, nothing, or any 512-byte sectors. After a failed sync, as in Linux, a later
sync saves only data that was written again.

Assumes small files, and that each process calls `install` once. If a file was synced but its
directory never was, a cut loses the file, as POSIX allows.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SECTOR = 512
PAUSE_S = 30.0  # limit for a paused process to wait for `go`

Action = Literal["kill before", "kill after", "kill half", "EIO", "pause"]
Real = Callable[..., Any]


@dataclass(frozen=True)
class Strike:
    """An action to take at one call of a process. The process's calls of kind `kind` on files whose
    path contains `where` are counted from 0. The action happens at the call with number `number`.
    """

    kind: Literal["sync", "write"]
    number: int
    action: Action
    where: str = ""


class Power:
    """Tracks the syncs and writes of one process. `roots`: directories that lose their power
    together. `counts`: maps each Strike to the number of calls that it has counted so far.
    """

    def __init__(self, shadow: Path, roots: Sequence[Path], strikes: Iterable[Strike] = ()) -> None:
        self.shadow, self.roots, self.strikes = (
            shadow,
            tuple(str(root) for root in roots),
            tuple(strikes),
        )
        self.counts = dict.fromkeys(self.strikes, 0)
        self.totals = {"sync": 0, "write": 0}
        self._lock = threading.RLock()
        self._real: dict[str, Real] = {
            name: getattr(os, name) for name in ("fsync", "fdatasync", "pwritev", "write")
        }

    def install(self) -> None:
        os.fsync = lambda fd: self.sync(fd, "fsync")  # type: ignore[assignment, arg-type]
        os.fdatasync = lambda fd: self.sync(fd, "fdatasync")  # type: ignore[assignment, arg-type]
        os.pwritev = self.pwritev  # type: ignore[assignment]
        os.write = self.write  # type: ignore[assignment]

    # replacements of the calls

    def sync(self, fd: int, name: str) -> None:
        path = _path_of(fd)
        if not self._ours(path):
            return self._real[name](fd)
        with self._lock:  # serialized: the copied bytes are those that were synced, or newer
            action = self._struck("sync", path)
            self._before(action)
            if action == "EIO":
                self._fail(fd)
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            self._real[name](fd)
            self.record(fd, path)
            self._after(action)
        return None

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        path = _path_of(fd)
        if not self._ours(path):
            return int(self._real["pwritev"](fd, buffers, offset, *flags))
        action = self._begin_write(path)
        if action == "kill half":
            half = memoryview(buffers[0])[: len(buffers[0]) // 2 // SECTOR * SECTOR]
            self._real["pwritev"](fd, [half], offset, *flags)
            _die()
        done = int(self._real["pwritev"](fd, buffers, offset, *flags))
        self._wrote(fd, offset, done)
        self._after(action)
        return done

    def write(self, fd: int, data: Any) -> int:
        path = _path_of(fd)
        if not self._ours(path):
            return int(self._real["write"](fd, data))
        action = self._begin_write(path)
        if action == "kill half":
            self._real["write"](fd, memoryview(data)[: len(data) // 2])
            _die()
        done = int(self._real["write"](fd, data))
        self._wrote(fd, os.lseek(fd, 0, os.SEEK_CUR) - done, done)
        self._after(action)
        return done

    def _begin_write(self, path: str) -> Action | None:
        with self._lock:
            action = self._struck("write", path)
        self._before(action)
        if action == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return action

    def _ours(self, path: str) -> bool:
        return path.startswith(self.roots) and not path.endswith(" (deleted)")

    def _struck(self, kind: str, path: str) -> Action | None:
        self.totals[kind] += 1
        action: Action | None = None
        for strike in self.strikes:
            if strike.kind == kind and strike.where in path:
                if self.counts[strike] == strike.number:
                    action = strike.action
                self.counts[strike] += 1
        return action

    def _before(self, action: Action | None) -> None:
        if action == "kill before":
            _die()
        if action == "pause":
            self.pause()

    def _after(self, action: Action | None) -> None:
        if action == "kill after":
            _die()

    def pause(self) -> None:
        """Create the file `paused` in the shadow directory, and wait for the file `go` in it, at
        most 30 seconds.
        """
        paused, go = self.shadow / "paused", self.shadow / "go"
        paused.touch()
        until = time.monotonic() + PAUSE_S
        while not go.exists() and time.monotonic() < until:
            time.sleep(0.005)

    # durable content

    def record(self, fd: int, path: str) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            names = {
                entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False))
                for entry in os.scandir(path)
            }
            self._keep(f"names-{status.st_ino}", json.dumps(names).encode())
        else:
            now = _content(fd)
            failed = self.shadow / f"failed-{status.st_ino}"
            if failed.exists():
                now = self.without_lost(status.st_ino, now, failed.read_bytes())
            self._keep(f"bytes-{status.st_ino}", now)

    def _keep(self, name: str, content: bytes) -> None:
        new = self.shadow / f"{name}.new"
        with open(new, "wb") as file:
            file.write(content)
        new.rename(self.shadow / name)

    def _fail(self, fd: int) -> None:
        """Record that a sync of file `fd` fails."""
        status = os.fstat(fd)
        if not stat.S_ISDIR(status.st_mode):
            self._keep(f"failed-{status.st_ino}", _content(fd))
            (self.shadow / f"again-{status.st_ino}").unlink(missing_ok=True)

    def _wrote(self, fd: int, offset: int, nbytes: int) -> None:
        """Record a write to file `fd`."""
        number = os.fstat(fd).st_ino
        if nbytes and (self.shadow / f"failed-{number}").exists():
            with self._lock, open(self.shadow / f"again-{number}", "a") as file:
                file.write(f"{offset} {offset + nbytes}\n")

    def without_lost(self, number: int, now: bytes, failed: bytes) -> bytes:
        """Return the content of a file that can become durable after a failed sync. A 512-byte
        sector that was neither saved nor written again keeps its durable content.

        Args:
            number: inode of the file
            now: present content of the file
            failed: content of the file when its sync failed
        """
        device, again = (_read(self.shadow / f"{what}-{number}") for what in ("bytes", "again"))
        written = [tuple(map(int, line.split())) for line in again.decode().splitlines()]
        out = bytearray(now)
        for at in range(0, len(now), SECTOR):
            end = at + SECTOR
            lost = failed[at:end] == now[at:end] != device[at:end]
            if lost and not any(begin < end and at < stop for begin, stop in written):
                out[at:end] = device[at:end].ljust(len(out[at:end]), b"\0")
        return bytes(out)


def begin(shadow: Path, roots: Sequence[Path]) -> None:
    """Record the present content of `roots` as durable."""
    shadow.mkdir(parents=True, exist_ok=True)
    power = Power(shadow, roots)
    for root in roots:
        for path in [root, *root.rglob("*")]:
            fd = os.open(path, os.O_RDONLY)
            try:
                power.record(fd, str(path))
            finally:
                os.close(fd)


def cut(shadow: Path, roots: Sequence[Path], rng: random.Random) -> str:
    """Emulate a power cut in `roots`, after all processes that use these directories have ended.
    Returns a text that says which unsynced bytes and names were kept.
    """
    bytes_left = rng.choice(("none", "any", "all"))
    names_left = rng.choice(("none", "all"))
    for root in roots:
        here = {path.stat().st_ino: path for path in root.rglob("*") if path.is_file()}
        tree = _tree(shadow, root, here, names_left == "all")
        after = {
            path: _mixed(shadow, number, here.get(number), bytes_left, rng)
            for path, number in tree.items()
        }
        directories = [path for path, number in tree.items() if number < 0]
        for path in root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in directories:
            path.mkdir(parents=True, exist_ok=True)
        for path, content in after.items():
            if path not in directories:
                path.write_bytes(content)
    shutil.rmtree(shadow)
    begin(shadow, roots)  # the device now has this content
    return f"unsynced bytes: {bytes_left}, unsynced names: {names_left}"


def _tree(shadow: Path, directory: Path, here: dict[int, Path], current: bool) -> dict[Path, int]:
    """Map every path that is left below `directory` after the power cut: a file to its inode, a
    directory to -1.
    """
    if current:
        return {p: -1 if p.is_dir() else p.stat().st_ino for p in directory.rglob("*")}
    return _durable(shadow, directory, directory.stat().st_ino)


def _durable(shadow: Path, directory: Path, number: int) -> dict[Path, int]:
    out: dict[Path, int] = {}
    for name, (inode, is_directory) in json.loads(
        _read(shadow / f"names-{number}") or b"{}"
    ).items():
        out[directory / name] = -1 if is_directory else inode
        if is_directory:
            out |= _durable(shadow, directory / name, inode)
    return out


def _mixed(shadow: Path, number: int, now: Path | None, left: str, rng: random.Random) -> bytes:
    durable = _read(shadow / f"bytes-{number}")
    current = durable if now is None else now.read_bytes()
    if (shadow / f"failed-{number}").exists() and now is not None:
        current = Power(shadow, ()).without_lost(
            number, current, _read(shadow / f"failed-{number}")
        )
    if left == "none" or durable == current:
        return durable
    if left == "all":
        return current
    size = rng.choice((len(durable), len(current)))
    pieces = []
    for at in range(0, size, SECTOR):
        piece = rng.choice((durable, current))[at : at + SECTOR]
        pieces.append(piece.ljust(min(SECTOR, size - at), b"\0"))
    return b"".join(pieces)[:size]


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _content(fd: int) -> bytes:
    with open(f"/proc/self/fd/{fd}", "rb") as file:  # buffered, whatever `fd` is
        return file.read()


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PAUSE_S)  # until the signal arrives
