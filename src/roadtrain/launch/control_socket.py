"""ControlSocket: how a run's supervisor is spoken to: a Unix socket in the run's home (mode 600), a
JSON object a line there and back.

    {"verb": "status"}                                 the run's state, and its step
    {"verb": "stop", "words": [WHY]}                   the run ends, its step committed
    {"verb": "measure"}                                the run ends so, and the links between its
                                                       hosts are measured (measured_run.py)
    {"verb": "tell", "words": ["leaves", HOST, "120"]} for the engine: leaves, comes, ...
    {"verb": "hello"}                                  a launcher; the run is stopped when the
                                                       connection ends

No thread: the supervisor calls `requests` again and again. Does NOT carry verbs out.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from roadtrain.errors import LaunchError
from roadtrain.launch.agent_messages import LineSplitter
from roadtrain.launch.home import RunHome

NAME = "control"
REQUEST_LIMIT = 1 << 16  # bytes of a request
ANSWER_S = 180.0  # the supervisor may be asking a host in between
READ = 1 << 16  # bytes


@dataclass
class ControlConnection:
    socket: socket.socket
    holds: bool = False  # said hello: its end ends the run
    _heard: LineSplitter = field(default_factory=lambda: LineSplitter(REQUEST_LIMIT))

    def lines(self) -> list[bytes] | None:
        """Whole ones that have come; None when the other side is gone."""
        try:
            data = self.socket.recv(READ)
        except BlockingIOError:
            return []
        except OSError:
            return None
        lines = self._heard.feed(data)
        gone = not data or any(dropped for _, dropped in lines)
        return None if gone else [line for line, _ in lines]

    def answer(self, reply: Mapping[str, Any]) -> None:
        """The other side may be gone: that is found at its next read."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(1.0)
            self.socket.sendall(json.dumps(reply).encode() + b"\n")
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)


@dataclass(frozen=True)
class ControlRequest:
    """verb: "gone" for a launcher whose connection has ended."""

    verb: str
    words: tuple[str, ...]
    connection: ControlConnection


class ControlSocket:
    """`greeted`: whether a launcher has said hello."""

    def __init__(self, home: RunHome) -> None:
        self.greeted = False
        self._path = home.path / NAME
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        before = os.umask(0o177)
        try:
            with short_path(self._path) as short:
                self._listener.bind(short)
        finally:
            os.umask(before)
        self._listener.listen(16)
        self._connections: list[ControlConnection] = []

    def requests(self) -> list[ControlRequest]:
        """Those that have come since the last call."""
        # nobody waits; or too many descriptors are open, which must not end a run
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                self._connections.append(ControlConnection(accepted))
        out: list[ControlRequest] = []
        for connection in list(self._connections):
            lines = connection.lines()
            if lines is None:
                self._connections.remove(connection)
                connection.socket.close()
                if connection.holds:
                    out.append(ControlRequest("gone", (), connection))
            for line in lines or ():
                out += self._request(connection, line)
        return out

    def _request(self, connection: ControlConnection, line: bytes) -> list[ControlRequest]:
        try:
            told = json.loads(line)
            verb, words = str(told["verb"]), tuple(map(str, told.get("words", ())))
        except (ValueError, KeyError, TypeError, AttributeError):
            connection.answer({"error": f"no request: {line[:80].decode(errors='replace')}"})
            return []
        if verb == "hello":
            connection.holds = self.greeted = True
            connection.answer({})
            return []
        return [ControlRequest(verb, words, connection)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.socket.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)


class ControlClient:
    """A connection to the supervisor of a run. Raises LaunchError where there is none."""

    def __init__(self, home: RunHome) -> None:
        self._name = home.name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_S)
        try:
            with short_path(home.path / NAME) as short:
                self._socket.connect(short)
        except OSError as cause:
            self._socket.close()
            raise LaunchError(
                f"run {home.name!r} has no supervisor that answers",
                hint=f"roadtrain launch --resume {home.name}",
            ) from cause
        self._file = self._socket.makefile("rb")

    @property
    def gone(self) -> bool:
        """Whether the supervisor has closed it. Only where no answer is awaited: the end is then
        all that can come."""
        return bool(select.select([self._socket], [], [], 0.0)[0])

    def ask(self, verb: str, *words: str) -> Mapping[str, Any]:
        """Raises LaunchError: what the supervisor refused, or that it is gone."""
        try:
            self._socket.sendall(json.dumps({"verb": verb, "words": words}).encode() + b"\n")
            reply = json.loads(self._file.readline() or b"null")
        except (OSError, ValueError) as cause:
            raise LaunchError(
                f"the supervisor of {self._name!r} did not answer `{verb}` within {ANSWER_S:.0f} s:"
                f" {cause}"
            ) from cause
        if not isinstance(reply, dict):
            raise LaunchError(f"the supervisor of {self._name!r} ended before it answered {verb!r}")
        if error := reply.get("error"):
            raise LaunchError(str(error))
        return reply

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def ask_supervisor(home: RunHome, verb: str, words: Sequence[str] = ()) -> Mapping[str, Any]:
    """As `ControlClient.ask`, of a connection of its own."""
    with contextlib.closing(ControlClient(home)) as client:
        return client.ask(verb, *words)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """`path` as a Unix socket takes it: those are 107 bytes at most."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
