"""Retry: what fails because somebody is about to come or to leave is tried again for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def retry(
    attempt: Callable[[], T],
    errors: type[BaseException] | tuple[type[BaseException], ...],
    for_s: float | None,
) -> T:
    """What `attempt` returns; its error where that still is one of `errors` after `for_s` (None:
    the first), any other at once."""
    until = time.monotonic() + (for_s or 0.0)
    while True:
        try:
            return attempt()
        except errors:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)
