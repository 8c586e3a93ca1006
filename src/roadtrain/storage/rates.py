"""Measurement of the rates of a storage directory, with a temporary file of 256 MiB. Takes a few
seconds. The file has no name while it is measured, so a killed process leaves nothing behind."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from roadtrain.device.buffers import Buffer
from roadtrain.storage.direct import DirectFile, existing, typed_errors
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


def storage_rates(
    directory: str | Path, nbytes: int = FILE_BYTES, seconds: float = SECONDS
) -> StorageRates:
    """Measure the rates of `directory`, or of its nearest parent that exists. Raises StoreError
    (FullError, GoneError).

    Each of three measurements takes at least `seconds`. `nbytes`: the size of the file, which each
    of them transfers at least once; a multiple of 8 pages.
    """
    home = existing(Path(directory).absolute())
    path = home / f"probe-{uuid.uuid4().hex}.bin"
    with typed_errors(home, "probing"):
        path.touch()  # an error of a directory names the directory
        path.unlink()
        try:
            file = DirectFile(path, create=nbytes)
        finally:
            path.unlink(missing_ok=True)
        try:
            # at least the whole file, because holes in the file would be read too fast
            wrote = _rate([file.write], nbytes, seconds)
            read = _rate([file.read], nbytes, seconds)
            both = _rate([file.read, file.write], nbytes, seconds)
            return StorageRates(read, wrote, both, file.note)
        finally:
            file.close()


def _rate(calls: list[Call], nbytes: int, seconds: float) -> float:
    """Return the bytes per second of all `calls` together. Each call reads or writes the file of
    `nbytes` for at least `seconds`, in two threads, and transfers it at least once."""
    start, piece = time.perf_counter(), min(PIECE, nbytes // 8)

    def work(call: Call, offsets: Iterator[int]) -> int:
        buffer, done = Buffer(piece), 0
        while time.perf_counter() < start + seconds or done * THREADS < nbytes:
            call(buffer.view, next(offsets), "a probe")
            done += piece
        buffer.close()
        return done

    jobs = [(call, cycle(range(0, nbytes, piece))) for call in calls] * THREADS
    with ThreadPoolExecutor(len(jobs)) as pool:
        return sum(pool.map(work, *zip(*jobs))) / (time.perf_counter() - start)
