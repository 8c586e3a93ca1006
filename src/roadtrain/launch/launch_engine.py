"""LaunchEngine: the interface to run processes on hosts, for the supervisor (supervisor.py) and the
checks before a start (checks.py). The engines are this host, a lab, and a Ray cluster.

An engine restarts nothing by itself, except that Ray restarts the actor of a service. The processes
of an engine end when the engine ends, so that no process is left when a supervisor dies.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roadtrain.errors import LaunchError
from roadtrain.launch.processes import Process, WorkerSet
from roadtrain.launch.protocol.run_events import RunEvent
from roadtrain.retry import undone_on_error

ASK_S = 120.0  # timeout of a command that `LaunchEngine.ask` runs
Spawn = Callable[..., subprocess.Popen[Any]]


@dataclass(frozen=True)
class HostSeen:
    """A host that is up, as the engine reports it."""

    name: str  # the host's name in the plan, or the engine's name for a host not in the plan
    address: str
    devices: int  # number of accelerators


class LaunchEngine(Protocol):
    """Starts and stops the processes of a run. All calls return soon, except `ask`."""

    resumed: bool
    """True if an earlier engine has started this run and processes of the run may still be running.
    The hosts are not checked again, because those processes may use stores and ports."""

    def hosts(self) -> Sequence[HostSeen]:
        """Return the hosts that are up."""

    def ask(self, host: str, words: Sequence[str], request: Mapping[str, Any]) -> Any:
        """Run a short Python command (`-m MODULE ...`) on a host and return its answer. The command
        reads `request` as JSON from stdin and writes its answer as JSON to stdout. Raises
        LaunchError if the host cannot be reached or the command fails."""

    def run_verb(self, words: Sequence[str]) -> str:
        """Carry out a command that a user gives to the engine, and return a reply for the user.
        `words`: a verb and its arguments, such as `leaves HOST SECONDS` and `comes HOST`, which all
        engines know. Raises LaunchError if the verb or the host is unknown."""

    def start(self, process: Process) -> None:
        """Start a server, reducer or switch. `events` reports the end of the process. Raises
        LaunchError if the host of the process is down."""

    def start_workers(self, workers: WorkerSet) -> None:
        """Start all workers. After their end, `events` returns one WorkersEnded, which names the
        first worker that failed or, if none failed, the last that ended."""

    def stop(self, name: str, grace_s: float) -> None:
        """End a process, or all workers if `name` is "workers". It gets SIGINT, on which a worker
        commits its step, and is killed after `grace_s` seconds. `events` reports the end."""

    def events(self, timeout_s: float) -> Sequence[RunEvent]:
        """Return the events since the last call, or wait for an event for at most `timeout_s`
        seconds. A line that a process prints is an `Output` event."""

    def close(self) -> None:
        """End all processes that the engine has started."""


def run_command(
    words: Sequence[str], stdin: str, spawn: Spawn = subprocess.Popen, **popen: Any
) -> tuple[int, str, str]:
    """Run a short Python command to its end. Return the exit code, the text on stdout and the last
    line on stderr. `spawn`: a function like Popen that starts the command. `popen`: its further
    arguments. Raises OSError if the command cannot be started, and TimeoutExpired if it does not
    end within a fixed time."""
    process = spawn(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        **popen,
    )
    with undone_on_error(process.kill):
        answer, errors = process.communicate(stdin, timeout=ASK_S)
    lines = [line for line in errors.splitlines() if line.strip()]
    return process.returncode, answer, lines[-1] if lines else ""


def answer_of(command: str, code: int, answer: str, last_line: str) -> Any:
    """Return the value of the JSON that a command has printed. `command`: a description for
    messages. The other arguments are the results of `run_command`. Raises LaunchError if the
    command failed or its output is not JSON."""
    if code:
        why = last_line.removeprefix("roadtrain: ") or "it wrote nothing to stderr"
        raise LaunchError(f"{command} ended with code {code}: {why}")
    try:
        return json.loads(answer)
    except ValueError as error:
        raise LaunchError(f"the output of {command} is not JSON: {error}") from error
