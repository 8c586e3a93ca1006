"""HostAgent: starts, watches and ends the processes of a run on one host, on orders of the run's
supervisor. Does NOT restart processes.

The agent is started with `python -m roadtrain.launch.agent MARK`. It reads orders from stdin and
writes reports to stdout, one JSON object per line. When stdin ends, the agent kills every process
that it started, and exits. If the agent itself is killed, the kernel also kills its child
processes. Assumes Linux. Has one thread and does not import torch.
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

UNSENT = 8 * MIB  # bytes buffered for a slow supervisor before lines of output are dropped
GIVE_UP_S = 30.0  # time after which a killed process is reported as ended although it has not
TURN_S = 0.05  # interval of the checks for ended and overdue processes
REFUSED = 1  # exit code reported for a process that could not be started


class HostAgent:
    """The agent of one host. `mark`: the label of this agent's processes (descendants.py). `source`
    and `sink`: the file descriptors for orders and reports, which no other process may use."""

    def __init__(self, mark: str, source: int, sink: int) -> None:
        self._mark, self._source, self._sink = mark, source, sink
        self._running: dict[str, StartedProcess] = {}  # by name
        self._orders = m.LineSplitter(m.MESSAGE_LIMIT)
        self._unsent = bytearray()
        self._left_out = 0  # lines dropped because of UNSENT
        self._going = True
        self._selector = selectors.DefaultSelector()
        for descriptor in (source, sink):
            os.set_blocking(descriptor, False)
        self._watch(source, self._read_orders)

    def run(self) -> None:
        """Carry out orders until the supervisor is gone, and then kill all processes of this
        agent."""
        adopt_orphans()
        # Only the supervisor reacts to Ctrl-C. Child processes would inherit SIG_IGN, but not a
        # handler that does nothing.
        signal.signal(signal.SIGINT, lambda *_: None)
        # A Ray thread starts agents with SIGINT blocked; child processes would inherit the block.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        kill_marked(f"{self._mark}#")  # processes left over from an earlier agent
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

    def _read_orders(self) -> None:
        data = os.read(self._source, READ)
        self._going = bool(data) and self._going
        for line, dropped in self._orders.feed(data):
            if dropped:
                raise SystemExit(f"an order is {dropped} bytes over the limit of {m.MESSAGE_LIMIT}")
            try:
                order = m.TO_AGENT.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise SystemExit(f"the supervisor sent an invalid order: {error}") from error
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
            refused = f"{name} is already running on {process.host}"
            return self._send(m.ProcessExited(name, REFUSED, refused))
        for file in process.files:
            if refused := put_file(file):
                return self._send(m.ProcessExited(name, REFUSED, refused))
        try:
            make_directory(Path(process.directory))
            started = StartedProcess(
                process.words,
                f"{self._mark}#{name};",
                partial(self._send_output, name),
                directory=process.directory,
                environment=process.environment,
            )
        except (RoadtrainError, OSError, subprocess.SubprocessError) as error:
            return self._send(m.ProcessExited(name, REFUSED, f"cannot start {name}: {error}"))
        self._running[name] = started
        for pipe in started.pipes:
            self._watch(pipe, partial(self._read, started, pipe))
        return None

    def _read(self, started: StartedProcess, pipe: int) -> None:
        if started.read(pipe) == 0:
            self._selector.unregister(pipe)

    def _end(self, name: str, grace_s: float) -> None:
        if (started := self._running.get(name)) is None:
            return  # the exit of the process is already reported
        if grace_s > 0:
            started.interrupt()
            started.kill_at = time.monotonic() + grace_s
        else:
            self._kill(started)

    def _kill(self, started: StartedProcess) -> None:
        started.kill()
        started.kill_at, started.give_up_at = None, time.monotonic() + GIVE_UP_S

    def _reap(self) -> None:
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):  # there is no child
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                ended[child[0]] = os.waitstatus_to_exitcode(child[1])
        for name, started in list(self._running.items()):
            if started.pid in ended:
                self._finish(name, ended[started.pid])

    def _finish(self, name: str, code: int) -> None:
        """Kill the descendants of a process that has ended, and report its exit."""
        started = self._running.pop(name)
        started.kill()
        for pipe in started.pipes:
            with contextlib.suppress(KeyError):  # `_read` unregistered the pipe at its end
                self._selector.unregister(pipe)
        started.finish(code)
        self._send(m.ProcessExited(name, code, started.last_line))

    def _end_late(self) -> None:
        """Kill the processes whose grace period is over, and report killed processes that hang as
        ended."""
        now = time.monotonic()
        for name, started in list(self._running.items()):
            if started.kill_at is not None and now >= started.kill_at:
                self._kill(started)
            elif started.give_up_at is not None and now >= started.give_up_at:
                text = f"process {started.pid} has not ended {GIVE_UP_S:.0f} s after it was killed"
                self._send_output(name, text)
                self._finish(name, -signal.SIGKILL)

    def _send_output(self, name: str, line: str) -> None:
        if len(self._unsent) > UNSENT:
            self._left_out += 1
            return
        if self._left_out:
            left, self._left_out = self._left_out, 0
            self._send(m.OutputLine(name, f"[{left} lines dropped: the supervisor is slow]"))
        self._send(m.OutputLine(name, line))

    def _send(self, message: m.FromAgent) -> None:
        idle = not self._unsent
        self._unsent += m.encode_line(message)
        if idle:
            self._flush()
            if self._unsent:
                self._watch(self._sink, self._flush_later, selectors.EVENT_WRITE)

    def _flush_later(self) -> None:
        self._flush()
        if not self._unsent:
            self._selector.unregister(self._sink)

    def _flush(self) -> None:
        self._going = m.write_some(self._sink, self._unsent) and self._going


def device_count() -> int:
    """Return the number of accelerators that processes on this host may use."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def main(mark: str) -> None:
    source, sink = (os.dup(descriptor) for descriptor in (0, 1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # other prints go to stderr: only messages may reach the supervisor
    HostAgent(mark, source, sink).run()


if __name__ == "__main__":
    main(sys.argv[1])
