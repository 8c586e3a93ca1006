"""AgentLink: the supervisor's side of one agent: its process, what is said to it and what it says.
Does NOT decide what an agent's end means (agents.py)."""

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
from roadtrain.launch.launch_engine import Begin
from roadtrain.units import KIB

READ = 256 * KIB  # bytes at once
SILENT_S = 60.0  # an agent that has said nothing for so long is ended; python starts within it
KILLED_S = 30.0  # one that was killed and is there still, in its disk, is given up
END_S = 15.0  # an agent whose input is closed has ended within it


@dataclass(frozen=True)
class AgentHost:
    """A host that agents are started on."""

    name: str

    address: str

    begin: Begin = subprocess.Popen
    """Starts a command there, given as Popen gets it."""

    workers: int = 0
    """As many as the plan has there."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Of its agent, and of all processes there."""

    threads: int = 0
    """Of each worker, where nothing else says how many; 0: as many as it likes."""


class AgentLink:
    """Raises OSError where the agent cannot be started."""

    def __init__(self, host: AgentHost, mark: str) -> None:
        self.host = host
        words = [sys.executable, "-m", "roadtrain.launch.agent", f"{mark}/{host.name}"]
        self._process = host.begin(
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
        self.last_words = ""  # on its standard error
        self._lines, self._errors = m.LineSplitter(m.MESSAGE_LIMIT), m.LineSplitter(READ)
        self._heard = time.monotonic()

    def send(self, message: m.ToAgent) -> None:
        self.unsent += m.encode_line(message)
        self.flush()

    def flush(self) -> None:
        """An agent that has ended is found by its end of output, not here."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.to_agent, self.unsent[:READ])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent.clear()

    def read(self) -> list[m.FromAgent] | None:
        """What it has said since; None: it has ended, or says what no agent says."""
        try:
            data = os.read(self.pipes[0], READ)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._heard = time.monotonic()
        try:
            messages = [m.FROM_AGENT.decode(line) for line, _ in self._lines.feed(data)]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.last_words = f"a line that is no message of an agent: {error}"
            return None
        for message in messages:
            if isinstance(message, m.AgentReady):
                self.ready = message
        return messages

    def read_errors(self) -> list[str] | None:
        """Lines that it has written on standard error; None: it has ended."""
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
        """Why it cannot be used, or ""."""
        late = time.monotonic() - self._heard > SILENT_S
        return f"its agent has said nothing for {SILENT_S:.0f} s" if late else ""

    def end_input(self) -> None:
        """It kills all that it started, and ends."""
        if (pipe := self._process.stdin) is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.stdin = None

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> str:
        """Its end: killed if it does not come by itself. Returns how it ended."""
        process = self._process
        self.end_input()
        for patience_s in (END_S, KILLED_S):
            try:
                _, errors = process.communicate(timeout=patience_s)
                break
            except subprocess.TimeoutExpired:
                process.kill()
        else:  # it is in a disk that does not answer
            return f"its agent was killed, and is still there after {KILLED_S:.0f} s"
        self._error_lines(errors)
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"code {code}"
        return f"its agent ended ({how}{': ' + self.last_words if self.last_words else ''})"
