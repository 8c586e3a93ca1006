"""Find and kill the descendants of a run's processes, which inherit an environment variable (MARK)
with a label of the run. Assumes Linux (/proc, pidfd). Does NOT find processes that replaced their
environment."""

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
END_S = 5.0  # how long to wait for killed processes, which may hang in a device
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # linux/prctl.h
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def kill_marked(mark: str) -> None:
    """Kill all processes whose environment variable ROADTRAIN_STARTED_FOR begins with `mark`.
    Return when none is left, or after a fixed time."""
    prefix = f"{MARK}={mark}".encode()
    deadline = time.monotonic() + END_S
    while _kill_once(prefix) and time.monotonic() < deadline:
        time.sleep(0.005)


def _kill_once(prefix: bytes) -> bool:
    """Kill each process with an environment entry (`NAME=value`) that begins with `prefix`. Return
    True if there was one."""
    found = False
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process has ended or belongs to another user
            held = os.pidfd_open(pid)  # a signal through it cannot reach a reuse of the pid
            try:
                words = (process / "environ").read_bytes().split(b"\0")
                if any(word.startswith(prefix) for word in words):
                    found = True
                    signal.pidfd_send_signal(held, signal.SIGKILL)
            finally:
                os.close(held)
    return found


def dies_with_parent() -> Callable[[], None]:
    """Return a function for the `preexec_fn` argument of Popen, with which the kernel kills the
    child when the thread that called Popen ends. Use it only in a process with one thread."""
    return partial(_die_with, os.getpid())


def _die_with(parent: int) -> None:
    _prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that waitpid() reports their end."""
    _prctl(SET_SUBREAPER, 1, 0, 0, 0)
