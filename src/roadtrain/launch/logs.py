"""RunLogs: the log files of a launched run. all.log has the lines of every process, as `[worker 0
gpu0] line`; log/ has a file per process. `LogTail` reads all.log while it grows.

Logs are not rotated. A new launch under the same name empties the logs; a resumed run appends to
them. Does NOT interpret lines.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import IO, Self

from roadtrain.launch.home import RunHome

OURS = "launch"  # the name under which the supervisor logs
PLAIN = "worker 0"  # the process whose lines are shown to users without a prefix
NAME_LENGTH = 100  # longest file name in log/, without its suffix


class RunLogs:
    """The open log files of a run, to which the supervisor writes."""

    def __init__(self, home: RunHome) -> None:
        self._directory = home.log_directory
        self._files: dict[str, IO[str]] = {}
        self._all = _opened(home.all_log)
        self._lost, self._why = 0, ""  # number of lines that could not be written, and why

    def write(self, name: str, host: str, line: str) -> None:
        """Log a line of a process. If the disk is full, drop it, because a full disk must not end a
        run; `flush` reports the loss later."""
        try:
            self._write(name, host, line)
        except OSError as error:
            self._lost, self._why = self._lost + 1, f"{error.strerror or error}"

    def _write(self, name: str, host: str, line: str) -> None:
        self._all.write(f"[{f'{name} {host}'.strip()}] {line}\n")
        if name not in self._files:
            plain = "".join(c if c.isalnum() or c in ".-_" else "_" for c in name)
            self._files[name] = _opened(self._directory / f"{plain[:NAME_LENGTH]}.log")
        self._files[name].write(f"{line}\n")

    def notify(self, text: str) -> None:
        """Log a line of the supervisor, preceded by the time of day."""
        self.write(OURS, "", f"{time.strftime('%H:%M:%S')} {text}")

    def flush(self) -> None:
        try:
            for file in (self._all, *self._files.values()):
                file.flush()
        except OSError:
            return  # the buffers are bounded; a later flush writes them
        if self._lost:
            lost, self._lost = self._lost, 0
            self.notify(f"at least {lost} lines of these logs were lost: {self._why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._all, *self._files.values()):
            with contextlib.suppress(OSError):
                file.close()


def _opened(path: Path) -> IO[str]:
    return open(path, "a", encoding="utf-8", errors="replace")


class LogTail:
    """Reads all.log from byte `offset` while the file grows. `lines` returns the lines that were
    completed since the last call, without the prefix of worker 0."""

    def __init__(self, home: RunHome, offset: int = 0) -> None:
        self._path, self._offset, self._rest = home.all_log, offset, b""

    def lines(self) -> list[str]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [shown(line.decode(errors="replace")) for line in whole]


def shown(line: str) -> str:
    """Return the text that users see for a line of the log. Only lines of worker 0 lose their
    prefix."""
    head, _, text = line.partition("] ")
    return text if head.startswith(f"[{PLAIN} ") else line
