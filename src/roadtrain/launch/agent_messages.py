"""Messages between a supervisor and its agent on a host: lines of limited length with one JSON
object each. Does NOT read them."""

from __future__ import annotations

import os

import msgspec

from roadtrain.errors import WireError
from roadtrain.launch.processes import Process
from roadtrain.units import KIB, MIB

ALIVE_S = 5.0  # interval of an agent's heartbeats
PIECE = 256 * KIB  # bytes per write
MESSAGE_LIMIT = 32 * MIB  # bytes per line, including the files of a process


class BeginProcess(msgspec.Struct, tag="begin", frozen=True):
    """Order to write the files of a process and to start the process."""

    process: Process


class EndProcess(msgspec.Struct, tag="end", frozen=True):
    """Order to interrupt a process, and to kill it and its descendants after `grace_s` seconds (0:
    at once)."""

    name: str
    grace_s: float


class AgentReady(msgspec.Struct, tag="ready", frozen=True):
    """Report that the agent has started; the first message of an agent."""

    devices: int  # number of accelerators of the host


class OutputLine(msgspec.Struct, tag="line", frozen=True):
    """A line that the process called `name` has printed."""

    name: str
    line: str


class ProcessExited(msgspec.Struct, tag="gone", frozen=True):
    """Report that a process and its descendants have ended, or that the process could not be
    started. `code`: the exit code; -N means that signal N killed the process."""

    name: str
    code: int
    last_line: str = msgspec.field(name="said")  # last line of the process, or why it cannot start


class AgentAlive(msgspec.Struct, tag="alive", frozen=True):
    """Heartbeat of an agent, sent at a fixed interval."""


ToAgent = BeginProcess | EndProcess
FromAgent = AgentReady | OutputLine | ProcessExited | AgentAlive
TO_AGENT: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)
FROM_AGENT: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)


def encode_line(message: ToAgent | FromAgent) -> bytes:
    """Encode a message as a line. Raises WireError if the line is longer than 32 MiB."""
    line = msgspec.json.encode(message) + b"\n"
    if len(line) > MESSAGE_LIMIT:
        raise WireError(f"a message has {len(line)} bytes, more than the {MESSAGE_LIMIT} allowed")
    return line


def write_some(pipe: int, unsent: bytearray) -> bool:
    """Write as many bytes as a pipe accepts now, and remove them from `unsent`. Return False, and
    drop all, if nobody reads the pipe any more."""
    try:
        while unsent:
            del unsent[: os.write(pipe, unsent[:PIECE])]
    except BlockingIOError:
        pass
    except BrokenPipeError:
        unsent.clear()
        return False
    return True


class LineSplitter:
    """Splits a byte stream into lines, and drops the bytes of a line beyond `limit`. Invariant: at
    most `limit` bytes are buffered between calls."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun = bytearray()  # the unfinished line
        self._dropped = 0  # bytes dropped from the unfinished line

    def feed(self, data: bytes) -> list[tuple[bytes, int]]:
        """Add `data` to the stream and return the lines that `data` completes, as pairs of the line
        and the number of bytes dropped from it."""
        *ended, rest = data.split(b"\n")
        lines = []
        for piece in ended:
            self._add(piece)
            lines.append((bytes(self._begun), self._dropped))
            self._begun, self._dropped = bytearray(), 0
        self._add(rest)
        return lines

    def last(self) -> list[tuple[bytes, int]]:
        """Return the unfinished last line of the stream, as a list like that of `feed`; [] if the
        stream ends with a newline."""
        return self.feed(b"\n") if self._begun or self._dropped else []

    def _add(self, piece: bytes) -> None:
        room = self._limit - len(self._begun)
        self._begun += piece[:room]
        self._dropped += max(0, len(piece) - room)

    def check(self) -> None:
        assert len(self._begun) <= self._limit
