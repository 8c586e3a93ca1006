"""report_host(): report the hardware, stores, ports and files of a host before a run starts on it.

`python -m roadtrain.launch.host_report` reads a HostQuery as JSON from stdin and writes a
HostReport as JSON to stdout. It changes nothing, although it tests locks and writes temporary
files. Does not import torch, so that the command ends within a second. Does NOT judge the results
(checks.py).
"""

from __future__ import annotations

import errno
import glob
import importlib.metadata
import os
import platform
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from roadtrain.errors import StoreError
from roadtrain.storage.current import current
from roadtrain.storage.direct import free_nbytes, mount_of
from roadtrain.storage.lock import is_locked
from roadtrain.storage.mark import MarkRecord
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.sealed import unsealed

PACKAGES = ("roadtrain", "torch")
NETWORK_FILES = ("nfs", "nfs4", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "cifs", "9p")


class PortQuery(msgspec.Struct, frozen=True):
    """A port to test. `datagrams`: True for UDP, False for TCP."""

    address: str
    port: int
    datagrams: bool = False


class HostQuery(msgspec.Struct, frozen=True):
    """A request for a report on a host, with the paths and ports to examine. Paths are absolute."""

    directory: str  # the run's directory
    stores: tuple[str, ...] = ()  # directories in which this host's processes will open stores
    ports: tuple[PortQuery, ...] = ()
    globs: tuple[str, ...] = ()  # patterns for text files
    files: tuple[str, ...] = ()  # files that must exist


class PathReport(msgspec.Struct, frozen=True):
    """A report on a directory that the run will use. The directory need not exist yet."""

    path: str
    exists: str  # the deepest directory on the path that exists
    device: int  # st_dev of `exists`
    inode: int  # st_ino of `exists`
    rest: str  # the part of the path below `exists`
    above: tuple[tuple[int, int], ...]  # (st_dev, st_ino) of `exists` and all its parents
    free: int  # bytes
    files: str  # type, source and mount point of a network file system; "" for a local one
    refused: str = ""  # why the directory is not writable; "" if it is


class StoreReport(msgspec.Struct, frozen=True):
    """A report on a directory for a store, and on the store if there is one."""

    at: PathReport
    locked: bool = False  # True if another process has the store open
    job: str = ""  # uuid of the job that the store belongs to; "" if there is no store
    step: int = -1
    elements: int = 0  # number of parameter elements in the store
    damage: str = ""  # why the store cannot be read, one line


class HostReport(msgspec.Struct, frozen=True):
    """A report on a host: its hardware, package versions, directories, stores and ports."""

    machine: str  # boot id, which is the same for all hosts on one machine
    processors: int
    memory: int  # bytes
    versions: dict[str, str]
    directory: PathReport
    marked_job: str  # uuid of the job in the run directory's mark.json; "" if there is none
    marked_step: int  # the committed step in mark.json; -1 if there is none
    stores: tuple[StoreReport, ...] = ()
    ports: tuple[str, ...] = ()  # for each port of the query, why it cannot be bound, or ""
    lacking: tuple[str, ...] = ()  # globs that match no file, and files that do not exist


def report_host(query: HostQuery) -> HostReport:
    """Return a report on this host, with the paths and ports of the query."""
    mark = mark_record(Path(query.directory))
    absent = [pattern for pattern in query.globs if not _has_text(pattern)]
    return HostReport(
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        len(os.sched_getaffinity(0)),
        psutil.virtual_memory().total,
        versions(),
        report_path(query.directory),
        mark.job,
        mark.step,
        tuple(map(report_store, query.stores)),
        tuple(map(_refused, query.ports)),
        (*absent, *(path for path in query.files if not os.path.exists(path))),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages, which should be the same on all hosts."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def report_path(path: str) -> PathReport:
    full = Path(path).absolute()
    exists = next(path for path in (full, *full.parents) if os.path.exists(path))
    about = exists.stat()
    # Nothing can be created below a dangling link.
    dangling = [path for path in (full, *full.parents) if path.is_symlink() and not path.exists()]
    real = exists.resolve()  # two paths may lead to the same directory through links
    above = [(parent.stat().st_dev, parent.stat().st_ino) for parent in (real, *real.parents)]
    return PathReport(
        path,
        str(exists),
        about.st_dev,
        about.st_ino,
        "" if full == exists else str(full.relative_to(exists)),
        tuple(above),
        free_nbytes(exists),
        _network_files(exists),
        f"{dangling[0]} is a dangling link" if dangling else _not_writable(exists),
    )


def _not_writable(path: Path) -> str:
    """Return the reason why a test file cannot be written to a directory, or "" if it can."""
    if not path.is_dir():
        return f"{path} is not a directory"
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0")
    except OSError as error:
        return f"{error.strerror}"
    return ""


def _network_files(path: Path) -> str:
    """Return the type, source and mount point of a network file system that contains `path`, or
    ""."""
    source, at, kind = mount_of(path)
    shared = kind in NETWORK_FILES or kind.startswith("fuse.")
    return f"{kind} {source} {at}" if shared else ""


def report_store(path: str) -> StoreReport:
    at = report_path(path)
    if at.rest or at.refused:
        return StoreReport(at)
    locked = any(map(is_locked, (Path(path), Path(path, "lock"))))  # see storage/lock.py
    try:
        now = current(Path(path))
        if now is None or now.step < 0:
            return StoreReport(at, locked)
        meta = StoreMeta.load(now.home)
    except StoreError as error:
        return StoreReport(at, locked, damage=str(error).partition("\n")[0])
    elements = sum(param.numel for _, params in meta.blocks for param in params)
    return StoreReport(at, locked, meta.job, now.step, elements)


def mark_record(directory: Path) -> MarkRecord:
    """Return the content of mark.json in the run's directory, or an empty MarkRecord if the file is
    absent or damaged."""
    try:
        return msgspec.json.decode(
            unsealed((directory / "mark.json").read_bytes()), type=MarkRecord
        )
    except (OSError, ValueError):
        return MarkRecord()


def _refused(port: PortQuery) -> str:
    """Return the reason why a port cannot be bound, or "" if it can."""
    family = socket.AF_INET6 if ":" in port.address else socket.AF_INET
    kind = socket.SOCK_DGRAM if port.datagrams else socket.SOCK_STREAM
    with socket.socket(family, kind) as probe:
        if not port.datagrams:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like our listeners
        try:
            probe.bind((port.address, port.port))
        except OSError as error:
            return _WHY.get(error.errno or 0, f"{error.strerror}")
    return ""


_WHY = {
    errno.EADDRINUSE: "is in use by another process",
    errno.EADDRNOTAVAIL: "cannot be bound: this host does not have the address",
    errno.EACCES: "may not be used by this user",
}


def _has_text(pattern: str) -> bool:
    """Return True if a glob pattern matches a file, or names a directory that contains a file."""
    inside = os.path.join(glob.escape(pattern), "**", "*") if os.path.isdir(pattern) else pattern
    return os.path.isfile(pattern) or any(
        os.path.isfile(path) for path in glob.iglob(inside, recursive=True)
    )


def main() -> None:
    query = msgspec.json.decode(sys.stdin.buffer.read(), type=HostQuery)
    sys.stdout.buffer.write(msgspec.json.encode(report_host(query)) + b"\n")


if __name__ == "__main__":
    main()
