"""Stop: why training ends before its last step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted"
Report = Callable[[str], None]


class Stop:
    """Why to stop early: Ctrl-C or SIGTERM (the step at work is finished; a second one ends at
    once), or the time."""

    def __init__(self, minutes: float | None, report: Report) -> None:
        self._until = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._minutes, self._report, self._asked = minutes, report, False

    def why(self) -> str:
        if self._asked:
            return INTERRUPTED
        return f"{self._minutes:g} minutes are over" if time.monotonic() > self._until else ""

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._report("stopping after this step (again: at once)")

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Signals come here, where this is the main thread; elsewhere whoever runs us handles
        them."""
        signals = (
            (signal.SIGINT, signal.SIGTERM)
            if threading.current_thread() is threading.main_thread()
            else ()
        )
        before = [(number, signal.signal(number, self._ask)) for number in signals]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
