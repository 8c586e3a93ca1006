"""Helpers for failures: retry for a while, or undo what was begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
SAY_SOON_S = 3.0  # until the first report of a wait
SAY_S = 10.0  # between two reports


def retry(
    attempt: Callable[[], T],
    errors: type[BaseException] | tuple[type[BaseException], ...],
    for_s: float | None,
    waits: Callable[[BaseException, float], None] = lambda error, left_s: None,
) -> T:
    """Call `attempt` until it succeeds, and return its result.

    Raises the error of `attempt` if it is none of `errors`, or after `for_s` seconds (None: after
    the first attempt). `waits` is called now and then with the error and the seconds left.
    """
    begin = time.monotonic()
    until, say_at = begin + (for_s or 0.0), begin + SAY_SOON_S
    while True:
        try:
            return attempt()
        except errors as error:
            now = time.monotonic()
            if now >= until:
                raise
            if now >= say_at:
                waits(error, until - now)
                say_at = now + SAY_S
            time.sleep(0.05)


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the body raises, and let the error pass."""
    try:
        yield
    except BaseException:
        undo()
        raise
