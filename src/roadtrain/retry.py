"""Repeat an action until it succeeds, undo an action that failed, or show that it goes on."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
SAY_SOON_S = 3.0  # seconds from the start of a wait to its first report
SAY_S = 10.0  # seconds between two reports of a wait
SLOW_S = 2.0  # seconds of work after which its progress is shown


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


@contextmanager
def slow_work(
    what: str, total: int | None = None, report: Callable[[str], None] = print
) -> Iterator[Callable[[int], None]]:
    """Show that work goes on, once it has taken two seconds: a bar on a terminal, else one line.

    The target is a function that adds to the part of `total` that is done.
    """
    done, bars = 0, list[Any]()

    def show() -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        console = importlib.import_module("rich.console").Console(stderr=True)
        if not console.is_terminal:
            report(f"{what} ...")
            return
        bar = importlib.import_module("rich.progress").Progress(console=console, transient=True)
        bar.add_task(what, total=total, completed=done)
        bar.start()
        bars.append(bar)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        for bar in bars:
            bar.update(bar.task_ids[0], completed=done)

    timer = threading.Timer(SLOW_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        timer.join()
        for bar in bars:
            bar.stop()
