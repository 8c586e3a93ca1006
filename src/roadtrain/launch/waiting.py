"""Wait for a condition by polling, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.2  # interval of polls


def wait_until(condition: Callable[[], bool], within_s: float, poll_s: float = POLL_S) -> bool:
    """Call `condition` every `poll_s` seconds until it returns True, and return True. Return False
    after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
