"""Ports to be bound later: each is given out once, and tests that run at the same time draw from
separate blocks."""

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
# below the range that the system assigns to connections, which could take a port meanwhile
FIRST, LAST, BLOCK = 15000, 30000, 100


def free_port() -> int:
    """A port for torch's store or for hosts that return to theirs."""
    for port in _OURS:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError(
        "other tests on this machine hold all ports, or this process has used them all"
    )


def _our_ports() -> Iterator[int]:
    """Ports from blocks that this process has locked through a file each. The descriptors stay open
    until the process ends and are not inherited by programs that it starts."""
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
