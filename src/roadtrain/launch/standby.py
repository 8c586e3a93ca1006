"""Standby: the process of succeed.py that goes on with a run where its supervisor is killed.

    supervisor   has the run's lock; keeps its standby alive
    standby      waits for the lock, which the kernel gives it when the supervisor is gone

A supervisor that ends by itself ends its standby before it lets the lock go. Where something else
starts supervisors again, as Ray does, there is none. Does NOT take the lock itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from roadtrain.launch.home import RunHome

AGAIN_S = 10.0  # after a standby that has ended, or could not be started


class Standby:
    """`tell`: one line for the run's user."""

    def __init__(self, home: RunHome, tell: Callable[[str], None]) -> None:
        self._home, self._tell = home, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0  # not before, on the monotonic clock

    def keep(self, now: float) -> None:
        """Starts it, also again. Nothing that goes wrong with it ends a run."""
        if now < self._start_at or (self._process is not None and self._process.poll() is None):
            return
        self._start_at = now + AGAIN_S
        words = [sys.executable, "-m", "roadtrain.launch.succeed", str(self._home.path)]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._tell(f"the supervisor has no standby for now: {error}")

    def close(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
