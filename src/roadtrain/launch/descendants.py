"""What processes of a run have started: found by a mark in their environment, which every process
hands to those that it starts, and killed. Assumes Linux (/proc, process descriptors).

The mark is only ever compared: it changes no behaviour. Does NOT find what gave itself another
environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

MARK = "ROADTRAIN_STARTED_FOR"
END_S = 5.0  # a killed process is gone within it, unless a device holds it
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # linux/prctl.h
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def kill_marked(mark: str) -> None:
    """Kills all processes whose mark begins so, until there are none, or END_S have passed."""
    wanted = f"{MARK}={mark}".encode()
    deadline = time.monotonic() + END_S
    while _kill_once(wanted) and time.monotonic() < deadline:
        time.sleep(0.005)


def _kill_once(wanted: bytes) -> bool:
    """Whether there were any."""
    found = False
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            held = os.pidfd_open(pid)  # its number is no other's meanwhile
            try:
                words = (process / "environ").read_bytes().split(b"\0")
                if any(word.startswith(wanted) for word in words):
                    found = True
                    signal.pidfd_send_signal(held, signal.SIGKILL)
            finally:
                os.close(held)
    return found


def dies_with_parent() -> Callable[[], None]:
    """What a child calls before it becomes its command: it is killed when the thread that started
    it ends. Start it from the main thread, of a process that has no other."""
    return partial(_die_with, os.getpid())


def _die_with(parent: int) -> None:
    _prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def adopt_orphans() -> None:
    """Processes whose parent ended become this process's children: it waits for them, so they do
    not stay as zombies."""
    _prctl(SET_SUBREAPER, 1, 0, 0, 0)
