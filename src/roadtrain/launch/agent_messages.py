"""Messages between a supervisor and its agent on a host: one typed JSON object per line, of
limited length. Does NOT do any I/O (agent.py, agent_link.py)."""

from __future__ import annotations

import msgspec

from roadtrain.errors import WireError
from roadtrain.launch.processes import Process
from roadtrain.units import MIB

ALIVE_S = 5.0
MESSAGE_LIMIT = 32 * MIB  # bytes per line, including the files of a process


class BeginProcess(msgspec.Struct, tag="begin", frozen=True):
    """Order to write the files of a process and start it. ProcessExited reports its end."""

    process: Process


class EndProcess(msgspec.Struct, tag="end", frozen=True):
    """Order to interrupt a process, and kill it and its descendants after `grace_s` seconds.
    0 kills it at once."""

    name: str
    grace_s: float


class AgentReady(msgspec.Struct, tag="ready", frozen=True):
    """The first message of an agent."""

    devices: int  # accelerators


class OutputLine(msgspec.Struct, tag="line", frozen=True):
    name: str
    line: str


class ProcessExited(msgspec.Struct, tag="gone", frozen=True):
    """Report that a process and its descendants have ended, or that it could not be started.
    code: exit code; negative: the signal that killed it."""

    name: str
    code: int
    last_line: str = msgspec.field(name="said")  # of its stderr


class AgentAlive(msgspec.Struct, tag="alive", frozen=True):
    """Heartbeat, sent every ALIVE_S."""


ToAgent = BeginProcess | EndProcess
FromAgent = AgentReady | OutputLine | ProcessExited | AgentAlive
TO_AGENT: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)
FROM_AGENT: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)


def encode_line(message: ToAgent | FromAgent) -> bytes:
    """Encode a message. Raises WireError if it exceeds MESSAGE_LIMIT."""
    line = msgspec.json.encode(message) + b"\n"
    if len(line) > MESSAGE_LIMIT:
        raise WireError(f"the message has {len(line)} bytes, more than the {MESSAGE_LIMIT} allowed")
    return line


class LineSplitter:
    """Splits a byte stream into lines, each paired with the number of bytes dropped from its end
    because it was longer than `limit`. Invariant: buffers at most `limit` bytes between calls."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun = bytearray()  # the unfinished line
        self._dropped = 0  # bytes dropped from the unfinished line

    def feed(self, data: bytes) -> list[tuple[bytes, int]]:
        *ended, rest = data.split(b"\n")
        lines = []
        for piece in ended:
            self._add(piece)
            lines.append((bytes(self._begun), self._dropped))
            self._begun, self._dropped = bytearray(), 0
        self._add(rest)
        return lines

    def last(self) -> list[tuple[bytes, int]]:
        """Return the unfinished line, if any, at the end of the stream."""
        return self.feed(b"\n") if self._begun or self._dropped else []

    def _add(self, piece: bytes) -> None:
        room = self._limit - len(self._begun)
        self._begun += piece[:room]
        self._dropped += max(0, len(piece) - room)

    def check(self) -> None:
        assert len(self._begun) <= self._limit
