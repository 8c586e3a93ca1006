"""Buffer: anonymous memory that direct I/O is fast on.

Huge pages decide the rate that direct I/O reaches, so a buffer starts on a 2 MiB boundary and asks
for huge pages; only for the whole ones inside it, so that a small buffer does not cost 2 MiB.
Memory is counted by `nbytes`.

NOTE fork. A forked process (a DataLoader's worker) does not get the bytes of the buffers: shared
with it until one side writes, a page would be copied for that writer while a device still reads or
writes the old one, and what a device read would be lost. The child keeps the addresses, which
nobody may touch there: who does gets SIGSEGV, and no wrong bytes. (Without the addresses, as
MADV_DONTFORK leaves it, the child would map something else there, and the end of a buffer that it
inherited would unmap that.) Does NOT pin memory for a device, and does NOT pool: whoever allocates
keeps.
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
    """In a forked child: nobody reads zeros where the parent has a buffer."""
    for memory in _mapped:
        address = np.frombuffer(memory, np.uint8, 1).ctypes.data
        _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), _PROT_NONE)


os.register_at_fork(after_in_child=_forbid_in_child)


class Buffer:
    """`view`: writable bytes, page-padded to `nbytes`, zero at first."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(max(nbytes, 1), PAGE)
        memory = mmap.mmap(-1, self.nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(_MADV_WIPEONFORK)  # NOTE fork
        _mapped.add(memory)
        start = -np.frombuffer(memory, np.uint8, 1).ctypes.data % HUGE
        if whole := self.nbytes // HUGE * HUGE:
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
        # the memory lives as long as any view of it
        self.view = memoryview(memory)[start : start + self.nbytes]

    def close(self) -> None:
        """Give the memory back; where an array or view of it is still alive, with the last of
        them."""
        self.view = memoryview(bytearray())


def array_in(view: memoryview, dtype: str, offset: int, count: int) -> np.ndarray[Any, Any]:
    """`count` elements from byte `offset`, not copied; bf16 and fp16 as uint16."""
    return np.frombuffer(view, NUMPY[dtype], count, offset)


class Heap:
    """Keeps what torch's own temporaries leave behind in the C heap from growing with the number of
    blocks (Rule 4).

    Each block leaves a few small objects between its freed temporaries, so that glibc's heap grows
    by some megabytes a block and gives nothing back (measured: 700 MB at 128 blocks of width 512).
    `trim`, called after each block, gives free pages back once the process has grown by `slack`
    bytes since the last time; where that is what one block needs, and no waste, `slack` doubles.
    Without glibc or /proc it does nothing.
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
