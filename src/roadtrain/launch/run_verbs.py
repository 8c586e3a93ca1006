"""Carry out the options of `roadtrain launch` that act on an existing run: --stop, --resume,
--logs, --leaves and --comes. (For --replan, see replan.py.)"""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from roadtrain.errors import ConfigError, LaunchError
from roadtrain.launch.control_socket import ask_supervisor
from roadtrain.launch.engines import is_alive
from roadtrain.launch.follow import follow, log_size, report_end, show_until_end
from roadtrain.launch.home import PLANNED_ANEW, LaunchRecord, RunHome, RunState, StartPhase
from roadtrain.launch.logs import LogTail
from roadtrain.launch.supervisor_process import USER_ASKED, ask_to_stop, start
from roadtrain.launch.waiting import POLL_S, wait_until

STOPS_S = 600.0  # timeout for a run to finish its step and end its services


def existing_run(name: str) -> RunHome:
    """Return the home of a run. Raises ConfigError if no run of this name was launched."""
    home = RunHome.of(name)
    home.record()
    return home


def stop_run(name: str) -> int:
    home = existing_run(name)
    if not is_alive(home) and not stay_stopped(home):
        print(f"run {name} is not running: {home.state().phase}")
        return 0
    tail = LogTail(home, log_size(home))
    # A run paused for --replan may be resumed between these checks, so repeat them until the run is
    # asked to stop, stays stopped, or has ended.
    while not ask_to_stop(home) and not stay_stopped(home) and is_alive(home):
        time.sleep(POLL_S)
    record = home.record()

    def has_ended() -> bool:
        # Must precede the read of the last lines. A later start of the run is not waited for.
        alive = is_alive(home) and home.record().launched == record.launched
        for line in tail.lines():
            print(line)
        return not alive

    if not wait_until(has_ended, STOPS_S):
        raise LaunchError(f"run {name} was told to stop, but has not ended within {STOPS_S:.0f} s")
    report_end(home, record)
    return 0


def stay_stopped(home: RunHome) -> bool:
    """Keep a replan command that has paused the run from resuming it. Return False if the run is
    not paused. Raises LaunchError if another command is starting the run."""
    with home.starting():
        state = home.state()
        if is_alive(home) or (state.phase, state.why) != ("ended", PLANNED_ANEW):
            return False
        home.write_state(msgspec.structs.replace(state, why=USER_ASKED))
        return True


def resume_run(
    name: str,
    if_launcher_dies: str,
    detach: bool,
    ray_address: str = "",
    *,
    paused: bool = False,
) -> int:
    """Resume a run that has ended, and print its log until the run ends again, unless `detach` is
    True. Return the exit code of the command. `ray_address`: the HOST:PORT of the Ray cluster's
    head; "" for the recorded address. `paused`: True if a replan command has stopped the run and
    now resumes it, unless the user has stopped the run in the meantime."""
    home = existing_run(name)
    with home.starting():
        if paused and home.state().why == USER_ASKED:
            return report_end(home, home.record())
        record, offset = renew(home, if_launcher_dies, ray_address), log_size(home)
        start(home, record)
    return follow(home, record, offset, detach=detach)


def renew(home: RunHome, if_launcher_dies: str, ray_address: str) -> LaunchRecord:
    """Write the files for another start of a run, and return the new launch record. The arguments
    are those of `resume_run`. Raises ConfigError if the run is still running."""
    record = home.record()
    if is_alive(home):
        raise ConfigError(f"run {home.name!r} is running", hint=f"roadtrain status {home.name}")
    record = msgspec.structs.replace(
        record,
        start=record.start + 1,
        launched=time.time(),
        if_launcher_dies=if_launcher_dies,
        ray_address=ray_address or record.ray_address,
    )
    state = home.state(print)
    home.measured_path.unlink(missing_ok=True)  # its times may be those of another plan
    # If a step was seen, the step must be at least 0, so that `run.new_store` does not apply.
    step = max(0, state.step) if StartPhase.STEPPED in state.stamps else state.step
    stamps: dict[str, float] = {StartPhase.LAUNCHED: record.launched}
    home.write_state(RunState(attempt=state.attempt, step=step, stamps=stamps))
    home.write_record(record)
    return record


def show_logs(name: str) -> int:
    home = existing_run(name)
    with suppress(KeyboardInterrupt):
        show_until_end(home, 0)
    return 0


def tell_host(verb: str, run_and_host: str, *words: str) -> int:
    """Announce to a run's engine that a host leaves or comes (`verb`), and print the engine's
    reply. Return the exit code of the command. `run_and_host`: the text NAME:HOST. `words`: the
    arguments after the host."""
    name, _, host = run_and_host.partition(":")
    if not host:
        raise ConfigError(f"--{verb} {run_and_host} names no host", hint=f"--{verb} NAME:HOST")
    print(ask_supervisor(existing_run(name), "tell", [verb, host, *words])["said"])
    return 0
