"""The supervisor of a run on Ray: `python -m roadtrain.launch.supervise`, as everywhere, a process
that a detached actor "roadtrain:RUN" holds on the node where the run was launched. So the launcher
may die: Ray starts the actor again when it is killed, the actor its process.

That process is a driver of its own. Workers and their places are its, so that they end with it
whatever happens; were the actor itself the driver, Ray would take the workers' places away
as soon as the launcher ends. It finds the services again, and begins the workers anew. The run's
home stays on this node, so everything that is asked of a run by its name is asked here.
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

STARTS_S = 120.0  # the supervisor's process has the run's lock, or has refused, within it
TRIES = 6  # of a supervisor that ends soon
SOON_S = 60.0
AGAIN_S = 1.0
NAME_S = 15.0  # an actor whose run has ended is gone within it


class SupervisedRun:
    """The actor. It ends with the run, and with this start of it. launched: of the start."""

    def __init__(
        self, path: str, name: str, environment: dict[str, str], launched: float | None
    ) -> None:
        self._home, self._name, self._launched = RunHome(Path(path)), name, launched
        # No role of a run's own: what starts and ends it does not look at that.
        self._process = Process(
            "supervisor",
            Role.SERVER,
            os.uname().nodename,
            ("-m", "roadtrain.launch.supervise", path),
            path,
            environment,
        )
        self._said = ""
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def _run(self) -> None:
        try:
            self._supervise()
        finally:  # a supervisor that was killed has left its services, and what it asked for
            end_actors(self._name)
            ray_cluster.ask_for([])
            kill_named(self._name)

    def _supervise(self) -> None:
        """Until the run has ended, or its supervisor is given up."""
        failed = 0
        while not self._has_ended():
            began = time.monotonic()
            held = HeldProcess(self._process, self._name, self._tell)
            while held.alive:
                held.wait(SOON_S)
            failed = failed + 1 if time.monotonic() - began < SOON_S else 0
            if failed >= TRIES and not self._has_ended():
                why = f"the supervisor ended {failed} times in a row: {self._said}"
                self._home.write_ended(1, why)
                return
            if failed and not self._has_ended():
                time.sleep(AGAIN_S)

    def _has_ended(self) -> bool:
        """Raises LaunchError where that cannot be read, also not a little later."""
        return retry(lambda: self._is_over(self._home.state()), LaunchError, TRIES * AGAIN_S)

    def _is_over(self, state: RunState) -> bool:
        """Also where the run was launched anew meanwhile: that one has an actor of its own."""
        launched = state.stamps.get(StartPhase.LAUNCHED, self._launched)
        return state.phase == "ended" or launched != self._launched

    def _tell(self, event: ProcessEvent) -> None:
        to_ray_log(event, self._process.host)
        if isinstance(event, ProcessEnded):
            self._said = event.last_line or f"code {event.code}"


def start_supervisor(home: RunHome) -> None:
    """Returns when it has begun, or has refused the run. Raises LaunchError."""
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
    except BaseException:  # a Ctrl-C, too: nobody would know that the run begins
        ray.kill(actor, no_restart=True)
        end_actors(name)
        raise


def _await_supervisor(home: RunHome) -> None:
    if not wait_until(lambda: home.is_supervised() or home.state().phase == "ended", STARTS_S):
        raise LaunchError(f"the supervisor did not begin on Ray within {STARTS_S:.0f} s")


def _await_name(home: RunHome, name: str) -> None:
    """The actor of a run that has just ended lives for a moment. Raises LaunchError."""
    wait_until(lambda: home.is_supervised() or not is_there(name), NAME_S)
    if is_there(name):
        raise LaunchError(
            f"the cluster has an actor {name}: a run of this name is alive there",
            hint=f"another --name, or roadtrain launch --stop {home.name} where it was launched",
        )


def is_alive(home: RunHome) -> bool:
    """Whether there is an actor that starts the run's supervisor again."""
    record = home.record()
    try:
        ray_cluster.connect(record.ray_address)
    except LaunchError:  # the actor is on this host: it may come again while its node is there
        return ray_cluster.has_node_here(record.ray_address)
    try:
        return is_there(actor_name(record.name))
    finally:
        ray.shutdown()
