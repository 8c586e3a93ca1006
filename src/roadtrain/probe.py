"""probe: what this machine gives, measured. So far: the rates of a storage directory.

Assumes the directory takes a file of FILE_BYTES for some seconds. Does NOT write anything that stays.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from roadtrain.store.buffers import Buffer
from roadtrain.store.direct import DirectFile
from roadtrain.units import MIB

PIECE, FILE_BYTES = 8 * MIB, 256 * MIB
THREADS = 2  # a direction; more gain little
SECONDS = 0.7  # of each measurement


@dataclass(frozen=True)
class StorageRates:
    """Bytes a second of direct I/O (buffered where it is refused: `note` says so). `mixed`: both directions at once,
    together."""

    read: float
    write: float
    mixed: float
    note: str = ""


def storage_rates(directory: str | Path, nbytes: int = FILE_BYTES, seconds: float = SECONDS) -> StorageRates:
    """Writes and reads a temporary file in `directory`. Raises StoreError (FullError, GoneError)."""
    home = Path(directory).absolute()
    while not home.is_dir():
        home = home.parent
    with tempfile.TemporaryDirectory(prefix="probe-", dir=home) as name:
        file = DirectFile(Path(name) / "rates.bin", create=nbytes)
        try:
            write, read = _Way(file.write, nbytes), _Way(file.read, nbytes)
            wrote = _rate([write], seconds, at_least=nbytes)  # all of it: what was never written reads too fast
            return StorageRates(_rate([read], seconds), wrote, _rate([read, write], seconds), file.note)
        finally:
            file.close()


class _Way:
    """One direction: pieces of the file in turn, over and over."""

    def __init__(self, call: Callable[[memoryview, int, str], None], nbytes: int) -> None:
        self._call, self._nbytes = call, nbytes
        self._lock, self._next, self.done = threading.Lock(), 0, 0

    def work(self, until: float, at_least: int) -> None:
        buffer = Buffer(PIECE)
        while time.perf_counter() < until or self.done < at_least:
            with self._lock:
                offset, self._next = self._next, (self._next + PIECE) % self._nbytes
            self._call(buffer.view, offset, "a probe")
            with self._lock:
                self.done += PIECE
        buffer.close()


def _rate(ways: Sequence[_Way], seconds: float, at_least: int = 0) -> float:
    start, before = time.perf_counter(), sum(way.done for way in ways)
    threads = [threading.Thread(target=way.work, args=(start + seconds, at_least)) for way in [*ways] * THREADS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (sum(way.done for way in ways) - before) / (time.perf_counter() - start)
