"""Options of `roadtrain launch` that ask something of a run by its name: --stop, --resume, --logs,
--leaves and --comes. --replan is in replan.py."""

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
from roadtrain.launch.supervisor_process import ASKED, ask_to_stop, start
from roadtrain.launch.waiting import POLL_S, wait_until

STOPS_S = 600.0  # a run that is asked to stop has ended within it: a step, its services


def existing_run(name: str) -> RunHome:
    """Raises ConfigError where no run of this name was launched."""
    home = RunHome.of(name)
    home.record()
    return home


def stop_run(name: str) -> int:
    home = existing_run(name)
    if not is_alive(home) and not stay_stopped(home):
        print(f"run {name} does not run: {home.state().phase}")
        return 0
    tail = LogTail(home, log_size(home))
    # It may have been stopped to be planned anew, and have gone on before it could be asked.
    while not ask_to_stop(home) and not stay_stopped(home) and is_alive(home):
        time.sleep(POLL_S)
    record = home.record()

    def has_ended() -> bool:
        # before its last lines are read; another start is not waited for
        alive = is_alive(home) and home.record().launched == record.launched
        for line in tail.lines():
            print(line)
        return not alive

    if not wait_until(has_ended, STOPS_S):
        raise LaunchError(f"run {name} has not ended within {STOPS_S:.0f} s of being asked to")
    report_end(home, record)
    return 0


def stay_stopped(home: RunHome) -> bool:
    """Whether the run was stopped so that it is planned anew (paused_run.py): it does not go on
    then. Raises LaunchError where it is being started just now."""
    with home.starting():
        state = home.state()
        if is_alive(home) or (state.phase, state.why) != ("ended", PLANNED_ANEW):
            return False
        home.write_state(msgspec.structs.replace(state, why=ASKED))
        return True


def resume_run(
    name: str,
    if_launcher_dies: str,
    detach: bool,
    ray_address: str = "",
    *,
    paused: bool = False,
) -> int:
    """paused: it was stopped to be planned anew, and stays so where a user has said it since."""
    home = existing_run(name)
    with home.starting():
        if paused and home.state().why == ASKED:
            return report_end(home, home.record())
        record, offset = renew(home, if_launcher_dies, ray_address), log_size(home)
        start(home, record)
    return follow(home, record, offset, detach=detach)


def renew(home: RunHome, if_launcher_dies: str, ray_address: str) -> LaunchRecord:
    """The files of another start of a run. ray_address: where the cluster's head is now; "": where
    it was. Raises ConfigError where the run is alive."""
    record = home.record()
    if is_alive(home):
        raise ConfigError(f"run {home.name!r} is alive", hint=f"roadtrain status {home.name}")
    record = msgspec.structs.replace(
        record,
        start=record.start + 1,
        launched=time.time(),
        if_launcher_dies=if_launcher_dies,
        ray_address=ray_address or record.ray_address,
    )
    state = home.state(print)
    home.measured_path.unlink(missing_ok=True)  # of a plan that may not be this one
    # 0: a step was seen, so `run.new_store` holds no longer
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
    """Tell the engine of a run that a host leaves or comes, and print its answer."""
    name, _, host = run_and_host.partition(":")
    if not host:
        raise ConfigError(f"--{verb} {run_and_host}: which host?", hint=f"--{verb} NAME:HOST")
    print(ask_supervisor(existing_run(name), "tell", [verb, host, *words])["said"])
    return 0
