"""The end of a custom loop by Ctrl-C or SIGTERM: its last finished step is committed, and a line
says how to resume. Handlers of the user are never replaced."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

DEADLINE_S = 20.0  # limit of each wait for the last step's commit
terminated = False  # whether SIGTERM has ended the loop


class Terminated(SystemExit):
    """Raised in the main thread by SIGTERM, so that the loop ends as it does by Ctrl-C."""


def _terminate(number: int, frame: FrameType | None) -> None:
    global terminated
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    terminated = True
    raise Terminated(128 + number)


def handle_sigterm(old: object, new: object) -> None:
    """Replace the handler `old` of SIGTERM by `new`; leave any other handler, and other threads."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is old:
        signal.signal(signal.SIGTERM, new)  # type: ignore[arg-type]


def begin() -> None:
    handle_sigterm(signal.SIG_DFL, _terminate)


def end() -> None:
    handle_sigterm(_terminate, signal.SIG_DFL)


def ended_by(kind: type[BaseException] | None) -> bool:
    return kind is not None and issubclass(kind, KeyboardInterrupt | Terminated)


@contextmanager
def second_ends_at_once() -> Iterator[None]:
    """Let another Ctrl-C end the process while the body of `with` runs."""
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler
    if ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and ours:
            signal.signal(signal.SIGINT, before)


def command() -> str:
    """Return what to do to resume: the command that started this process, if it is known."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "ipykernel" in sys.modules:
        return "resume by starting it in the same way"
    return f"resume with: {shlex.join(sys.orig_argv)}"
