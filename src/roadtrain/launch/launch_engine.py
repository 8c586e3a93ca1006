"""LaunchEngine: what starts processes on hosts: this host, a lab, or a Ray cluster. The supervisor
(supervisor.py) and the checks before a start (checks.py) know nothing else of them.

An engine restarts nothing by itself, unless its users expect it to (Ray's actors): then it says
`ProcessRestarted`. What it started ends with it, so nothing is left when a supervisor dies.
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

ASK_S = 120.0  # a command of `LaunchEngine.ask` has ended within it
Begin = Callable[..., subprocess.Popen[Any]]


@dataclass(frozen=True)
class HostSeen:
    """A host that an engine has now."""

    name: str  # as the plan calls it, where it can be told; else as the engine does
    address: str
    devices: int  # accelerators; where there are none, 0


class LaunchEngine(Protocol):
    """All calls return soon, but `ask`, which takes as long as its command."""

    goes_on: bool
    """An engine before this one had begun this run, and what it started may have outlived it. So
    stores and ports may be in use, and nothing is checked anew."""

    def hosts(self) -> Sequence[HostSeen]:
        """Those that are alive."""

    def ask(self, host: str, words: Sequence[str], told: Mapping[str, Any]) -> Any:
        """The answer (JSON on its standard output) of a short command of ours (`-m MODULE ...`)
        on a host, which gets `told` (JSON) on its standard input. Raises LaunchError where the
        host cannot be reached or the command fails."""

    def tell(self, words: Sequence[str]) -> str:
        """A verb of the user for this engine alone, as the control socket got it, and what to
        answer. All of ours know `leaves HOST SECONDS` and `comes HOST`, whose outcome is told by
        `events`; the lab more. Raises LaunchError for a verb or a host that it does not know."""

    def start(self, process: Process) -> None:
        """Begin a server, reducer or switch. Its end is told by `events`. Raises LaunchError where
        its host is not there."""

    def start_workers(self, workers: WorkerSet) -> None:
        """Begin all workers. The end of the first of them that fails, or of the last of them, is
        told by `events` as WorkersEnded; the others have ended before."""

    def stop(self, name: str, grace_s: float) -> None:
        """End a process, or with "workers" all of them: interrupted (SIGINT) first, which commits
        the step, killed after `grace_s`. Its end is told by `events`."""

    def events(self, timeout_s: float) -> Sequence[RunEvent]:
        """What has happened since the last call; waits for the first at most so long. Lines of
        output are `Output` events."""

    def close(self) -> None:
        """End all that was started."""


def run_command(
    words: Sequence[str], told: str, begin: Begin = subprocess.Popen, **popen: Any
) -> tuple[int, str, str]:
    """Run a short command of ours to its end: its code, its standard output, its last words.
    `begin` starts it as Popen would. Raises OSError, and TimeoutExpired after ASK_S."""
    process = begin(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        **popen,
    )
    with undone_on_error(process.kill):
        answer, errors = process.communicate(told, timeout=ASK_S)
    said = [line for line in errors.splitlines() if line.strip()]
    return process.returncode, answer, said[-1] if said else ""


def answer_of(what: str, code: int, answer: str, last_words: str) -> Any:
    """Decode what `run_command` has found. Raises LaunchError where the command failed or answered
    no JSON."""
    if code:
        why = last_words.removeprefix("roadtrain: ") or "it said nothing"
        raise LaunchError(f"{what} ended with code {code}: {why}")
    try:
        return json.loads(answer)
    except ValueError as error:
        raise LaunchError(f"{what} answered what is no JSON: {error}") from error
