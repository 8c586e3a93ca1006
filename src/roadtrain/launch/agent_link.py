"""AgentLink: the supervisor's connection to one agent, which it starts. Does NOT react to the end
of an agent (agents.py)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from roadtrain.launch import agent_messages as m
from roadtrain.launch.descendants import MARK
from roadtrain.launch.launch_engine import Spawn
from roadtrain.units import KIB

READ = 256 * KIB  # bytes per read
SILENT_S = 60.0  # an agent that sends nothing for this long is killed; Python starts in less time
KILLED_S = 30.0  # how long to wait for a killed agent to end, as it may hang in disk I/O
END_S = 15.0  # how long to wait for an agent to end after its stdin is closed


@dataclass(frozen=True)
class AgentHost:
    """A host on which an agent can run."""

    name: str

    address: str

    spawn: Spawn = subprocess.Popen
    """Function that starts a command on this host. It takes the arguments of Popen."""

    workers: int = 0
    """Number of workers that the plan places on this host."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra environment variables of the host's agent and of all processes on the host."""

    threads: int = 0
    """Default number of threads per worker. If 0, no limit is set."""


class AgentLink:
    """A running agent and the pipes to it. Raises OSError if the agent cannot be started."""

    def __init__(self, host: AgentHost, mark: str) -> None:
        self.host = host
        words = [sys.executable, "-m", "roadtrain.launch.agent", f"{mark}/{host.name}"]
        self._process = host.spawn(
            words,
            env={**os.environ, **host.environment, MARK: f"{mark}/{host.name}@"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        self.to_agent = process.stdin.fileno()
        self.pipes = (process.stdout.fileno(), process.stderr.fileno())
        for pipe in (self.to_agent, *self.pipes):
            os.set_blocking(pipe, False)
        self.ready: m.AgentReady | None = None
        self.unsent = bytearray()
        # The agent's last line on stderr, or the reason why its stdout could not be decoded.
        self.last_words = ""
        self._lines, self._errors = m.LineSplitter(m.MESSAGE_LIMIT), m.LineSplitter(READ)
        self._last_read = time.monotonic()

    def send(self, message: m.ToAgent) -> None:
        self.unsent += m.encode_line(message)
        self.flush()

    def flush(self) -> None:
        """Write as many unsent bytes to the agent as the pipe accepts, or drop them if the agent
        has ended."""
        m.write_some(self.to_agent, self.unsent)

    def read(self) -> list[m.FromAgent] | None:
        """Return the new messages, or None if the agent has ended or sent an invalid message."""
        try:
            data = os.read(self.pipes[0], READ)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._last_read = time.monotonic()
        try:
            messages = [m.FROM_AGENT.decode(line) for line, _ in self._lines.feed(data)]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.last_words = f"the agent sent a line that is not a valid message: {error}"
            return None
        for message in messages:
            if isinstance(message, m.AgentReady):
                self.ready = message
        return messages

    def read_errors(self) -> list[str] | None:
        """Return the new lines of the agent's stderr, or None at the end of the stream."""
        try:
            data = os.read(self.pipes[1], READ)
        except BlockingIOError:
            return []
        return self._error_lines(data) if data else None

    def _error_lines(self, data: bytes) -> list[str]:
        lines = [line.decode(errors="replace") for line, _ in self._errors.feed(data)]
        self.last_words = next((line for line in reversed(lines) if line.strip()), self.last_words)
        return lines

    def why_silent(self) -> str:
        """Return a text if the agent has sent nothing for too long, else ""."""
        late = time.monotonic() - self._last_read > SILENT_S
        return f"its agent has sent nothing for {SILENT_S:.0f} s" if late else ""

    def end_input(self) -> None:
        """Close the agent's stdin. The agent then kills all its processes and ends."""
        if (pipe := self._process.stdin) is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.stdin = None

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> str:
        """Wait for the agent to end, and kill it if it is late. Return a text that says how it
        ended."""
        process = self._process
        self.end_input()
        for patience_s in (END_S, KILLED_S):
            try:
                _, errors = process.communicate(timeout=patience_s)
                break
            except subprocess.TimeoutExpired:
                process.kill()
        else:  # stuck in disk I/O
            return f"its agent was killed but has not ended after {KILLED_S:.0f} s"
        self._error_lines(errors)
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"code {code}"
        return f"its agent ended ({how}{': ' + self.last_words if self.last_words else ''})"
