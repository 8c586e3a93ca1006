"""`python -m roadtrain.launch.supervise HOME`: the supervisor process of a run. It creates the
engine, checks the hosts, and runs until the run has ended.

    supervisor   holds the run's lock, and restarts the standby if the standby ends
    standby      waits for the lock, and takes over the run when the supervisor is gone
                 (standby_main.py); on Ray, Ray itself restarts supervisors instead

The processes of a run end with its supervisor. Does NOT import torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from roadtrain.config.job import load_job
from roadtrain.config.plan_file import load_plan_file
from roadtrain.errors import FullError, LaunchError, RoadtrainError, StoreError
from roadtrain.launch.checks import check, directory_is_shared, without_unfit_spares
from roadtrain.launch.engines import ENGINES, STANDBY, function_of
from roadtrain.launch.home import LaunchRecord, RunHome, RunState, StartPhase
from roadtrain.launch.launch_engine import LaunchEngine
from roadtrain.launch.logs import RunLogs
from roadtrain.launch.protocol.run_events import FAILED, REFUSED
from roadtrain.launch.resolve import ResolvedRun, resolve
from roadtrain.launch.supervisor import Supervisor
from roadtrain.retry import undone_on_error
from roadtrain.transport.address import token_of

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 10.0  # minimum time between two starts of the standby


def supervise(home: RunHome) -> int:
    """Supervise a run to its end and return its exit code."""
    with home.supervised():
        return supervise_locked(home)


def supervise_locked(home: RunHome) -> int:
    """Supervise a run to its end and return its exit code. The process must hold the run's lock."""
    with RunLogs(home) as logs:
        for number in SIGNALS:
            signal.signal(number, not_started)
        try:
            record = home.record()
            os.chdir(record.directory)
            run, engine = prepare(home, record, logs)
        except (RoadtrainError, OSError) as error:
            if had_begun(home):  # the standby or Ray tries again
                logs.notify(f"the supervisor cannot resume the run: {error}")
                return FAILED
            logs.notify("nothing was started")
            refuse(home, logs, str(error))
            return REFUSED
        standby = Standby(home, logs.notify)
        held = bool(ENGINES[record.engine].supervise)  # Ray restarts this process
        supervisor = Supervisor(
            run,
            engine,
            home,
            logs,
            ends_with_launcher=record.if_launcher_dies == "stop",
            each_turn=None if held else standby.keep,
        )
        for number in SIGNALS:
            signal.signal(number, lambda n, _: supervisor.stop(f"signal {n}"))
        try:
            return supervisor.run()
        finally:
            standby.close()


def had_begun(home: RunHome) -> bool:
    """Return True if an earlier supervisor of this start may have started processes. Then an error
    is not the end of the run, because another supervisor tries again."""
    try:
        return StartPhase.CHECKED in home.state().stamps
    except LaunchError:
        return False


def not_started(number: int, _: object) -> None:
    """Raise LaunchError, as the signal handler until the checks have ended."""
    raise LaunchError(f"signal {number} arrived before any process was started")


def refuse(home: RunHome, logs: RunLogs, why: str) -> None:
    """Record in state.json that the launch was refused. `why`: the reason."""
    try:
        home.write_ended(REFUSED, why)
    except (LaunchError, StoreError) as error:  # only the log has the reason
        logs.notify(f"{why}; in addition, state.json could not be written: {error}")


def prepare(home: RunHome, record: LaunchRecord, logs: RunLogs) -> tuple[ResolvedRun, LaunchEngine]:
    """Create the engine, check its hosts and write the run's state. If there is a problem, close
    the engine and raise RoadtrainError."""
    plan_file = load_plan_file(home.plan_path)
    job = load_job(home.job_path)
    engine: LaunchEngine = function_of(ENGINES[record.engine].make)(plan_file, record)
    with undone_on_error(engine.close):
        addresses = {seen.name: seen.address for seen in engine.hosts()}
        if engine.resumed:  # a host may be down at the moment, so keep its earlier address
            addresses = {**home.addresses(), **addresses}
        written = partial(_written, had_begun(home), logs)
        written(partial(home.write_addresses, addresses))
        ready_at = time.time()
        run = resolve(
            plan_file,
            job,
            name=record.name,
            addresses=addresses,
            token=(token_of(str(home.token_path)) or b"").decode(),
        )
        run = replace(run, start=f"{record.launched:.3f}")
        warnings = [] if engine.resumed else check(run, engine)
        if run.job.parallelism.used:
            run = replace(run, shared=directory_is_shared(run, engine))
        run, unfit = without_unfit_spares(run, engine)
        for line in (*warnings, *unfit):
            logs.notify(line)
        state = home.state(logs.notify)
        # Stamps of an earlier supervisor of this start are kept.
        stamps = {StartPhase.READY: ready_at, StartPhase.CHECKED: time.time(), **state.stamps}
        checked = RunState(attempt=state.attempt, step=state.step, stamps=stamps, stops=state.stops)
        written(partial(home.write_state, checked))
    return run, engine


def _written(goes_on: bool, logs: RunLogs, write: Callable[[], None]) -> None:
    """Call `write`. A full disk raises FullError, or is only logged if `goes_on` is True, because a
    full disk must not end a run that has begun."""
    try:
        write()
    except FullError as error:
        if not goes_on:
            raise
        logs.notify(f"the run goes on, though its home is full: {error}".partition("\n")[0])


class Standby:
    """Starts and restarts the standby process of a supervisor. `notify`: function that logs a line
    for the user."""

    def __init__(self, home: RunHome, notify: Callable[[str], None]) -> None:
        self._home, self._notify = home, notify
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0  # earliest monotonic time of the next start

    def keep(self, now: float) -> None:
        """Start the standby if it is not running. After a failure, log the reason, and try again in
        a later call."""
        if now < self._start_at or (self._process is not None and self._process.poll() is None):
            return
        self._start_at = now + AGAIN_S
        words = [sys.executable, "-m", STANDBY, str(self._home.path)]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._notify(f"the standby could not be started, another try follows: {error}")

    def close(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    sys.exit(supervise(RunHome(Path(sys.argv[1]))))
