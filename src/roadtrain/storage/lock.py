"""Locks on directories: one process at a time opens, fills, converts or cleans a directory.

A lock ends when its process ends; forked children do not keep it. On file systems that cannot lock
directories (NFS), the lock is on a file named `lock`. Locking waits at most 5 s.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

from roadtrain.errors import StoreError
from roadtrain.retry import retry, undone_on_error
from roadtrain.storage.direct import typed_errors

LOCK_WAIT_S = 5.0  # subprocesses of a killed process may hold the lock briefly


class Locks:
    """A set of locked directories. A directory that has several paths is locked once."""

    def __init__(self, directories: Iterable[Path] = ()) -> None:
        self._held: dict[tuple[int, int], int] = {}  # (device, inode) of a directory -> descriptor
        _ALL.add(self)
        with undone_on_error(self.close):
            self.take(directories)

    def take(self, directories: Iterable[Path]) -> None:
        """Lock more directories. Directories that do not exist are skipped. Raises StoreError if
        another process has locked one of the directories."""
        for directory in directories:
            if not directory.is_dir():
                continue
            with typed_errors(directory, "locking"):
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                about = os.fstat(fd)
                if (about.st_dev, about.st_ino) in self._held:
                    os.close(fd)
                    continue
                self._held[about.st_dev, about.st_ino] = _locked(fd, directory)

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()


_ALL: weakref.WeakSet[Locks] = weakref.WeakSet()  # all locks of this process


def _close_in_child() -> None:
    """Close the locks in a forked child, which would otherwise keep the directories locked."""
    for locks in list(_ALL):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)


def _locked(fd: int, directory: Path) -> int:
    """Lock a directory and return the descriptor that holds the lock. If this is not `fd`, then
    `fd` is closed."""
    try:
        lock(fd, directory)
        return fd
    except BaseException as error:
        os.close(fd)
        if not isinstance(error, OSError):
            raise
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with undone_on_error(lambda: os.close(fd)):
        lock(fd, directory)
    return fd


def lock(fd: int, directory: Path) -> None:
    """Lock the file or directory of a descriptor. `directory` is named in the error.

    Raises:
        StoreError: Another process, or this process, has locked the file.
        OSError: The file system does not support locks on this file.
    """
    try:
        retry(lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB), BlockingIOError, LOCK_WAIT_S)
    except BlockingIOError:
        holder = holder_of(fd)
        if holder == os.getpid():
            who, hint = "this process", "close it first, for example with optimizer.close()"
        else:
            who = f"another process{f', {holder}' if holder else ''}"
            hint = "end the other run of this job first"
        raise StoreError(
            f"{directory}: in use by {who} (waited {LOCK_WAIT_S:.0f} s)", hint=hint
        ) from None


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock on a file or directory. False if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so probes do not conflict
    except OSError as error:  # other errors: its file system cannot lock it
        return isinstance(error, BlockingIOError)
    finally:
        os.close(fd)
    return False


def holder_of(file: int | Path) -> int:
    """Return the id of the process that has locked a file, or 0 if it is unknown. `file`: its path
    or a descriptor."""
    # only the inode is compared: in containers, the device can differ from that in /proc/locks
    held = f":{os.stat(file).st_ino}"
    try:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return 0
    pids = {int(x[4]) for x in lines if x[1] == "FLOCK" and x[5].endswith(held)}
    return max(0, pids.pop()) if len(pids) == 1 else 0
