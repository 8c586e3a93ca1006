"""Buffer: anonymous memory for fast direct I/O, which depends on huge pages. Does NOT pin memory
for a device, and does NOT pool buffers.

NOTE fork. A forked process (such as a worker of a DataLoader) does not inherit the contents of
buffers. If child and parent shared the pages, the parent's next write would move a page to new
memory. A disk that is filling the page would still write to the old memory, and the parent would
lose these bytes. In the child, any access to a buffer raises SIGSEGV instead of returning wrong
bytes. (MADV_DONTFORK would free the addresses. The child could then map other memory at the same
addresses, and unmap this memory when it frees the inherited Buffer.)
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
        """Release the memory, which is freed once no array or view refers to it any more."""
        self.view = memoryview(bytearray())


def array_in(view: memoryview, dtype: str, offset: int, count: int) -> np.ndarray[Any, Any]:
    """Return an array of `count` elements that begins at byte `offset` of `view` and shares its
    memory. For bf16 and fp16, the elements are uint16."""
    return np.frombuffer(view, NUMPY[dtype], count, offset)


class Heap:
    """The C heap of the process, whose free memory `trim` returns to the system.

    While a block runs, torch leaves small objects between the temporaries that it frees. Without
    `trim`, the heap therefore grows by some megabytes per block (Rule 4: memory does not depend on
    the number of blocks). Call `trim` after each block. `trim` returns memory only if the process
    has grown by more than `slack` bytes since `trim` last returned memory.
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
