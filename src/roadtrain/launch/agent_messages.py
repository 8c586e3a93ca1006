"""What a supervisor and its agent on a host say to each other: one JSON object a line, typed, of
limited length. Does NOT read or write (agent.py, agents.py)."""

from __future__ import annotations

import msgspec

from roadtrain.errors import WireError
from roadtrain.launch.processes import Process
from roadtrain.units import MIB

ALIVE_S = 5.0
MESSAGE_LIMIT = 32 * MIB  # bytes of a line: the files of a process are within it


class BeginProcess(msgspec.Struct, tag="begin", frozen=True):
    """Its files are written first. Answered by a ProcessGone, some time."""

    process: Process


class EndProcess(msgspec.Struct, tag="end", frozen=True):
    """Interrupt it, and kill it with all that it started after `grace_s`; 0: kill it now."""

    name: str
    grace_s: float


class AgentReady(msgspec.Struct, tag="ready", frozen=True):
    """The first that an agent says."""

    devices: int  # accelerators


class OutputLine(msgspec.Struct, tag="line", frozen=True):
    name: str
    line: str


class ProcessGone(msgspec.Struct, tag="gone", frozen=True):
    """A process and all that it started have ended, or it could not be begun. code: negative for
    the signal that killed it."""

    name: str
    code: int
    said: str  # its last line on standard error


class AgentAlive(msgspec.Struct, tag="alive", frozen=True):
    """Said every ALIVE_S."""


ToAgent = BeginProcess | EndProcess
FromAgent = AgentReady | OutputLine | ProcessGone | AgentAlive
TO_AGENT: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)
FROM_AGENT: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)


def encode_line(message: ToAgent | FromAgent) -> bytes:
    """Raises WireError for one beyond the limit."""
    line = msgspec.json.encode(message) + b"\n"
    if len(line) > MESSAGE_LIMIT:
        raise WireError(f"a message of {len(line)} bytes, at most {MESSAGE_LIMIT} can be sent")
    return line


class LineSplitter:
    """Bytes as they come -> whole lines. What a line has beyond `limit` bytes is dropped; the
    second of each pair says how many bytes were. Invariant: it holds at most `limit` bytes
    between calls."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun = bytearray()  # of the line that has no end yet
        self._dropped = 0  # bytes of it

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
        """The line that has no end, where there is one: nothing more comes."""
        return self.feed(b"\n") if self._begun or self._dropped else []

    def _add(self, piece: bytes) -> None:
        room = self._limit - len(self._begun)
        self._begun += piece[:room]
        self._dropped += max(0, len(piece) - room)

    def check(self) -> None:
        assert len(self._begun) <= self._limit
