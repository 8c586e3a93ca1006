"""DirectFile: a file that threads read and write in whole pages with direct I/O (O_DIRECT).

Without support for direct I/O, the page cache is used, and `note` contains a warning to print. All
errors name the file and the operation. storage/file.py handles chunks, slots and checksums.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from roadtrain.chunks import PAGE
from roadtrain.device.buffers import Buffer
from roadtrain.errors import ConfigError, DamagedError, FullError, GoneError, StoreError
from roadtrain.units import show_bytes

PIECE = 1 << 30  # bytes allocated by one call
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ABSENT = (errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTDIR)
_Call = Callable[[int, list[memoryview], int], int]


@contextmanager
def typed_errors(path: Path, doing: str, nbytes: int = 0) -> Iterator[None]:
    """Context manager that raises FullError, GoneError or StoreError in place of an OSError.

    Args:
        path: The file, named in the message.
        doing: The operation, named in the message, such as "reading".
        nbytes: Number of bytes that the operation writes; 0 for few or no bytes.
    """
    try:
        yield
    except OSError as error:
        raise _typed(error, path, doing, nbytes) from error


def _typed(error: OSError, path: Path, doing: str, nbytes: int = 0) -> StoreError:
    if error.errno in _FULL:
        return _full(error, path, doing, nbytes)
    if error.errno in _ABSENT:
        missing = next((p for p in (*reversed(path.parents), path) if not p.exists()), None)
        return GoneError(
            f"{path}: {doing} failed ({error.strerror})"
            + (f": {missing} does not exist" if missing else ": its device does not answer"),
            hint=f"mount the disk of {missing or path}, or restore it",
        )
    return StoreError(f"{path}: {doing}: {error.strerror or error}")


def _full(error: OSError, path: Path, doing: str, nbytes: int) -> FullError:
    """Return the error for a full disk, an exhausted quota, a file size limit or missing inodes.
    `nbytes` is the number of bytes to write; 0 stands for at most one block of the file system."""
    disk = os.statvfs(existing(path.parent))
    needs = show_bytes(nbytes) if nbytes else f"at most {show_bytes(disk.f_frsize)}"
    why, hint = "", "free space there, or name another directory"
    if error.errno == errno.EDQUOT:
        why, hint = ", but your quota is exhausted", "free space, or ask for a larger quota"
    elif error.errno == errno.EFBIG:
        why, hint = ", but a file cannot be that large", "raise `ulimit -f`, or use another disk"
    elif disk.f_files and not disk.f_favail:
        why, hint = f", but 0 of {disk.f_files} inodes", "remove files there, or use another disk"
    free = show_bytes(free_nbytes(path.parent))
    return FullError(f"{path}: {doing} needs {needs}, but {free} are free{why}", hint=hint)


def read_or_none(path: Path) -> bytes | None:
    """Read a file. Returns None if it does not exist."""
    with typed_errors(path, "reading"):
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


def write_file(path: Path, pieces: Iterable[bytes | memoryview], doing: str) -> None:
    """Write a new file durably with the bytes of all `pieces`. Call `sync_directory` to make the
    file's name durable, too. `doing` names the operation in error messages."""
    nbytes = 0
    try:
        with open(path, "wb") as file:
            for piece in pieces:
                nbytes += len(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _typed(error, path, doing, nbytes) from error


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data` to a file descriptor. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def replace_file(path: Path, content: bytes, doing: str) -> None:
    """Replace the content of `path` atomically and durably: after a crash the file has the old or
    the new content. `doing` names the operation in error messages."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        write_file(temporary, [content], doing)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()  # an incomplete file is useless and may fill the disk
        raise
    with typed_errors(path, doing):
        temporary.replace(path)
    sync_directory(path.parent)


def existing(directory: Path) -> Path:
    """Return `directory`, or its nearest parent that exists."""
    return next((p for p in (directory, *directory.absolute().parents) if p.is_dir()), Path("/"))


def beside(directory: Path, prefix: str) -> TemporaryDirectory[str]:
    """Make a temporary directory on the disk of `directory`, which need not exist yet."""
    home = directory.absolute()
    return TemporaryDirectory(prefix=prefix, dir=existing(home if home.is_mount() else home.parent))


def free_nbytes(directory: Path) -> int:
    try:
        free = os.statvfs(existing(directory))
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize


def mount_of(path: Path) -> tuple[str, str, str]:
    """Return the source, the mount point and the type of the file system that contains `path`."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [mount for mount in reversed(mounts) if path.absolute().is_relative_to(mount[1])]
    source, at, kind, *_ = max(above, key=lambda mount: len(mount[1]))  # the last, if mounted over
    return source, at, kind


def in_ram(path: Path) -> bool:
    """Whether `path` lies on a RAM disk."""
    return mount_of(path)[2] in ("tmpfs", "ramfs")


def sync_directory(directory: Path) -> None:
    """Make the names of the files in `directory` durable."""
    with typed_errors(directory, "fsync"):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def check_directory(directory: Path) -> None:
    """Check that files can be created in `directory`, which need not exist yet. Changes nothing.
    Raises ConfigError."""
    path = directory.absolute()
    there = next(path for path in (path, *path.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(
            f"{directory} cannot be a directory: {there} is {_kind(there)}",
            hint="name a directory, or a path that does not exist yet",
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{directory}: this user may not write to {there}", hint="name another directory"
        )


def check_file(path: Path) -> None:
    """Check that a file can be written and that its directory exists. Changes nothing. Raises
    ConfigError."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, not a file", hint="name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written: {path.parent} is not a directory", hint="create it first"
        )
    check_directory(path.parent)


def _kind(path: Path) -> str:
    return "a broken link" if not path.exists() else "a file" if path.is_file() else "not a folder"


def make_directory(directory: Path) -> None:
    """Create a directory durably, with its parents.

    Raises:
        ConfigError: A file is in the way, or writing is not permitted.
        StoreError: Creating failed for another reason.
    """
    check_directory(directory)
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    with typed_errors(directory, "making the directory"):
        directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


class DirectFile:
    """An open file. If `create` is not None, a new file of `create` bytes is allocated."""

    def __init__(self, path: Path, *, direct: bool = True, create: int | None = None) -> None:
        self.path, self.note = path, ""
        self._lock = threading.Lock()
        self._direct = direct
        self._unsynced = 0  # bytes written since the last sync
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create is not None else 0)
        self.fd = -1
        try:
            # O_DIRECT is set later: an `open` that refuses it would leave the created file behind,
            # and a second attempt would fail
            self.fd = os.open(path, flags, 0o600)
            if create:
                for start in range(0, create, PIECE):  # so that the file's size shows the progress
                    os.posix_fallocate(self.fd, start, min(PIECE, create - start))
                os.fsync(self.fd)  # makes the size durable
            if self._direct:
                self._set_direct(True)
        except OSError as error:
            if error.errno == errno.EINVAL and self.fd >= 0:
                self._go_buffered()
                return
            self.close()
            doing = "opening" if create is None else "allocating"
            raise _typed(error, path, doing, create or 0) from error
        if not self._direct:
            self.note = f"{path.parent}: buffered I/O, because direct I/O was not requested"

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def disk_nbytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def read(self, into: memoryview, offset: int, what: str) -> None:
        view = self._on_page(into)
        self._transfer(os.preadv, view, offset, f"reading {what}")
        if view is not into:
            into[:] = view
        if not self._direct:
            os.posix_fadvise(self.fd, offset, len(into), os.POSIX_FADV_DONTNEED)

    def write(self, data: memoryview, offset: int, what: str) -> None:
        view = self._on_page(data)
        if view is not data:
            view[:] = data
        with self._lock:
            self._unsynced += len(data)
        self._transfer(os.pwritev, view, offset, f"writing {what}")

    def sync(self, when: str) -> None:
        """Make all finished writes durable. `when` is text for error messages, such as "at step
        3"."""
        with self._lock:
            nbytes = self._unsynced
        with typed_errors(self.path, f"fdatasync {when}", nbytes):
            os.fdatasync(self.fd)
            with self._lock:
                self._unsynced -= nbytes
            if not self._direct:
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def check_linked(self, when: str) -> None:
        if os.fstat(self.fd).st_nlink == 0:
            raise GoneError(f"{self.path}: removed while in use, {when}")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _on_page(self, view: memoryview) -> memoryview:
        """Return `view` if direct I/O can use it, otherwise an aligned buffer of the same size."""
        if not self._direct or not view or np.frombuffer(view, np.uint8, 1).ctypes.data % PAGE == 0:
            return view
        return Buffer(len(view)).view[: len(view)]

    def _transfer(self, call: _Call, view: memoryview, offset: int, doing: str) -> None:
        done = 0
        while done < len(view):
            direct = self._direct
            try:
                n = call(self.fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._go_buffered()
                    continue
                raise _typed(error, self.path, doing, len(view)) from error
            if direct and done + n < len(view):
                n -= n % PAGE  # so that a short transfer is continued at a page boundary
            if n == 0:
                raise DamagedError(
                    f"{self.path}: truncated: {doing} needs bytes {offset} to"
                    f" {offset + len(view)}, but the file has {self.nbytes} bytes"
                )
            done += n

    def _go_buffered(self) -> None:
        with self._lock:
            self._set_direct(False)
            self.note = (
                f"{self.path.parent}: no direct I/O on this file system, so buffered I/O is used"
            )

    def _set_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        self._direct = direct
