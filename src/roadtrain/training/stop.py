"""Stop: why training ends before its last step."""

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
    """Why to stop early: Ctrl-C or SIGTERM (the step at work is finished; a second one ends at
    once), or the time."""

    def __init__(self, minutes: float | None) -> None:
        self._until = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._minutes, self._asked = minutes, False

    def why(self) -> str:
        if self._asked:
            return INTERRUPTED
        return f"{self._minutes:g} minutes are over" if time.monotonic() > self._until else ""

    @contextmanager
    def heard(self, report: Report) -> Iterator[None]:
        """Signals come here, where this is the main thread; elsewhere whoever runs us handles
        them."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._asked:
                raise KeyboardInterrupt
            self._asked = True
            report("stopping after this step (again: at once)")

        main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if main else ()
        before = [(number, signal.signal(number, ask)) for number in signals]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
