"""The process of a run's supervisor, as a command sees it: start it, connect to it, ask it to stop.

On most engines it is a process of this host in a session of its own, which outlives the command;
an engine with `EngineKind.supervise` starts it elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

from roadtrain.errors import LaunchError, RoadtrainError
from roadtrain.launch.control_socket import ControlClient
from roadtrain.launch.engines import ENGINES, function_of, is_alive
from roadtrain.launch.home import LaunchRecord, RunHome
from roadtrain.launch.waiting import POLL_S, wait_until
from roadtrain.retry import undone_on_error

USER_ASKED = "the user asked for it"  # why a run ends
REFUSED = 2  # the exit code of a run of which nothing was started
STARTS_S = 30.0  # the supervisor's process has the run's lock within it
CHECKS_S = 600.0  # a supervisor has checked its hosts and listens within it


def start(home: RunHome, record: LaunchRecord) -> None:
    """Start the supervisor. Raises RoadtrainError where there is none then; the run has ended."""
    supervise = ENGINES[record.engine].supervise
    try:
        if supervise:
            function_of(supervise)(home)
        else:
            start_supervisor(home)
    except RoadtrainError as error:
        if not home.is_supervised() and home.state().phase == "starting":
            home.write_ended(REFUSED, f"it was not started: {error}")
        raise


def start_supervisor(home: RunHome) -> None:
    """A process of its own session, which outlives this one. Raises LaunchError where it does not
    begin."""
    log = home.log_directory / "supervisor.log"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "roadtrain.launch.supervise", str(home.path)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    with undone_on_error(process.kill):  # a Ctrl-C, too: nobody would know that the run begins
        begun = wait_until(
            lambda: home.is_supervised() or process.poll() is not None, STARTS_S, 0.02
        )
        if not begun:
            raise LaunchError(f"the supervisor did not begin within {STARTS_S:.0f} s: {log}")
        if process.returncode is not None and home.state().phase != "ended":  # else refused already
            raise LaunchError(f"the supervisor ended (code {process.returncode}): {log} says why")


@contextmanager
def patient_client(home: RunHome) -> Iterator[ControlClient | None]:
    """Connect to a supervisor that may still be checking hosts; None: it has ended."""
    deadline, client = time.monotonic() + CHECKS_S, None
    while client is None:
        try:
            client = ControlClient(home)
        except LaunchError as error:
            if not is_alive(home):
                break
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the supervisor of {home.name!r} is there, and has not listened within"
                    f" {CHECKS_S:.0f} s",
                    hint=f"{home.all_log} says what it waits for",
                ) from error
            time.sleep(POLL_S)
    with closing(client) if client is not None else nullcontext():
        yield client


def ask_to_stop(home: RunHome) -> bool:
    """Whether a supervisor was there to be asked."""
    with patient_client(home) as client:
        if client is not None:
            client.ask("stop", USER_ASKED)
        return client is not None
