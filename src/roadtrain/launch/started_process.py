"""StartedProcess: a process of a run that an agent has started, with the pipes for its output, its
last error line and its deadlines. The methods do NOT wait (agent.py does)."""

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

LINE_LIMIT = 8 * KIB  # largest number of bytes that are kept of a line of output
READ = 64 * KIB  # bytes per read
LAST_READ = 4 * MIB  # bytes per pipe after which reading stops when the process has ended
OURS = "roadtrain: "  # prefix of the error messages of roadtrain's command line


class StartedProcess:
    """A child process. Invariant: the buffered output is bounded. `words`: the arguments of the
    Python interpreter. `mark`: the label of the process and its descendants (descendants.py).
    `on_line`: function that gets each line of the output. Raises OSError if the process cannot be
    started."""

    def __init__(
        self,
        words: Sequence[str],
        mark: str,
        on_line: Callable[[str], None],
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
        self._on_line = on_line
        self._last_error = self._last_own_error = ""
        self.kill_at: float | None = None
        """Monotonic time at which the process is killed, or None if it was not asked to end."""
        self.give_up_at: float | None = None
        """Monotonic time at which waiting for the process stops, or None if it was not killed."""

    @property
    def last_line(self) -> str:
        """The last error message of roadtrain's command line on stderr, or the last line if there
        is none."""
        return self._last_own_error or self._last_error

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """Kill the process, its process group and its descendants."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        kill_marked(self.mark)

    def read(self, pipe: int) -> int:
        """Read a pipe once, and pass the new lines to `on_line`. Return the number of bytes read: 0
        at the end of the stream, and -1 if the pipe has no data yet."""
        try:
            data = os.read(pipe, READ)
        except BlockingIOError:
            return -1
        for line, dropped in self._lines[pipe].feed(data) if data else self._lines[pipe].last():
            self._take(pipe, line, dropped)
        return len(data)

    def finish(self, code: int) -> None:
        """Pass the remaining output to `on_line`, and close the pipes. Call this method after the
        process has ended. `code`: the exit code of the process."""
        self._popen.returncode = code  # keeps Popen from waiting for the process
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
        self._on_line(f"{line} [{dropped} more bytes dropped]" if dropped else line)
