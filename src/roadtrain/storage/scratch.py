"""Scratch: an unnamed file that is mapped into memory, for values that may not fit in memory.

The kernel can reclaim the file's pages, so they do not count as memory of this process. The file
has no checksums, and is deleted when the last view of the map is released.
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
    """An unnamed file of `nbytes` in `directory`. Offsets must be multiples of the page size.
    Ranges that were never written take no space on the disk. Raises FullError if the disk is
    full."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._where = directory
        with typed_errors(directory, "making a scratch file", nbytes):
            self._fd, path = tempfile.mkstemp(dir=directory, prefix="scratch-")
            weakref.finalize(self, os.close, self._fd)
            os.unlink(path)
            os.ftruncate(self._fd, max(nbytes, PAGE))
            self.map = mmap.mmap(self._fd, max(nbytes, PAGE))

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` without mapping pages into this process."""
        with typed_errors(self._where, "writing values to a scratch file", len(data)):
            while data:
                done = os.pwrite(self._fd, data, offset)
                data, offset = data[done:], offset + done

    def release(self, offset: int, nbytes: int) -> None:
        """Unmap a range of the file from this process. A later read of the range maps it again."""
        self.map.madvise(mmap.MADV_DONTNEED, offset, round_up(nbytes, PAGE))
