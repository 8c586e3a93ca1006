"""Stop: the conditions that end training before its last step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from roadtrain.training.progress import Report

INTERRUPTED = "interrupted"


class Stop:
    """Ends training early, on Ctrl-C or SIGTERM or when the time is over. The current step is
    finished; a second signal ends it at once."""

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
        """Handle signals in the body, if this is the main thread."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._signalled:
                raise KeyboardInterrupt
            self._signalled = True
            report("stopping after this step (a second signal stops at once)")

        main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if main else ()
        before = [(number, signal.signal(number, ask)) for number in signals]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
