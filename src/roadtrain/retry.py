"""Repeat an action until it succeeds, or undo an action that failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
SAY_SOON_S = 3.0  # seconds from the start of a wait to its first report
SAY_S = 10.0  # seconds between two reports of a wait


def retry(
    attempt: Callable[[], T],
    errors: type[BaseException] | tuple[type[BaseException], ...],
    for_s: float | None,
    waits: Callable[[BaseException, float], None] = lambda error, left_s: None,
) -> T:
    """Call `attempt` until it succeeds, and return its result.

    Args:
        errors: The errors after which `attempt` is called again. Other errors are raised at once.
        for_s: Seconds after which an error is raised instead of calling `attempt` again. If None,
            `attempt` is called once.
        waits: Called every few seconds, between attempts, with the last error and the seconds left.
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
    """Call `undo` if the body of the `with` statement raises an error. Then raise this error."""
    try:
        yield
    except BaseException:
        undo()
        raise
