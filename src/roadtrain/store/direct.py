"""DirectFile: one file that threads read and write in whole pages, past the page cache where the file system lets us.

Where O_DIRECT is refused the file is used buffered, pages are dropped after use, and `note` says so: the caller prints
it once. Views that are not page-aligned go through a private copy. Errors of the system become typed errors that name
the file and what was done. Does NOT know chunks, slots or checksums.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from roadtrain.errors import DamagedError, FullError, GoneError, StoreError
from roadtrain.spec.chunks import PAGE
from roadtrain.store.buffers import Buffer
from roadtrain.units import show_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTDIR)
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_Call = Callable[[int, list[memoryview], int], int]


def store_error(error: OSError, path: Path, doing: str, nbytes: int = 0) -> StoreError:
    """The typed error for `error` that `doing` with `nbytes` of `path` met."""
    if error.errno in _FULL:
        return FullError(
            f"{path}: {doing} needs {show_bytes(nbytes)}, {show_bytes(free_nbytes(path.parent))} are free",
            hint="free space there, or name another directory",
        )
    if error.errno in _GONE:
        return GoneError(f"{path}: gone ({doing}: {error.strerror})", hint="is its disk still mounted?")
    return StoreError(f"{path}: {doing}: {error.strerror or error}")


def free_nbytes(directory: Path) -> int:
    try:
        free = os.statvfs(directory)
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize


def in_ram(path: Path) -> bool:
    """Whether it lies on a RAM disk (where Linux says so)."""
    table = Path("/proc/self/mounts")
    mounts = [line.split()[1:3] for line in table.read_text().splitlines()] if table.exists() else []
    kinds = [(len(at), kind) for at, kind in mounts if path.absolute().is_relative_to(at)]
    return max(kinds, default=(0, ""))[1] in ("tmpfs", "ramfs")


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise store_error(error, directory, "fsync") from error


class DirectFile:
    """Opens `path`; where `create` is given, makes it with that many bytes allocated."""

    def __init__(self, path: Path, *, direct: bool = True, create: int | None = None) -> None:
        self.path, self.note = path, ""
        self._lock = threading.Lock()
        self._direct = direct and _O_DIRECT != 0
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create is not None else 0)
        self._fd = -1
        try:
            # created without O_DIRECT: a refused open would leave the file behind and fail the second time
            self._fd = os.open(path, flags, 0o600)
            if create:
                os.posix_fallocate(self._fd, 0, create)
            if self._direct:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | _O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL and self._fd >= 0:
                self._go_buffered()
                return
            self.close()
            raise store_error(error, path, "allocating" if create is not None else "opening", create or 0) from error
        if not self._direct:
            self.note = f"{path.parent}: buffered I/O, direct I/O was not asked for"

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, into: memoryview, offset: int, what: str) -> None:
        if self._direct and not _aligned(into):
            bounce = Buffer(len(into))
            self._all(os.preadv, bounce.view[: len(into)], offset, f"reading {what}")
            into[:] = bounce.view[: len(into)]
            bounce.close()
            return
        self._all(os.preadv, into, offset, f"reading {what}")
        if not self._direct:
            os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_DONTNEED)

    def write(self, data: memoryview, offset: int, what: str) -> None:
        if self._direct and not _aligned(data):
            bounce = Buffer(len(data))
            bounce.view[: len(data)] = data
            self._all(os.pwritev, bounce.view[: len(data)], offset, f"writing {what}")
            bounce.close()
            return
        self._all(os.pwritev, data, offset, f"writing {what}")

    def sync(self) -> None:
        """All writes that returned are durable. GoneError also where the file was removed under us."""
        try:
            os.fdatasync(self._fd)
            if not self._direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise store_error(error, self.path, "fdatasync") from error

    def check_linked(self) -> None:
        if os.fstat(self._fd).st_nlink == 0:
            raise GoneError(f"{self.path}: removed while in use")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _all(self, call: _Call, view: memoryview, offset: int, doing: str) -> None:
        done = 0
        while done < len(view):
            direct = self._direct
            try:
                n = call(self._fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._go_buffered()
                    continue
                raise store_error(error, self.path, doing, len(view)) from error
            if direct and done + n < len(view):
                n -= n % PAGE  # a short transfer goes on at a page
            if n == 0:
                raise DamagedError(
                    f"{self.path}: truncated: {doing} wants bytes {offset} to {offset + len(view)}, "
                    f"the file has {self.nbytes}"
                )
            done += n

    def _go_buffered(self) -> None:
        with self._lock:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_O_DIRECT)
            self._direct = False
            self.note = f"{self.path.parent}: the file system refuses direct I/O, buffered I/O is used"


def _aligned(view: memoryview) -> bool:
    return not view or np.frombuffer(view, np.uint8, 1).ctypes.data % PAGE == 0
