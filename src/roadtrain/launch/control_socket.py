"""ControlSocket: the Unix socket of a run's supervisor, in the run's home (mode 600). Each request
and each reply is one line with a JSON object.

    {"verb": "status"}                                 return the run's state and its step
    {"verb": "stop", "words": [WHY]}                   commit the step and end the run
    {"verb": "measure"}                                commit the step, end the run, and measure
                                                       the links between hosts (measured_run.py)
    {"verb": "tell", "words": ["leaves", HOST, "120"]} pass the words to LaunchEngine.run_verb
    {"verb": "hello"}                                  sent by a launcher: stop the run when this
                                                       connection ends

The supervisor polls `requests`, so no thread is needed. Does NOT carry out requests.
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
REQUEST_LIMIT = 1 << 16  # bytes per request
ANSWER_S = 180.0  # timeout of a request; long, as the supervisor may be waiting for a host
READ = 1 << 16  # bytes per read


@dataclass
class ControlConnection:
    """A connection from a command to the supervisor."""

    socket: socket.socket
    holds: bool = False  # True after `hello`: the run is stopped when this connection ends
    _splitter: LineSplitter = field(default_factory=lambda: LineSplitter(REQUEST_LIMIT))

    def lines(self) -> list[bytes] | None:
        """Return the complete lines received since the last call, or None if the peer has closed
        the connection or sent a line that is too long."""
        try:
            data = self.socket.recv(READ)
        except BlockingIOError:
            return []
        except OSError:
            return None
        lines = self._splitter.feed(data)
        closed = not data or any(dropped for _, dropped in lines)
        return None if closed else [line for line, _ in lines]

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Send a reply; do nothing if the connection is closed."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(1.0)
            self.socket.sendall(json.dumps(reply).encode() + b"\n")
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)


@dataclass(frozen=True)
class ControlRequest:
    """A request to the supervisor. The verb "gone" reports that a launcher's connection has
    ended."""

    verb: str
    words: tuple[str, ...]
    connection: ControlConnection


class ControlSocket:
    """The socket on which the supervisor listens for connections, and the open connections.
    `greeted`: True if a launcher has sent the request "hello"."""

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
        """Return the requests that have arrived since the last call. Does not wait."""
        # EAGAIN: no connection is pending. EMFILE, too many open files, must not end the run.
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
            request = json.loads(line)
            verb, words = str(request["verb"]), tuple(map(str, request.get("words", ())))
        except (ValueError, KeyError, TypeError, AttributeError):
            connection.answer({"error": f"invalid request: {line[:80].decode(errors='replace')}"})
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
    """A connection to the supervisor of a run. Raises LaunchError if no supervisor answers."""

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
                f"the supervisor of run {home.name!r} does not answer",
                hint=f"roadtrain launch --resume {home.name} starts a new supervisor",
            ) from cause
        self._file = self._socket.makefile("rb")

    @property
    def closed(self) -> bool:
        """True if the supervisor has closed the connection. Valid only while no reply is
        pending."""
        return bool(select.select([self._socket], [], [], 0.0)[0])

    def ask(self, verb: str, *words: str) -> Mapping[str, Any]:
        """Send a request and return the reply. Raises LaunchError if the supervisor refuses the
        request or does not answer."""
        try:
            self._socket.sendall(json.dumps({"verb": verb, "words": words}).encode() + b"\n")
            reply = json.loads(self._file.readline() or b"null")
        except (OSError, ValueError) as cause:
            raise LaunchError(
                f"the supervisor of run {self._name!r} did not answer `{verb}` within"
                f" {ANSWER_S:.0f} s: {cause}"
            ) from cause
        if not isinstance(reply, dict):
            raise LaunchError(f"run {self._name!r}: its supervisor ended before answering `{verb}`")
        if error := reply.get("error"):
            raise LaunchError(str(error))
        return reply

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def ask_supervisor(home: RunHome, verb: str, words: Sequence[str] = ()) -> Mapping[str, Any]:
    """Send one request over a new connection, and return the reply. Raises LaunchError if the
    supervisor refuses the request or does not answer."""
    with contextlib.closing(ControlClient(home)) as client:
        return client.ask(verb, *words)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a short alias of `path`, because a Unix socket address has room for only 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
