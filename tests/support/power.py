"""A disk that keeps only synced data, the worst case after a power cut.

Inside `Disk(...)` every fsync and fdatasync of a file under `root` keeps its content, and every
fsync of a directory keeps the names in it. `cut(to)` writes the kept data into the empty directory
`to`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


class Disk:
    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.content: dict[int, bytes] = {}  # by inode
        self.names: dict[int, dict[str, int]] = {}  # directory inode -> name -> inode
        self.kinds: dict[int, bool] = {}  # inode -> whether it is a directory
        # syncs under these paths fail, and the written data is lost
        self.fail: str = ""
        self.synced: Callable[[], None] = lambda: None  # called after each sync
        self._open: list[int] = []  # keeps inodes from being reused
        self._root = os.stat(root).st_ino
        self._real = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
        for name in self._real:
            patch.setattr(os, name, lambda fd, name=name: self._synced(fd, name))
        self._keep_directory(root)

    def _synced(self, fd: int, name: str) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
        if self.fail and self.fail in path:
            raise OSError(5, "Input/output error")
        self._real[name](fd)
        if not path.startswith(str(self.root)):
            return
        if os.path.isdir(path):
            self._keep_directory(Path(path))
        else:
            self._keep_inode(fd)
        self.synced()

    def _keep_inode(self, fd: int) -> None:
        about = os.fstat(fd)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        self.content[about.st_ino] = os.pread(again, about.st_size, 0)
        self._open.append(again)

    def _keep_directory(self, path: Path) -> None:
        entries = {}
        for entry in os.scandir(path):
            entries[entry.name] = entry.inode()
            self.kinds[entry.inode()] = entry.is_dir()
            self._open.append(os.open(entry.path, os.O_RDONLY))
        self.names[os.stat(path).st_ino] = entries

    def cut(self, to: Path) -> Path:
        self._write(self._root, to)
        return to

    def _write(self, inode: int, to: Path) -> None:
        to.mkdir()
        for name, child in self.names.get(inode, {}).items():
            if self.kinds[child]:
                self._write(child, to / name)
            else:
                (to / name).write_bytes(self.content.get(child, b""))

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)
