"""Start the supervisor of a run on Ray. The supervisor is a process `python -m
roadtrain.launch.supervise`, run by a detached actor "roadtrain:RUN" on the node on which the user
launched the run. Ray restarts a killed actor, which restarts the supervisor. So the run survives
the end of its launcher.

The supervisor is a Ray driver of its own, so that the workers and their placement groups end with
it. The run's home is on the node of the actor, so all commands on the run must be given on that
node.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import ray

from roadtrain.errors import LaunchError
from roadtrain.launch.home import RunHome, RunState, StartPhase
from roadtrain.launch.processes import THREADS, Process, Role
from roadtrain.launch.protocol.run_events import ProcessEnded
from roadtrain.launch.ray import ray_cluster
from roadtrain.launch.ray.actors import actor_name, end_actors, is_there, kill_named
from roadtrain.launch.ray.held_process import HeldProcess, ProcessEvent, to_ray_log
from roadtrain.launch.waiting import wait_until
from roadtrain.retry import retry

STARTS_S = 120.0  # timeout for the supervisor to take the run's lock or refuse the run
TRIES = 6  # number of consecutive early ends after which the supervisor is not restarted
SOON_S = 60.0  # the end of a supervisor is early if it has run for less than this time
AGAIN_S = 1.0  # pause between restarts
NAME_S = 15.0  # timeout for the actor of an ended run to disappear


class SupervisedRun:
    """The actor that runs the supervisor of a run, and restarts it after a failure, until the run
    has ended. `path`: the directory of the run's home. `name`: the name of this actor. `launched`:
    the time of this launch; a run with another time was resumed by a later command."""

    def __init__(
        self, path: str, name: str, environment: dict[str, str], launched: float | None
    ) -> None:
        self._home, self._name, self._launched = RunHome(Path(path)), name, launched
        # There is no role for a supervisor, and no code that handles this process reads its role.
        self._process = Process(
            "supervisor",
            Role.SERVER,
            os.uname().nodename,
            ("-m", "roadtrain.launch.supervise", path),
            path,
            environment,
        )
        self._last_line = ""  # last line on the last supervisor's stderr
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def _run(self) -> None:
        try:
            self._supervise()
        finally:  # a killed supervisor leaves its services and its request for nodes
            end_actors(self._name)
            ray_cluster.request_nodes([])
            kill_named(self._name)

    def _supervise(self) -> None:
        """Run the supervisor until the run has ended. After several early ends in a row, record the
        run as failed."""
        failed = 0
        while not self._has_ended():
            began = time.monotonic()
            held = HeldProcess(self._process, self._name, self._record)
            while held.alive:
                held.wait(SOON_S)
            failed = failed + 1 if time.monotonic() - began < SOON_S else 0
            if failed >= TRIES and not self._has_ended():
                why = f"the supervisor ended {failed} times in a row: {self._last_line}"
                self._home.write_ended(1, why)
                return
            if failed and not self._has_ended():
                time.sleep(AGAIN_S)

    def _has_ended(self) -> bool:
        """Return True if the actor must end. Raises LaunchError if the run's state cannot be
        read."""
        return retry(lambda: self._is_over(self._home.state()), LaunchError, TRIES * AGAIN_S)

    def _is_over(self, state: RunState) -> bool:
        """Return True if the run has ended, or was resumed later with a new SupervisedRun."""
        launched = state.stamps.get(StartPhase.LAUNCHED, self._launched)
        return state.phase == "ended" or launched != self._launched

    def _record(self, event: ProcessEvent) -> None:
        to_ray_log(event, self._process.host)
        if isinstance(event, ProcessEnded):
            self._last_line = event.last_line or f"code {event.code}"


def start_supervisor(home: RunHome) -> None:
    """Start the supervisor of a run on Ray, and wait until it has the run's lock or has refused the
    run. Raises LaunchError if the supervisor does not start."""
    record = home.record()
    ray_cluster.connect(record.ray_address)
    try:
        _start(home, actor_name(record.name))
    finally:
        ray.shutdown()


def _start(home: RunHome, name: str) -> None:
    _await_name(home, name)
    here = ray.get_runtime_context().get_node_id()
    supervised = ray.remote(num_cpus=0, max_restarts=-1)(SupervisedRun).options(
        name=name,
        lifetime="detached",
        scheduling_strategy=ray_cluster.on_node(here),
    )
    environment = {
        "HOME": str(Path.home()),
        ray_cluster.USERS_THREADS: os.environ.get(THREADS, ""),
    }
    launched = home.state().stamps.get(StartPhase.LAUNCHED)
    actor = supervised.remote(str(home.path), name, environment, launched)
    try:
        _await_supervisor(home)
    except BaseException:  # after Ctrl-C, no run may go on without the user's knowledge
        ray.kill(actor, no_restart=True)
        end_actors(name)
        raise


def _await_supervisor(home: RunHome) -> None:
    if not wait_until(lambda: home.is_supervised() or home.state().phase == "ended", STARTS_S):
        raise LaunchError(f"the supervisor did not start on Ray within {STARTS_S:.0f} s")


def _await_name(home: RunHome, name: str) -> None:
    """Wait until the actor of an earlier run with this name has ended. Raises LaunchError if it
    does not end."""
    wait_until(lambda: home.is_supervised() or not is_there(name), NAME_S)
    if is_there(name):
        raise LaunchError(
            f"the cluster has an actor {name}: a run of this name is still running",
            hint=f"use another --name, or give launch --stop {home.name} on the run's launch host",
        )


def is_alive(home: RunHome) -> bool:
    """Return True if an actor exists that will restart the run's supervisor."""
    record = home.record()
    try:
        ray_cluster.connect(record.ray_address)
    except LaunchError:  # the actor belongs to this host's node, and may return while that is up
        return ray_cluster.has_node_here(record.ray_address)
    try:
        return is_there(actor_name(record.name))
    finally:
        ray.shutdown()
