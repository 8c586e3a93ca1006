"""Ports for what binds them later: each is given once, and tests that run at the same time draw from
others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

DIRECTORY = Path(tempfile.gettempdir(), f"roadtrain-test-ports-{os.getuid()}")
# below those that the system gives to links, or one of them may have it by then
FIRST, LAST, BLOCK = 15000, 30000, 100


def free_port() -> int:
    """For torch's store, and for hosts that come back to theirs."""
    for port in _OURS:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("other tests on this machine hold all ports, or these have used all")


def _our_ports() -> Iterator[int]:
    """Those of blocks of which this process has the lock, a file for each block. The descriptors
    stay open to its end, and no program that it starts gets them."""
    DIRECTORY.mkdir(exist_ok=True)
    starts = range(FIRST, LAST, BLOCK)
    for start in random.Random().sample(starts, len(starts)):
        lock = os.open(DIRECTORY / str(start), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            yield from range(start, start + BLOCK)


_OURS = _our_ports()
