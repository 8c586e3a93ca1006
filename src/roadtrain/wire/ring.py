"""Ring: one direction's bytes in memory that two sides use; what shm and rdma have in common.

The writer counts the bytes it ever wrote, the reader those it ever read: `read <= written <= read + size`. Each side
knows the other's count from the other side alone, so it is checked each time. Does NOT know how counts travel, how one
waits for them, or in which order memory is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from roadtrain.errors import ConfigError, WireError
from roadtrain.units import GIB, KIB, MIB
from roadtrain.wire.link import copy

PIECE = MIB  # at most published at a time: the reader copies out one while the writer copies in the next


def check_ring_bytes(nbytes: int) -> None:
    if not 64 * KIB <= nbytes <= GIB or nbytes & (nbytes - 1):
        raise ConfigError(f"a ring of {nbytes} bytes; a power of two from 64 KiB to 1 GiB is possible")


class Ring:
    """As one side sees it. `here`: this side's own count."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.size, self.here = data, len(data), 0
        self.piece = min(PIECE, self.size // 4)

    def used(self, written: int, read: int) -> int:
        used = written - read
        if not 0 <= used <= self.size:
            raise WireError(f"the ring says that {used} of its {self.size} bytes are used")
        return used

    def put(self, buffers: Sequence[memoryview | bytes], room: int) -> int:
        """Copies in what fits `room`; how many bytes."""
        begin = self.here
        for buffer in buffers:
            n = min(len(buffer), room - (self.here - begin))
            self._copy(memoryview(buffer)[:n], True)
            if self.here - begin == room:
                break
        return self.here - begin

    def get(self, view: memoryview) -> None:
        self._copy(view, False)

    def _copy(self, view: memoryview, into: bool) -> None:
        at = self.here % self.size
        first = min(len(view), self.size - at)
        for ours, data in ((view[:first], self.data[at:]), (view[first:], self.data)):
            if ours:
                copy(*((data[: len(ours)], ours) if into else (ours, data[: len(ours)])))
        self.here += len(view)
