"""HostAgent: starts, watches and ends the processes of a run on one host, as its supervisor says:
`python -m roadtrain.launch.agent MARK`, a JSON object a line on its standard input and output.

Assumes Linux. When its input ends, its supervisor has: it kills all that it started, and itself.
When it is killed, its processes are too; what those had started is killed by the next agent with
the same mark. One thread, no torch. Does NOT start anything again, and does NOT know a job.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from roadtrain.errors import RoadtrainError
from roadtrain.launch import agent_messages as m
from roadtrain.launch.descendants import adopt_orphans, kill_marked
from roadtrain.launch.processes import Process
from roadtrain.launch.put_file import put_file
from roadtrain.launch.started_process import READ, StartedProcess
from roadtrain.storage.direct import make_directory
from roadtrain.units import MIB

UNSENT = 8 * MIB  # bytes that wait for a slow supervisor before lines of output are left out
GIVE_UP_S = 30.0  # a process that was killed and does not end is given up
TURN_S = 0.05  # between looks at what has ended, or is late
REFUSED = 1  # the code of a process that could not be begun


class HostAgent:
    """`said`, `heard`: descriptors to and from the supervisor, this agent's alone."""

    def __init__(self, mark: str, heard: int, said: int) -> None:
        self._mark, self._heard, self._said = mark, heard, said
        self._running: dict[str, StartedProcess] = {}  # by name
        self._orders = m.LineSplitter(m.MESSAGE_LIMIT)
        self._unsent = bytearray()
        self._left_out = 0  # lines, because of UNSENT
        self._going = True
        self._selector = selectors.DefaultSelector()
        for descriptor in (heard, said):
            os.set_blocking(descriptor, False)
        self._watch(heard, self._hear)

    def run(self) -> None:
        """Until its input ends, or nobody reads what it says."""
        adopt_orphans()
        # a Ctrl-C is the supervisor's to handle; not ignored, or its processes would ignore it too
        signal.signal(signal.SIGINT, lambda *_: None)
        # blocked where a thread of Ray's starts agents; processes would have it blocked as well
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        kill_marked(f"{self._mark}#")  # what an agent before this one has left
        self._send(m.AgentReady(device_count()))
        alive_at = time.monotonic() + m.ALIVE_S
        try:
            while self._going:
                for key, _ in self._selector.select(TURN_S):
                    key.data()
                self._reap()
                self._end_late()
                if time.monotonic() > alive_at:
                    self._send(m.AgentAlive())
                    alive_at = time.monotonic() + m.ALIVE_S
        finally:
            for process in self._running.values():
                process.kill()
            kill_marked(f"{self._mark}#")

    def _watch(self, descriptor: int, do: Callable[[], object], event: int = 0) -> None:
        self._selector.register(descriptor, event or selectors.EVENT_READ, do)

    def _hear(self) -> None:
        data = os.read(self._heard, READ)
        self._going = bool(data) and self._going
        for line, dropped in self._orders.feed(data):
            if dropped:
                raise SystemExit(f"a message of {len(line) + dropped} bytes came")
            try:
                order = m.TO_AGENT.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise SystemExit(f"a line that is no message for an agent: {error}") from error
            self._obey(order)

    def _obey(self, order: m.ToAgent) -> None:
        match order:
            case m.BeginProcess(process):
                self._begin(process)
            case m.EndProcess(name, grace_s):
                self._end(name, grace_s)

    def _begin(self, process: Process) -> None:
        name = process.name
        if name in self._running:
            return self._send(
                m.ProcessGone(name, REFUSED, f"{name} runs already on {process.host}")
            )
        for file in process.files:
            if refused := put_file(file):
                return self._send(m.ProcessGone(name, REFUSED, refused))
        try:
            make_directory(Path(process.directory))
            started = StartedProcess(
                process.words,
                f"{self._mark}#{name};",
                partial(self._say, name),
                directory=process.directory,
                environment=process.environment,
            )
        except (RoadtrainError, OSError, subprocess.SubprocessError) as error:
            return self._send(m.ProcessGone(name, REFUSED, f"{name} cannot be begun: {error}"))
        self._running[name] = started
        for pipe in started.pipes:
            self._watch(pipe, partial(self._read, started, pipe))
        return None

    def _read(self, started: StartedProcess, pipe: int) -> None:
        if started.read(pipe) == 0:
            self._selector.unregister(pipe)

    def _end(self, name: str, grace_s: float) -> None:
        if (started := self._running.get(name)) is None:
            return  # its end has been told
        if grace_s > 0:
            started.interrupt()
            started.kill_at = time.monotonic() + grace_s
        else:
            self._kill(started)

    def _kill(self, started: StartedProcess) -> None:
        started.kill()
        started.kill_at, started.give_up_at = None, time.monotonic() + GIVE_UP_S

    def _reap(self) -> None:
        """Tells the end of all that have ended."""
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):  # there is no child
            while (one := os.waitpid(-1, os.WNOHANG))[0]:
                ended[one[0]] = os.waitstatus_to_exitcode(one[1])
        for name, started in list(self._running.items()):
            if started.pid in ended:
                self._finish(name, ended[started.pid])

    def _finish(self, name: str, code: int) -> None:
        """Kill what a process that has ended has started, and tell its end."""
        started = self._running.pop(name)
        started.kill()
        for pipe in started.pipes:
            with contextlib.suppress(KeyError):  # it was at its end
                self._selector.unregister(pipe)
        started.finish(code)
        self._send(m.ProcessGone(name, code, started.said))

    def _end_late(self) -> None:
        """Kills those whose grace is over, and gives those up that do not end then."""
        now = time.monotonic()
        for name, started in list(self._running.items()):
            if started.kill_at is not None and now >= started.kill_at:
                self._kill(started)
            elif started.give_up_at is not None and now >= started.give_up_at:
                self._say(name, f"process {started.pid} does not end after {GIVE_UP_S:.0f} s")
                self._finish(name, -signal.SIGKILL)

    def _say(self, name: str, line: str) -> None:
        if len(self._unsent) > UNSENT:
            self._left_out += 1
            return
        if self._left_out:
            left, self._left_out = self._left_out, 0
            self._send(m.OutputLine(name, f"[{left} lines left out: the supervisor is slow]"))
        self._send(m.OutputLine(name, line))

    def _send(self, message: m.FromAgent) -> None:
        idle = not self._unsent
        self._unsent += m.encode_line(message)
        if idle:
            self._flush()
            if self._unsent:
                self._watch(self._said, self._flush_later, selectors.EVENT_WRITE)

    def _flush_later(self) -> None:
        self._flush()
        if not self._unsent:
            self._selector.unregister(self._said)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._said, self._unsent[: 16 * READ])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._going = False
            self._unsent.clear()


def device_count() -> int:
    """Accelerators that processes of this host may use."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def main(mark: str) -> None:
    heard, said = (os.dup(descriptor) for descriptor in (0, 1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # nothing but messages goes to the supervisor
    HostAgent(mark, heard, said).run()


if __name__ == "__main__":
    main(sys.argv[1])
