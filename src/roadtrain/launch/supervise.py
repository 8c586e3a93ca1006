"""`python -m roadtrain.launch.supervise HOME`: the supervisor of a run, a process of its own: makes
the engine, checks what is wrong before anything starts, and runs until the run has ended.

    supervisor   has the run's lock; keeps its standby alive
    standby      the process of standby_main.py: waits for the lock, which the kernel gives it when the
                 supervisor is gone, and goes on with the run

What a supervisor starts ends with it. One that ends by itself ends its standby before it lets the
lock go. Where something else starts supervisors again, as Ray does, there is no standby. Does NOT
import torch.
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
from roadtrain.launch.resolve import ResolvedRun, resolve
from roadtrain.launch.supervisor import FAILED, REFUSED, Supervisor
from roadtrain.retry import undone_on_error
from roadtrain.transport.address import token_of

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 10.0  # after a standby that has ended, or could not be started


def supervise(home: RunHome) -> int:
    """The run's exit code."""
    with home.supervised():
        return supervise_locked(home)


def supervise_locked(home: RunHome) -> int:
    """As `supervise`, in a process that has the run's lock."""
    with RunLogs(home) as logs:
        for number in SIGNALS:
            signal.signal(number, not_started)
        try:
            record = home.record()
            os.chdir(record.directory)
            run, engine = begun(home, record, logs)
        except (RoadtrainError, OSError) as error:
            if had_begun(home):  # whoever started this process again tries once more
                logs.notify(f"the supervisor cannot go on: {error}")
                return FAILED
            logs.notify("nothing was started")
            refuse(home, logs, str(error))
            return REFUSED
        standby = Standby(home, logs.notify)
        held = bool(ENGINES[record.engine].supervise)  # what holds this process starts it again
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
    """Whether a supervisor before this one had begun this start of the run: its services may still
    run, so this is no refusal of what was launched."""
    try:
        return StartPhase.CHECKED in home.state().stamps
    except LaunchError:
        return False


def not_started(number: int, _: object) -> None:
    """A signal that comes while hosts are checked."""
    raise LaunchError(f"signal {number} came before anything was started")


def refuse(home: RunHome, logs: RunLogs, why: str) -> None:
    try:
        home.write_ended(REFUSED, why)
    except (LaunchError, StoreError) as error:  # whoever follows the logs finds it there
        logs.notify(f"{why}; and state.json is not written: {error}")


def begun(home: RunHome, record: LaunchRecord, logs: RunLogs) -> tuple[ResolvedRun, LaunchEngine]:
    """The engine, and the run that it can run. Raises RoadtrainError, with nothing left, where
    anything is wrong."""
    plan_file = load_plan_file(home.plan_path)
    job = load_job(home.job_path)
    engine: LaunchEngine = function_of(ENGINES[record.engine].make)(plan_file, record)
    with undone_on_error(engine.close):
        addresses = {seen.name: seen.address for seen in engine.hosts()}
        if engine.resumed:  # a host may be gone, for now
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
        told = [] if engine.resumed else check(run, engine)
        if run.job.parallelism.used:
            run = replace(run, shared=directory_is_shared(run, engine))
        run, unfit = without_unfit_spares(run, engine)
        for line in (*told, *unfit):
            logs.notify(line)
        state = home.state(logs.notify)
        # those of the first supervisor of this start stay
        stamps = {StartPhase.READY: ready_at, StartPhase.CHECKED: time.time(), **state.stamps}
        checked = RunState(attempt=state.attempt, step=state.step, stamps=stamps, stops=state.stops)
        written(partial(home.write_state, checked))
    return run, engine


def _written(goes_on: bool, logs: RunLogs, write: Callable[[], None]) -> None:
    """A full home refuses a launch; a run that had begun goes on by what was written before."""
    try:
        write()
    except FullError as error:
        if not goes_on:
            raise
        logs.notify(f"the run goes on, though its home is full: {error}".partition("\n")[0])


class Standby:
    """The standby's process. `tell`: one line for the run's user."""

    def __init__(self, home: RunHome, tell: Callable[[str], None]) -> None:
        self._home, self._tell = home, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0  # not before, on the monotonic clock

    def keep(self, now: float) -> None:
        """Starts it, also again. Nothing that goes wrong with it ends a run."""
        if now < self._start_at or (self._process is not None and self._process.poll() is None):
            return
        self._start_at = now + AGAIN_S
        words = [sys.executable, "-m", STANDBY, str(self._home.path)]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._tell(f"the supervisor has no standby for now: {error}")

    def close(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    sys.exit(supervise(RunHome(Path(sys.argv[1]))))
