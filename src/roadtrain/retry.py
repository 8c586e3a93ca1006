"""Retry: what fails because somebody is about to come or to leave is tried again for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def retry(attempt: Callable[[], T], errors: type[BaseException] | tuple[type[BaseException], ...], for_s: float) -> T:
    """What `attempt` returns; its error where that still is one of `errors` after `for_s`, any other at once."""
    until = time.monotonic() + for_s
    while True:
        try:
            return attempt()
        except errors:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)
