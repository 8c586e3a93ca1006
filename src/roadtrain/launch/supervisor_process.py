"""Start the supervisor process of a run, connect to the supervisor, and ask it to stop the run. The
process is in a session of its own, so that it outlives the command."""

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
from roadtrain.launch.protocol.run_events import REFUSED
from roadtrain.launch.waiting import POLL_S, wait_until
from roadtrain.retry import undone_on_error

USER_ASKED = "the user asked for it"  # `RunState.why` of a run that the user stopped
STARTS_S = 30.0  # timeout for the supervisor process to take the run's lock
CHECKS_S = 600.0  # timeout for a supervisor to check its hosts and to listen for requests


def start(home: RunHome, record: LaunchRecord) -> None:
    """Start the supervisor of a run. If this fails, record the end of the run and raise
    RoadtrainError."""
    supervise = ENGINES[record.engine].supervise
    try:
        if supervise:
            function_of(supervise)(home)
        else:
            start_supervisor(home)
    except RoadtrainError as error:
        if not home.is_supervised() and home.state().phase == "starting":
            home.write_ended(REFUSED, f"the supervisor could not be started: {error}")
        raise


def start_supervisor(home: RunHome) -> None:
    """Start the supervisor in a session of its own. Raises LaunchError if it does not start."""
    log = home.log_directory / "supervisor.log"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "roadtrain.launch.supervise", str(home.path)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    with undone_on_error(process.kill):  # after Ctrl-C, no run may go on in the background
        begun = wait_until(
            lambda: home.is_supervised() or process.poll() is not None, STARTS_S, 0.02
        )
        if not begun:
            raise LaunchError(f"the supervisor did not start within {STARTS_S:.0f} s: see {log}")
        # A supervisor that has refused the run has ended too, but with phase "ended".
        if process.returncode is not None and home.state().phase != "ended":
            raise LaunchError(f"the supervisor ended (code {process.returncode}): see {log}")


@contextmanager
def patient_client(home: RunHome) -> Iterator[ControlClient | None]:
    """Yield a connection to a run's supervisor, or None if it has ended. Wait while the supervisor
    checks hosts. Raises LaunchError if it does not answer in time."""
    deadline, client = time.monotonic() + CHECKS_S, None
    while client is None:
        try:
            client = ControlClient(home)
        except LaunchError as error:
            if not is_alive(home):
                break
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the supervisor of run {home.name!r} is alive, but has not answered within"
                    f" {CHECKS_S:.0f} s",
                    hint=f"see {home.all_log}",
                ) from error
            time.sleep(POLL_S)
    with closing(client) if client is not None else nullcontext():
        yield client


def ask_to_stop(home: RunHome) -> bool:
    """Ask the supervisor to stop the run. Return False if there is no supervisor."""
    with patient_client(home) as client:
        if client is not None:
            client.ask("stop", USER_ASKED)
        return client is not None
