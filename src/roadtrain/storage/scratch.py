"""Scratch: a file without a name, mapped into memory, for values that are handed out and too many
to hold.

What is written here is page cache: the kernel takes it back when memory is short, and it counts as
nobody's own memory.
Assumes: offsets are whole pages. Does NOT sync, check or outlive its last view.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path

from roadtrain.chunks import PAGE
from roadtrain.storage.direct import typed_errors
from roadtrain.units import round_up


class Scratch:
    """`nbytes` in `directory`, holes until they are written. FullError where the device is full."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._where = directory
        with typed_errors(directory, "making a scratch file", nbytes):
            self._fd, path = tempfile.mkstemp(dir=directory, prefix="scratch-")
            weakref.finalize(self, os.close, self._fd)
            os.unlink(path)
            os.ftruncate(self._fd, max(nbytes, PAGE))
            self.map = mmap.mmap(self._fd, max(nbytes, PAGE))

    def write(self, data: memoryview, offset: int) -> None:
        """By a system call, not through the map, so that no page of it becomes this process's."""
        with typed_errors(self._where, "writing values to a scratch file", len(data)):
            while data:
                done = os.pwrite(self._fd, data, offset)
                data, offset = data[done:], offset + done

    def let_go(self, offset: int, nbytes: int) -> None:
        """These pages are needed no more for now; reading them brings them back."""
        self.map.madvise(mmap.MADV_DONTNEED, offset, round_up(nbytes, PAGE))
