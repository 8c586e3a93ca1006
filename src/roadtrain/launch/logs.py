"""RunLogs: the lines of a launched run in one place: `[worker 0 gpu0] line` in all.log, and those
of each process alone in log/. `LogTail` reads all.log while it grows.

Nothing is rotated or removed: a run that is launched again under its name begins them anew, one
that is resumed goes on. Does NOT interpret lines.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import IO, Self

from roadtrain.launch.home import RunHome

OURS = "launch"  # whose lines are the supervisor's
PLAIN = "worker 0"  # whose lines a person reads without role and host
NAME_LENGTH = 100  # of a file in log/


class RunLogs:
    def __init__(self, home: RunHome) -> None:
        self._directory = home.log_directory
        self._files: dict[str, IO[str]] = {}
        self._all = _opened(home.all_log)
        self._lost, self._why = 0, ""  # lines that could not be written, and why

    def write(self, name: str, host: str, line: str) -> None:
        """A full disk must not end a run: lines are lost then, which is told once there is room."""
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

    def tell(self, text: str) -> None:
        """What the supervisor says, with the time."""
        self.write(OURS, "", f"{time.strftime('%H:%M:%S')} {text}")

    def flush(self) -> None:
        try:
            for file in (self._all, *self._files.values()):
                file.flush()
        except OSError:
            return  # what waits is bounded, and written later
        if self._lost:
            lost, self._lost = self._lost, 0
            self.tell(f"{lost} or more lines of these logs were lost: {self._why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._all, *self._files.values()):
            with contextlib.suppress(OSError):
                file.close()


def _opened(path: Path) -> IO[str]:
    return open(path, "a", encoding="utf-8", errors="replace")


class LogTail:
    """Whole lines of all.log that came since the last call, for people: those of worker 0 are
    shown as it said them."""

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
    head, _, text = line.partition("] ")
    return text if head.startswith(f"[{PLAIN} ") else line
