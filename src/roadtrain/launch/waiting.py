"""Wait for a condition by polling, with a deadline (Rule 5)."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.2  # interval of polls


def wait_until(condition: Callable[[], bool], within_s: float, poll_s: float = POLL_S) -> bool:
    """Call `condition` every `poll_s` seconds until it returns True, and return True. If
    `condition` does not return True within `within_s` seconds, return False."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
