"""Measurement of the rates of a storage directory, with a temporary file of 256 MiB. Takes a few
seconds."""

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
THREADS = 2  # per direction; more threads gain little
SECONDS = 0.7  # duration of each measurement
Call = Callable[[memoryview, int, str], None]


@dataclass(frozen=True)
class StorageRates:
    """The measured rates of a storage directory, in bytes per second."""

    read: float
    write: float
    mixed: float  # sum of both directions, while reading and writing at once
    note: str = ""  # why buffered I/O was measured, if direct I/O is not supported


def storage_rates(directory: str | Path) -> StorageRates:
    """Measure the rates of `directory`, or of its nearest parent that exists. Raises StoreError
    (FullError, GoneError)."""
    home = Path(directory).absolute()
    while not home.is_dir():
        home = home.parent
    with (
        typed_errors(home, "probing"),
        tempfile.TemporaryDirectory(prefix="probe-", dir=home) as name,
    ):
        file = DirectFile(Path(name) / "rates.bin", create=FILE_BYTES)
        try:
            # at least the whole file, because holes in the file would be read too fast
            wrote = _rate([file.write], at_least=FILE_BYTES)
            read = _rate([file.read])
            return StorageRates(read, wrote, _rate([file.read, file.write]), file.note)
        finally:
            file.close()


def _rate(calls: list[Call], at_least: int = 0) -> float:
    """Return the bytes per second of all `calls` together. Each call reads or writes the file for
    at least 0.7 s, in two threads, and transfers at least `at_least` bytes."""
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
