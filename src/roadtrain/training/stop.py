"""Stop: the conditions that end training before its last step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from roadtrain.training.progress import Report

INTERRUPTED = "interrupted"


class Stop:
    """A request to end training early: by Ctrl-C, by SIGTERM, or because `minutes` have passed.

    The current step is still finished, but a second signal ends the process at once.
    """

    def __init__(self, minutes: float | None) -> None:
        self._until = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._minutes, self._signalled = minutes, False

    def why(self) -> str:
        """Return the reason to stop; "" to continue."""
        if self._signalled:
            return INTERRUPTED
        return f"{self._minutes:g} minutes are over" if time.monotonic() > self._until else ""

    @contextmanager
    def on_signals(self, report: Report) -> Iterator[None]:
        """Treat SIGINT and SIGTERM as requests to stop while the body of `with` runs in the main
        thread."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._signalled:
                raise KeyboardInterrupt
            self._signalled = True
            with suppress(RuntimeError):  # the signal came while another line was being written
                report("stopping after this step (a second signal stops at once)")

        main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if main else ()
        before = [(number, signal.signal(number, ask)) for number in signals]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
