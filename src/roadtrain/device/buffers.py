"""Buffer: anonymous memory for fast direct I/O.

The rate of direct I/O depends on huge pages. Therefore a buffer starts on a 2 MiB boundary, and
requests huge pages for its memory. If the size is not a multiple of 2 MiB, the last bytes (less
than 2 MiB) have ordinary pages. So a buffer smaller than 2 MiB does not cost 2 MiB. `nbytes` is the
size that counts against a memory budget. Does NOT pin memory for a device, and does NOT pool
buffers.

NOTE fork. A forked process (such as a worker of a DataLoader) does not inherit the contents of
buffers. If the child shared the pages with the parent (copy-on-write), the parent's next write to a
page would move the page to new memory. A storage device that is filling the page would still write
to the old memory, and the parent would lose these bytes. In the child, the addresses of the buffers
stay reserved, but any access raises SIGSEGV instead of returning wrong bytes. (MADV_DONTFORK would
free the addresses in the child. The child could then map other memory at these addresses. When the
child later frees an inherited Buffer, it would unmap this other memory.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from roadtrain.chunks import NUMPY, PAGE
from roadtrain.units import MIB, round_up

HUGE = 2 * MIB
_MADV_WIPEONFORK = 18  # Linux 4.14; the standard library names it from Python 3.14 on
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # the memory of all buffers of this process


def _forbid_in_child() -> None:
    """Make all buffers inaccessible in a forked child. Otherwise the child would read zeros from
    the buffers."""
    for memory in _mapped:
        address = np.frombuffer(memory, np.uint8, 1).ctypes.data
        _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), _PROT_NONE)


os.register_at_fork(after_in_child=_forbid_in_child)


class Buffer:
    """A page-aligned buffer. `view`: its writable bytes, initially zero. `nbytes`: its size, a
    multiple of the page size."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(max(nbytes, 1), PAGE)
        memory = mmap.mmap(-1, self.nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(_MADV_WIPEONFORK)  # NOTE fork
        _mapped.add(memory)
        start = -np.frombuffer(memory, np.uint8, 1).ctypes.data % HUGE
        if whole := self.nbytes // HUGE * HUGE:
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
        # the memory exists until its last view is freed
        self.view = memoryview(memory)[start : start + self.nbytes]

    def close(self) -> None:
        """Release the memory. The memory is freed once no array or view refers to it any more."""
        self.view = memoryview(bytearray())


def array_in(view: memoryview, dtype: str, offset: int, count: int) -> np.ndarray[Any, Any]:
    """Return an array of `count` elements that begins at byte `offset` of `view` and shares the
    memory of `view`. If `dtype` is bf16 or fp16, the array's dtype is uint16."""
    return np.frombuffer(view, NUMPY[dtype], count, offset)


class Heap:
    """The C heap of the process. `trim` returns free pages to the system, so that the process does
    not grow with the number of blocks (Rule 4).

    While a block runs, torch allocates temporaries and a few small objects. The temporaries are
    freed, but the small objects between them remain, so glibc returns no pages, and its heap grows
    by some megabytes per block (measured: 700 MB at 128 blocks of width 512).

    Call `trim` after each block. If the process has grown by `slack` bytes since pages were last
    returned, `trim` returns free pages to the system. If a single block makes the process grow by
    `slack` bytes, and `trim` then returns more than half of `slack` bytes, `slack` is doubled.
    Without glibc or /proc, `trim` does nothing.
    """

    def __init__(self, slack: int = 16 * MIB) -> None:
        self.slack, self._calls = slack, 0
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._statm = Path("/proc/self/statm")
        self._base = self._resident() if self._malloc_trim and self._statm.exists() else None

    def _resident(self) -> int:
        return int(self._statm.read_bytes().split()[1]) * mmap.PAGESIZE

    def trim(self, at_once: bool = False) -> None:
        if self._base is None or self._malloc_trim is None:
            return
        now, self._calls = self._resident(), self._calls + 1
        self._base = min(self._base, now)
        if at_once or now > self._base + self.slack:
            self._malloc_trim(0)
            self._base = self._resident()
            if not at_once and self._calls < 2 and now - self._base > self.slack // 2:
                self.slack *= 2
            self._calls = 0
