"""StartedProcess: one process of a host as its agent sees it: its pipes, its last words, its end.
Does NOT wait for anything (agent.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from roadtrain.launch.agent_messages import LineSplitter
from roadtrain.launch.descendants import MARK, dies_with_parent, kill_marked
from roadtrain.units import KIB, MIB

LINE_LIMIT = 8 * KIB  # bytes of a line of output
READ = 64 * KIB  # bytes at once
LAST_READ = 4 * MIB  # bytes that are still looked at when it has ended
OURS = "roadtrain: "  # begins the sentence of an error that the command line knows


class StartedProcess:
    """`say` gets each line of its output. Invariant: what is kept of its output is bounded.

    Raises OSError where it cannot be begun.
    """

    def __init__(
        self,
        words: Sequence[str],
        mark: str,
        say: Callable[[str], None],
        *,
        directory: str,
        environment: Mapping[str, str],
    ) -> None:
        self.mark = mark
        self._popen = subprocess.Popen(
            [sys.executable, *words],
            cwd=directory,
            env={**os.environ, **environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self.pid = self._popen.pid
        self.pipes = [self._popen.stdout.fileno(), self._popen.stderr.fileno()]
        self._errors = self.pipes[1]
        self._lines = {pipe: LineSplitter(LINE_LIMIT) for pipe in self.pipes}
        for pipe in self.pipes:
            os.set_blocking(pipe, False)
        self._say = say
        self._last_error = self._last_own_error = ""
        self.kill_at: float | None = None
        """When it is killed, where it has been asked to end."""
        self.give_up_at: float | None = None
        """When it is given up, where it has been killed."""

    @property
    def said(self) -> str:
        """Its last line on standard error; where one is a sentence of ours, the last such."""
        return self._last_own_error or self._last_error

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """It, its group, and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        kill_marked(self.mark)

    def read(self, pipe: int) -> int:
        """Says what a pipe has; returns its bytes, 0 at its end."""
        try:
            data = os.read(pipe, READ)
        except BlockingIOError:
            return -1
        for line, dropped in self._lines[pipe].feed(data) if data else self._lines[pipe].last():
            self._take(pipe, line, dropped)
        return len(data)

    def finish(self, code: int) -> None:
        """It has ended: what it had written is said, and its pipes are closed."""
        self._popen.returncode = code  # so that Popen waits for nobody
        for pipe in self.pipes:
            nbytes = 0
            while nbytes < LAST_READ and (n := self.read(pipe)) > 0:
                nbytes += n
            for line, dropped in self._lines[pipe].last():
                self._take(pipe, line, dropped)
        for file in (self._popen.stdout, self._popen.stderr):
            assert file is not None
            file.close()

    def _take(self, pipe: int, data: bytes, dropped: int) -> None:
        line = data.decode(errors="replace").rstrip("\r")
        if pipe == self._errors and line.strip():
            self._last_error = line
            if line.startswith(OURS):
                self._last_own_error = line
        self._say(f"{line} [{dropped} bytes more]" if dropped else line)
