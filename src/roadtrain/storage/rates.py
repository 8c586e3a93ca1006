"""Measurement of the rates of a storage directory.

Needs room for a file of FILE_BYTES for some seconds. Leaves nothing behind.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from roadtrain.device.buffers import Buffer
from roadtrain.storage.direct import DirectFile, typed_errors
from roadtrain.units import MIB

PIECE, FILE_BYTES = 8 * MIB, 256 * MIB
THREADS = 2  # per direction; more gain little
SECONDS = 0.7  # duration of each measurement
Call = Callable[[memoryview, int, str], None]


@dataclass(frozen=True)
class StorageRates:
    """Bytes per second of direct I/O (buffered if that is not supported, see `note`). `mixed`: the
    sum of both directions at once."""

    read: float
    write: float
    mixed: float
    note: str = ""


def storage_rates(directory: str | Path) -> StorageRates:
    """Write and read a temporary file in `directory`. Raises StoreError (FullError, GoneError)."""
    home = Path(directory).absolute()
    while not home.is_dir():
        home = home.parent
    with (
        typed_errors(home, "probing"),
        tempfile.TemporaryDirectory(prefix="probe-", dir=home) as name,
    ):
        file = DirectFile(Path(name) / "rates.bin", create=FILE_BYTES)
        try:
            # file system holes would read too fast
            wrote = _rate([file.write], at_least=FILE_BYTES)
            read = _rate([file.read])
            return StorageRates(read, wrote, _rate([file.read, file.write]), file.note)
        finally:
            file.close()


def _rate(calls: list[Call], at_least: int = 0) -> float:
    """Return the bytes per second of all `calls` together, each repeated over the whole file."""
    start = time.perf_counter()

    def work(call: Call, offsets: Iterator[int]) -> int:
        buffer, done = Buffer(PIECE), 0
        while time.perf_counter() < start + SECONDS or done * THREADS < at_least:
            call(buffer.view, next(offsets), "a probe")
            done += PIECE
        buffer.close()
        return done

    jobs = [(call, cycle(range(0, FILE_BYTES, PIECE))) for call in calls] * THREADS
    with ThreadPoolExecutor(len(jobs)) as pool:
        return sum(pool.map(work, *zip(*jobs))) / (time.perf_counter() - start)
