"""RayEngine: the LaunchEngine of a Ray cluster. The process of the engine is a Ray driver.

    a server, reducer or switch   runs in a detached actor ServedProcess "roadtrain:RUN:NAME", which
                                  is bound to the node of its host and restarted by Ray if killed
    the workers                   run in Ray Train (workers.py); the workers end when this driver
                                  ends
    a host                        is a node (nodes.py)

If the driver is killed, the workers end, but the services keep running, and a new engine of the
same run keeps them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from roadtrain.config.machines import PlanHost
from roadtrain.config.plan_file import PlanFile
from roadtrain.errors import LaunchError
from roadtrain.launch.engines import machines_of
from roadtrain.launch.home import LaunchRecord, RunHome, StartPhase
from roadtrain.launch.launch_engine import ASK_S, HostSeen, answer_of, run_command
from roadtrain.launch.processes import Process, WorkerSet, with_threads
from roadtrain.launch.protocol.run_events import (
    HostJoined,
    HostLeaving,
    HostLost,
    Output,
    ProcessEnded,
    ProcessRestarted,
    RunEvent,
    WorkersPlaced,
)
from roadtrain.launch.ray import ray_cluster
from roadtrain.launch.ray.actors import (
    EventBatch,
    ServedProcess,
    WorkerBegun,
    WorkerMailbox,
    actor_name,
    end_actors,
    kill_named,
    service_actor,
    service_actors,
)
from roadtrain.launch.ray.nodes import HostMap, RayNode
from roadtrain.launch.ray.workers import (
    RayWorkers,
    ray_workers,
    remove_old_places,
    set_environment,
    threads_of,
)

WORKERS = "workers"  # the name that stands for all workers in `stop`
BEGIN_S = 60.0  # timeout for an actor to start
LOOK_S = 0.5  # interval of the checks of the nodes
PATIENCE_S = 2.0  # duration of a long poll
AGAIN_S = 0.5  # pause before an actor is polled again after a failure
SILENT_S = 60.0  # an actor that answers no poll for this long is replaced
DRAIN_S = 30.0  # timeout for reading the rest of the mailbox
NAME_S = 15.0  # timeout for the name of a killed actor to become free
KILLED = -9  # exit code of a process that signal 9 killed


@dataclass
class _PolledActor:
    """An actor that is polled for events. Invariant: at most one poll is in flight."""

    actor: Any
    process: Process | None  # the process of a service, or None for the workers' mailbox
    life: str = ""  # `life` of the actor's last reply
    after: int = 0  # sequence number of the next event to fetch
    poll: Any = None  # the ObjectRef of the poll in flight, or None
    poll_at: float = 0.0  # earliest monotonic time of the next poll
    silent_since: float | None = None  # monotonic time of the first poll without an answer


class RayEngine:
    """A LaunchEngine on Ray. The process must be connected to the cluster (ray_cluster.connect).

    Args:
        hosts: The plan's hosts.
        mark: The name of the run on the cluster, with which the names of service actors begin.
        spares: The plan's spare hosts.
        addresses: For a host name, the address of the host's node in earlier starts of the run.
        begun: If True, running services of the run are kept. If False, they belong to an earlier
            launch and are ended.
        directory: The directory for files of Ray Train.

    Raises:
        LaunchError: `begun` is False and a host of the plan, other than a spare host, has no node.
    """

    def __init__(
        self,
        hosts: Sequence[PlanHost],
        mark: str,
        *,
        spares: Sequence[PlanHost] = (),
        addresses: Mapping[str, str] | None = None,
        begun: bool = False,
        directory: Path | None = None,
    ) -> None:
        set_environment()
        self._mark, self._directory = mark, directory
        self._events: list[RunEvent] = []
        self._map = HostMap(hosts, spares, addresses)
        self._services: dict[str, _PolledActor] = {}
        self.resumed = begun
        self._workers: RayWorkers | None = None
        self._looked_at = 0.0
        if begun:
            for name, (actor, process, node) in _found(mark).items():
                self._map.remember(process.host, node)
                self._services[name] = _PolledActor(actor, process, after=-1)
        else:
            end_services(mark)
        self._look()
        self._refuse_missing(hosts)
        self._events += self._map.missing_events()
        self._events += self._others_with_services((*hosts, *spares))
        ray_cluster.request_nodes(self._map.places_of_workers())
        here = ray_cluster.on_node(ray.get_runtime_context().get_node_id())
        # A killed mailbox is restarted without an attempt, which ends the workers that use it.
        mailbox = ray.remote(num_cpus=0, max_concurrency=64, max_restarts=-1)(WorkerMailbox)
        self._mailbox = _PolledActor(mailbox.options(scheduling_strategy=here).remote(), None)

    def _refuse_missing(self, hosts: Sequence[PlanHost]) -> None:
        missing = [host for host in self._map.missing() if host in hosts]
        if missing and not self.resumed:
            was_at = self._map.was_at(missing[0].name)
            raise LaunchError(_no_node(missing[0], was_at, ray_cluster.nodes()))

    def _others_with_services(self, plan: Sequence[PlanHost]) -> list[RunEvent]:
        """Return an event HostJoined for each host that is not in the plan but runs a reducer of an
        earlier engine."""
        planned = {host.name for host in plan}
        services = {actor.process.host for actor in self._services.values() if actor.process}
        return [
            HostJoined(name, self._map.address_of(name), self._map.workers_of(name))
            for name in self._map.hosts
            if name in services - planned
        ]

    def hosts(self) -> Sequence[HostSeen]:
        self._look()
        return [
            HostSeen(name, self._map.address_of(name), node.devices)
            for name, node in self._map.hosts.items()
        ]

    def ask(self, host: str, words: Sequence[str], request: Mapping[str, Any]) -> Any:
        command = f"`{' '.join(words)}` on {host}"
        task = ray.remote(num_cpus=0, max_retries=0)(run_command)
        there = task.options(scheduling_strategy=ray_cluster.on_node(self._node(host).node_id))
        ref = there.remote(tuple(words), json.dumps(request))
        try:
            done = ray.get(ref, timeout=ASK_S)
        except GetTimeoutError as error:
            ray.cancel(ref, force=True)
            raise LaunchError(f"{command} did not end within {ASK_S:.0f} s") from error
        except RayError as error:
            raise LaunchError(f"{command}: {_first_line(error)}") from error
        return answer_of(command, *done)

    def _node(self, host: str) -> RayNode:
        if (node := self._map.hosts.get(host)) is None:
            names = ", ".join(self._map.hosts)
            raise LaunchError(f"host {host} has no Ray node", hint=f"hosts with a node: {names}")
        return node

    def run_verb(self, words: Sequence[str]) -> str:
        match words:
            case ["leaves", host, seconds] if seconds.replace(".", "", 1).isdecimal():
                self._node(host)
                self._events.append(HostLeaving(host, float(seconds)))
                return f"{host} leaves within {float(seconds):g} s"
            case ["comes", host]:
                self._node(host)
                address, workers = self._map.address_of(host), self._map.workers_of(host)
                self._events.append(HostJoined(host, address, workers))
                return f"{host} comes"
        raise LaunchError(
            f"the Ray engine does not know the verb `{' '.join(words)}`",
            hint="the verbs are `leaves HOST SECONDS` and `comes HOST`",
        )

    def start(self, process: Process) -> None:
        running = self._services.get(process.name)
        if running is not None and running.process == process:
            return  # an earlier engine has started the process
        actor = self._create(process, self._node(process.host))
        self._services[process.name] = _PolledActor(actor, process)

    def _create(self, process: Process, node: RayNode) -> Any:
        served = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=8)(ServedProcess)
        named = served.options(
            name=service_actor(self._mark, process.name),
            lifetime="detached",
            scheduling_strategy=ray_cluster.on_node(node.node_id),
        )
        deadline = time.monotonic() + NAME_S
        while True:
            try:
                return named.remote(process, self._mark)
            except ValueError:  # the actor that had the name is still ending
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"the actor {service_actor(self._mark, process.name)} was killed, but has"
                        f" not ended within {NAME_S:.0f} s"
                    ) from None
                kill_named(service_actor(self._mark, process.name))
                time.sleep(0.1)

    def start_workers(self, workers: WorkerSet) -> None:
        assert self._workers is None, "the workers of the previous attempt have not ended"
        for process in workers.processes:
            self._node(process.host)
        nodes = self._map.hosts
        users = os.environ.get(ray_cluster.USERS_THREADS, "")
        workers = with_threads(workers, threads_of(workers, nodes), users)
        with suppress(RayError, RuntimeError):
            remove_old_places()
        self._remove_directory()  # has files of the previous attempt
        self._workers = ray_workers(
            workers, nodes, self._mailbox.actor, self._mark, self._directory
        )

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def stop(self, name: str, grace_s: float) -> None:
        if name == WORKERS:
            if self._workers is not None:
                self._workers.stop(grace_s)
        elif name in self._services:
            self._services[name].actor.stop.remote(grace_s)

    def events(self, timeout_s: float) -> Sequence[RunEvent]:
        deadline = time.monotonic() + timeout_s
        while True:
            if time.monotonic() - self._looked_at > LOOK_S:
                self._look()
            left = deadline - time.monotonic()
            self._poll_actors(0.0 if self._events else max(0.0, min(left, LOOK_S)))
            if self._workers is not None and self._workers.is_over():
                self._drain_mailbox()
                self._events.append(self._workers.ended())
                self._workers = None
            if self._events or left <= 0:
                events, self._events = self._events, []
                return events

    def _look(self) -> None:
        """Check which nodes are alive, and queue the resulting events, such as HostLost."""
        self._looked_at = time.monotonic()
        found = self._map.look(ray_cluster.nodes(), ray_cluster.why_dead)
        for event in found:
            if isinstance(event, HostLost):
                self._forget_services(event.host)
                if self._workers is not None:
                    self._workers.lose(event.host)
        self._events += found

    def _forget_services(self, host: str) -> None:
        for name, service in list(self._services.items()):
            if service.process is not None and service.process.host == host:
                del self._services[name]
                ray.kill(service.actor, no_restart=True)

    def _poll_actors(self, patience_s: float) -> None:
        """Poll the actors for events, for at most `patience_s` seconds, and handle all replies."""
        polls = {}
        for service in (self._mailbox, *self._services.values()):
            if service.poll is None and time.monotonic() >= service.poll_at:
                self._send_poll(service, PATIENCE_S)
            if service.poll is not None:
                polls[service.poll] = service
        if not polls:
            time.sleep(min(patience_s, AGAIN_S))
            return
        ready, _ = ray.wait(list(polls), num_returns=1, timeout=patience_s)
        if ready:  # fetch all other polls that are ready too
            ready, _ = ray.wait(list(polls), num_returns=len(polls), timeout=0)
        for ref in ready:
            service = polls[ref]
            service.poll = None
            try:
                self._take(service, ray.get(ref))
            except RayError:  # poll again until Ray has restarted the actor or SILENT_S are over
                service.poll_at = time.monotonic() + AGAIN_S
        for service in polls.values():  # after all replies were handled
            since = service.silent_since
            if since is not None and time.monotonic() - since > SILENT_S:
                self._actor_silent(service)

    def _send_poll(self, service: _PolledActor, patience_s: float) -> None:
        service.silent_since = service.silent_since or time.monotonic()
        service.poll = service.actor.news.remote(service.life, service.after, patience_s)

    def _drain_mailbox(self) -> None:
        """Read all remaining events of the workers after the workers have ended."""
        mailbox, deadline, in_flight = self._mailbox, time.monotonic() + DRAIN_S, True
        while in_flight:
            in_flight = mailbox.poll is not None
            if not in_flight:
                self._send_poll(mailbox, 0.0)
            ref, mailbox.poll = mailbox.poll, None
            try:
                batch = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except RayError as error:  # Ray Train has reported the ends of the workers
                why = f"the last output of the workers was lost: {_first_line(error)}"
                self._events.append(Output(WORKERS, "", f"[{why}]"))
                return
            self._take(mailbox, batch)

    def _actor_silent(self, service: _PolledActor) -> None:
        """Kill an actor that has not answered for a fixed time, so that it is started again."""
        why = f"its actor has not answered for {SILENT_S:.0f} s"
        if service.process is None:
            self._events.append(Output(WORKERS, "", f"[restarting the workers' mailbox: {why}]"))
            service.silent_since = service.poll = None
            ray.kill(service.actor, no_restart=False)
            return
        name = service.process.name
        if self._services.get(name) is not service:
            return
        del self._services[name]
        ray.kill(service.actor, no_restart=True)
        self._events.append(ProcessEnded(name, KILLED, why))

    def _take(self, service: _PolledActor, batch: EventBatch) -> None:
        name = service.process.name if service.process else ""
        if service.life and service.life != batch.life:
            self._events.append(ProcessRestarted(name))
        service.life, service.after = batch.life, batch.then
        service.silent_since = None
        if batch.left_out:
            host = service.process.host if service.process else ""
            text = f"[{batch.left_out} lines dropped: the supervisor was away or slow]"
            self._events.append(Output(name or WORKERS, host, text))
        for event in batch.events:
            match event:
                case Output():
                    self._events.append(event)
                case WorkerBegun():
                    if self._workers is not None and self._workers.begun(event.name):
                        self._events.append(WorkersPlaced())
                case ProcessEnded():
                    self._take_end(service, event)

    def _take_end(self, service: _PolledActor, ended: ProcessEnded) -> None:
        if service.process is None:
            if self._workers is not None:
                self._workers.take(ended)
            return
        self._events.append(ended)
        if self._services.pop(service.process.name, None) is not None:
            ray.kill(service.actor, no_restart=True)

    def close(self) -> None:
        """End the workers and the services."""
        if self._workers is not None:
            self._workers.stop(0.0)
        for service in (*self._services.values(), self._mailbox):
            with suppress(RayError):
                ray.kill(service.actor, no_restart=True)
        self._services.clear()
        ray_cluster.request_nodes([])
        self._remove_directory()


def _found(mark: str) -> dict[str, tuple[Any, Process, str]]:
    """Return (actor, process, node id) for each running service of a run, by the name of the
    process."""
    found = {}
    for actor in service_actors(mark):
        try:
            handle = ray.get_actor(actor)
            process, node, alive = ray.get(handle.place.remote(), timeout=BEGIN_S)
        except (ValueError, RayError):
            alive = False
        if alive:
            found[process.name] = (handle, process, node)
        else:
            kill_named(actor)  # the service will get a new actor
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def end_services(mark: str) -> None:
    """Kill all services of a run. `mark`: the name of the run on the cluster. Raises LaunchError if
    an actor does not end."""
    deadline = time.monotonic() + NAME_S
    while left := service_actors(mark):
        if time.monotonic() > deadline:
            raise LaunchError(f"the killed actor {left[0]} of an earlier launch has not ended")
        end_actors(mark)
        time.sleep(0.1)


def _no_node(host: PlanHost, was_at: str, nodes: Sequence[RayNode]) -> str:
    where = f" ({host.address})" if host.address else ""
    where = f" (it was {was_at})" if was_at and not host.address else where
    there = ", ".join(f"{n.label or n.name} ({n.address})" for n in nodes)
    return (
        f"the Ray cluster has no node for host {host.name}{where} of the plan; its nodes are"
        f" {there}; `ray start --labels roadtrain-host={host.name}` starts a node for the host"
    )


def ray_engine(plan_file: PlanFile, record: LaunchRecord) -> RayEngine:
    """Create the engine of a launch, and make this process a driver of the cluster. Raises
    LaunchError."""
    home = RunHome.of(record.name)
    machines, state = machines_of(plan_file), home.state()
    begun = StartPhase.CHECKED in state.stamps
    ray_cluster.connect(record.ray_address)
    return RayEngine(
        machines.hosts,
        actor_name(record.name),
        spares=machines.spares,
        # If this run never had workers, addresses.json may be left over from an older run.
        addresses=home.addresses() if begun or state.attempt >= 0 else {},
        begun=begun,
        directory=home.path / "ray",
    )
