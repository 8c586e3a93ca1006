"""LaunchEngine: the interface that starts processes on hosts: this host, a lab, or a Ray cluster.
The supervisor (supervisor.py) and the checks before a start (checks.py) use nothing else of them.

An engine restarts nothing by itself, except for Ray's actors, whose restart it reports as
`ProcessRestarted`. Its processes end with it, so nothing is left when a supervisor dies.
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

ASK_S = 120.0  # timeout of a command of `LaunchEngine.ask`
Spawn = Callable[..., subprocess.Popen[Any]]


@dataclass(frozen=True)
class HostSeen:
    """A host that is up."""

    name: str  # its name in the plan if it is known there, else the engine's name for it
    address: str
    devices: int  # number of accelerators


class LaunchEngine(Protocol):
    """Starts and stops the processes of a run. All calls return soon, except `ask`."""

    resumed: bool
    """True if an earlier engine started this run and its processes may still be running. They may
    use stores and ports, so the hosts are not checked again."""

    def hosts(self) -> Sequence[HostSeen]:
        """Return the hosts that are up."""

    def ask(self, host: str, words: Sequence[str], request: Mapping[str, Any]) -> Any:
        """Run a short Python command (`-m MODULE ...`) on a host and return its answer. The command
        reads `request` as JSON from stdin and writes its answer as JSON to stdout. Raises
        LaunchError if the host cannot be reached or the command fails."""

    def run_verb(self, words: Sequence[str]) -> str:
        """Carry out a user's verb that is meant for the engine, and return the reply. All engines
        have `leaves HOST SECONDS` and `comes HOST`, whose outcome `events` reports; the lab has
        more. Raises LaunchError for an unknown verb or host."""

    def start(self, process: Process) -> None:
        """Start a server, reducer or switch; `events` reports its end. Raises LaunchError if its
        host is down."""

    def start_workers(self, workers: WorkerSet) -> None:
        """Start all workers. When all of them have ended, `events` reports one WorkersEnded. It
        names the first worker that failed or, if none failed, the last to end."""

    def stop(self, name: str, grace_s: float) -> None:
        """End a process, or all workers with the name "workers": SIGINT first, on which workers
        commit their step, then a kill after `grace_s` seconds. `events` reports the end."""

    def events(self, timeout_s: float) -> Sequence[RunEvent]:
        """Return the events since the last call. Waits up to `timeout_s` for the first. Lines of
        output are `Output` events."""

    def close(self) -> None:
        """End all processes that were started."""


def run_command(
    words: Sequence[str], stdin: str, spawn: Spawn = subprocess.Popen, **popen: Any
) -> tuple[int, str, str]:
    """Run a short Python command to its end and return its exit code, its stdout and the last line
    of its stderr. Raises OSError, and TimeoutExpired after ASK_S."""
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
    """Decode the result of `run_command`. Raises LaunchError if the command failed or its output
    is not JSON."""
    if code:
        why = last_line.removeprefix("roadtrain: ") or "it wrote nothing to stderr"
        raise LaunchError(f"{command} ended with code {code}: {why}")
    try:
        return json.loads(answer)
    except ValueError as error:
        raise LaunchError(f"the output of {command} is not JSON: {error}") from error
