"""look: what a host has and what stands in the way there, before a run starts on it.
`python -m roadtrain.launch.look`: a HostQuestion as JSON in, a HostLook as JSON out.

Nothing is changed: a store's lock is tried and let go, a file that is written to find out whether
that can be done never has a name. Imports no torch, so that it ends within a second. Does NOT judge
what it sees: checks.py does, which knows the other hosts too.
"""

from __future__ import annotations

import errno
import fcntl
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
from roadtrain.storage.direct import free_nbytes
from roadtrain.storage.mark import MarkRecord
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.sealed import unsealed

PACKAGES = ("roadtrain", "torch")
NETWORK_FILES = ("nfs", "nfs4", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "cifs", "9p")


class PortQuestion(msgspec.Struct, frozen=True):
    """Whether something could listen there."""

    address: str
    port: int
    datagrams: bool = False


class HostQuestion(msgspec.Struct, frozen=True):
    """What is to be looked at. All paths are absolute."""

    directory: str  # of the run
    stores: tuple[str, ...] = ()  # that servers or workers of this host shall open
    ports: tuple[PortQuestion, ...] = ()
    globs: tuple[str, ...] = ()  # of text
    files: tuple[str, ...] = ()  # that must be there


class PathLook(msgspec.Struct, frozen=True):
    """A directory that shall be used, or made. exists, device, inode: of the lowest directory on
    the way to it that is there; rest: what would be made below. above: (device, inode) of all
    directories that it lies in, itself too where it is there."""

    path: str
    exists: str
    device: int
    inode: int
    rest: str
    above: tuple[tuple[int, int], ...]
    free: int  # bytes
    files: str  # the file system; network ones with where they come from, "" for others
    refused: str = ""  # why nothing can be written there, "" where it can


class StoreLook(msgspec.Struct, frozen=True):
    """What lies in a store's directory. job: "" where there is none; elements: of the parameters
    that it is for."""

    at: PathLook
    locked: bool = False
    job: str = ""
    step: int = -1
    elements: int = 0
    damage: str = ""


class HostLook(msgspec.Struct, frozen=True):
    """What a host has. machine: the same for two hosts that are one machine."""

    machine: str
    processors: int
    memory: int  # bytes
    versions: dict[str, str]
    directory: PathLook
    marked_job: str  # the store that the run directory knows as its own, "" for none
    marked_step: int  # that it has committed, -1 for none
    stores: tuple[StoreLook, ...] = ()
    ports: tuple[str, ...] = ()  # of each that was asked for: why nobody can listen there, or ""
    lacking: tuple[str, ...] = ()  # globs and files that are not there


def look(asked: HostQuestion) -> HostLook:
    """Of this host."""
    mark = _mark(Path(asked.directory))
    absent = [one for one in asked.globs if not _has_text(one)]
    return HostLook(
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        len(os.sched_getaffinity(0)),
        psutil.virtual_memory().total,
        versions(),
        look_at(asked.directory),
        mark.job,
        mark.step,
        tuple(map(_store, asked.stores)),
        tuple(map(_refused, asked.ports)),
        (*absent, *(one for one in asked.files if not os.path.exists(one))),
    )


def versions() -> dict[str, str]:
    """Of what must be alike on all hosts."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def look_at(path: str) -> PathLook:
    there = Path(path).absolute()
    exists = next(one for one in (there, *there.parents) if os.path.exists(one))
    about = exists.stat()
    # nothing can be made where a link leads to nothing
    loose = [one for one in (there, *there.parents) if one.is_symlink() and not one.exists()]
    real = exists.resolve()  # links are followed: two names may lead to one place
    above = [(one.stat().st_dev, one.stat().st_ino) for one in (real, *real.parents)]
    return PathLook(
        path,
        str(exists),
        about.st_dev,
        about.st_ino,
        "" if there == exists else str(there.relative_to(exists)),
        tuple(above),
        free_nbytes(exists),
        _network_files(exists),
        f"{loose[0]} is a link to what is not there" if loose else _not_writable(exists),
    )


def _not_writable(path: Path) -> str:
    """A file without a name is written: who may write is not said by modes alone."""
    if not path.is_dir():
        return f"{path} is no directory"
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0")
    except OSError as error:
        return f"{error.strerror}"
    return ""


def _network_files(path: Path) -> str:
    best, found = -1, ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, at, kind = line.split()[:3]
        if len(at) > best and path.is_relative_to(at):
            shared = kind in NETWORK_FILES or kind.startswith("fuse.")
            best, found = len(at), f"{kind} {source} {at}" if shared else ""
    return found


def _store(path: str) -> StoreLook:
    at = look_at(path)
    if at.rest or at.refused:
        return StoreLook(at)
    locked = _is_locked(Path(path))
    try:
        now = current(Path(path))
        if now is None or now.step < 0:
            return StoreLook(at, locked)
        meta = StoreMeta.load(now.home)
    except StoreError as error:
        return StoreLook(at, locked, damage=str(error).partition("\n")[0])
    elements = sum(one.numel for _, params in meta.blocks for one in params)
    return StoreLook(at, locked, meta.job, now.step, elements)


def _is_locked(directory: Path) -> bool:
    """Whether another process has the store open (storage/lock.py)."""
    lock = directory / "lock"  # where the file system locks no directories
    for path in (directory, lock) if lock.exists() else (directory,):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two lookers do not meet
        except BlockingIOError:
            return True
        except OSError:
            continue
        finally:
            os.close(fd)
    return False


def _mark(directory: Path) -> MarkRecord:
    """What the run directory knows of its store; `train` says what is wrong with a damaged one."""
    try:
        return msgspec.json.decode(
            unsealed((directory / "mark.json").read_bytes()), type=MarkRecord
        )
    except (OSError, ValueError):
        return MarkRecord()


def _refused(port: PortQuestion) -> str:
    family = socket.AF_INET6 if ":" in port.address else socket.AF_INET
    kind = socket.SOCK_DGRAM if port.datagrams else socket.SOCK_STREAM
    with socket.socket(family, kind) as probe:
        if not port.datagrams:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as listeners do
        try:
            probe.bind((port.address, port.port))
        except OSError as error:
            return _WHY.get(error.errno or 0, f"{error.strerror}")
    return ""


_WHY = {
    errno.EADDRINUSE: "is taken by another process",
    errno.EADDRNOTAVAIL: "is at an address that this host does not have",
    errno.EACCES: "may not be used by this user",
}


def _has_text(pattern: str) -> bool:
    inside = os.path.join(glob.escape(pattern), "**", "*") if os.path.isdir(pattern) else pattern
    return os.path.isfile(pattern) or any(
        os.path.isfile(one) for one in glob.iglob(inside, recursive=True)
    )


def main() -> None:
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=HostQuestion)
    sys.stdout.buffer.write(msgspec.json.encode(look(asked)) + b"\n")


if __name__ == "__main__":
    main()
