"""RayEngine: the LaunchEngine of a Ray cluster. The process of the engine is a Ray driver.

    a server, reducer or switch   runs in a detached actor ServedProcesses "roadtrain:RUN:NAME",
                                  which is bound to the node of its host and restarted by Ray if
                                  killed
    the workers of a host         run in an actor that has a processor and a device of the node for
                                  each; it ends with this driver and is not restarted, because all
                                  workers restart together
    a host                        is a node (nodes.py)

If the driver is killed, the workers end, but the services keep running, and a new engine of the
same run keeps them.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from roadtrain.config.machines import PlanHost
from roadtrain.config.plan_file import PlanFile
from roadtrain.errors import LaunchError
from roadtrain.launch.engines import machines_of
from roadtrain.launch.home import LaunchRecord, RunHome, StartPhase
from roadtrain.launch.launch_engine import ASK_S, HostSeen, answer_of, run_command
from roadtrain.launch.processes import Process, WorkerSet, with_threads
from roadtrain.launch.protocol.run_events import (
    KILLED,
    WORKERS,
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
    ServedProcesses,
    actor_name,
    end_actors,
    kill_named,
    service_actor,
    service_actors,
)
from roadtrain.launch.ray.nodes import HostMap, RayNode
from roadtrain.launch.worker_run import WorkerRun

BEGIN_S = 60.0  # timeout for an actor of an earlier engine to answer
WORKERS_BEGIN_S = 180.0  # timeout for Ray to start the workers of a host
LOOK_S = 0.5  # interval of the checks of the nodes
PATIENCE_S = 2.0  # duration of a long poll
AGAIN_S = 0.5  # pause before an actor is polled again after a failure
SILENT_S = 60.0  # an actor that answers no poll for this long is replaced
NAME_S = 15.0  # timeout for the name of a killed actor to become free


@dataclass
class _PolledActor:
    """An actor that is polled for events. Invariant: at most one poll is in flight."""

    actor: Any
    host: str
    process: Process | None = None  # the process of a service, or None for the workers of the host
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
    ) -> None:
        self._mark = mark
        self._events: list[RunEvent] = []
        self._map = HostMap(hosts, spares, addresses)
        self._services: dict[str, _PolledActor] = {}
        self.resumed = begun
        self._workers: WorkerRun | None = None
        self._at_work: dict[str, _PolledActor] = {}  # by host, the actors of `_workers`
        self._started_at = 0.0  # monotonic time at which these actors were created
        self._looked_at = 0.0
        if begun:
            for name, (actor, process, node) in _found(mark).items():
                self._map.remember(process.host, node)
                self._services[name] = _PolledActor(actor, process.host, process, after=-1)
        else:
            end_services(mark)
        self._look()
        self._refuse_missing(hosts)
        self._events += self._map.missing_events()
        self._events += self._others_with_services((*hosts, *spares))
        ray_cluster.request_nodes(self._map.places_of_workers())

    def _refuse_missing(self, hosts: Sequence[PlanHost]) -> None:
        missing = [host for host in self._map.missing() if host in hosts]
        if missing and not self.resumed:
            was_at = self._map.was_at(missing[0].name)
            raise LaunchError(_no_node(missing[0], was_at, ray_cluster.nodes()))

    def _others_with_services(self, plan: Sequence[PlanHost]) -> list[RunEvent]:
        """Return an event HostJoined for each host that is not in the plan but runs a reducer of an
        earlier engine."""
        planned = {host.name for host in plan}
        services = {actor.host for actor in self._services.values()}
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
        self._services[process.name] = _PolledActor(actor, process.host, process)

    def _create(self, process: Process, node: RayNode) -> Any:
        served = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=8)(ServedProcesses)
        named = served.options(
            name=service_actor(self._mark, process.name),
            lifetime="detached",
            scheduling_strategy=ray_cluster.on_node(node.node_id),
        )
        deadline = time.monotonic() + NAME_S
        while True:
            try:
                return named.remote((process,), self._mark)
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
        nodes = {process.host: self._node(process.host) for process in workers.processes}
        users = os.environ.get(ray_cluster.USERS_THREADS, "")
        workers = with_threads(workers, threads_of(workers, nodes), users)
        of_hosts: dict[str, list[Process]] = {host: [] for host in nodes}
        for process in workers.processes:
            of_hosts[process.host].append(process)
        served = {host: actor_of_workers(nodes[host], own) for host, own in of_hosts.items()}
        hosts = {process.name: process.host for process in workers.processes}
        self._workers = WorkerRun(workers.attempt, hosts)
        self._started_at = time.monotonic()
        for host, own in of_hosts.items():
            self._at_work[host] = _PolledActor(served[host].remote(own, self._mark), host)

    def stop(self, name: str, grace_s: float) -> None:
        if name == WORKERS:
            if self._workers is not None:
                self._workers.stopping = True
                self._end_workers(grace_s)
        elif name in self._services:
            self._services[name].actor.stop.remote(grace_s)

    def _end_workers(self, grace_s: float) -> None:
        for host, actor in list(self._at_work.items()):
            if actor.life:
                actor.actor.stop.remote(grace_s)
            else:
                self._lose_workers(host, "it was stopped before Ray had started it")

    def events(self, timeout_s: float) -> Sequence[RunEvent]:
        deadline = time.monotonic() + timeout_s
        while True:
            if time.monotonic() - self._looked_at > LOOK_S:
                self._look()
            left = deadline - time.monotonic()
            self._poll_actors(0.0 if self._events else max(0.0, min(left, LOOK_S)))
            self._end_late_workers()
            if self._events or left <= 0:
                events, self._events = self._events, []
                return events

    def _look(self) -> None:
        """Check which nodes are alive, and queue the resulting events, such as HostLost."""
        self._looked_at = time.monotonic()
        found = self._map.look(ray_cluster.nodes(), ray_cluster.why_dead)
        self._events += found
        for event in found:
            if isinstance(event, HostLost):
                self._forget_services(event.host)
                self._lose_workers(event.host, f"its host {event.host} was lost")

    def _forget_services(self, host: str) -> None:
        for name in [name for name, service in self._services.items() if service.host == host]:
            ray.kill(self._services.pop(name).actor, no_restart=True)

    def _end_late_workers(self) -> None:
        """End workers that Ray does not start, and workers that do not end."""
        now = time.monotonic()
        if self._workers is not None and (why := self._workers.end_late(now)):
            self._events.append(Output(WORKERS, "", f"{why}: the remaining workers are killed"))
            self._end_workers(0.0)
        for host in [host for host, actor in self._at_work.items() if not actor.life]:
            if now - self._started_at > WORKERS_BEGIN_S:
                self._lose_workers(host, f"Ray has not started it within {WORKERS_BEGIN_S:.0f} s")

    def _lose_workers(self, host: str, why: str) -> None:
        """Kill the actor of a host's workers, and record the ends that it cannot report."""
        lost = self._at_work.pop(host, None)
        if lost is not None and self._workers is not None:
            ray.kill(lost.actor, no_restart=True)
            for name in [name for name, at in self._workers.hosts.items() if at == host]:
                self._worker_ended(ProcessEnded(name, KILLED, why))

    def _worker_ended(self, ended: ProcessEnded) -> None:
        run = self._workers
        if run is None or ended.name not in run.hosts:
            return
        if run.end(ended.name, ended.code, ended.last_line, time.monotonic()):
            self._end_workers(0.0)
        if self._workers is run and (result := run.ended()) is not None:
            for actor in self._at_work.values():
                ray.kill(actor.actor, no_restart=True)
            self._at_work.clear()
            self._workers = None
            self._events.append(result)

    def _poll_actors(self, patience_s: float) -> None:
        """Poll the actors for events, for at most `patience_s` seconds, and handle all replies."""
        polls = {}
        for service in (*self._services.values(), *self._at_work.values()):
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
            except RayError as error:  # poll again until Ray has restarted it or SILENT_S are over
                service.poll_at = time.monotonic() + AGAIN_S
                if service.process is None and isinstance(error, ActorDiedError):
                    self._look()  # its host may be lost too, which is reported first
                    self._lose_workers(service.host, f"its actor has ended: {_first_line(error)}")
        for service in polls.values():  # after all replies were handled
            since = service.silent_since
            if since is not None and time.monotonic() - since > SILENT_S:
                self._actor_silent(service)

    def _send_poll(self, service: _PolledActor, patience_s: float) -> None:
        service.silent_since = service.silent_since or time.monotonic()
        service.poll = service.actor.news.remote(service.life, service.after, patience_s)

    def _actor_silent(self, service: _PolledActor) -> None:
        """Kill an actor that has not answered for a fixed time, so that it is started again."""
        why = f"its actor has not answered for {SILENT_S:.0f} s"
        if service.process is None:
            if service.life:  # else Ray may still start it
                self._lose_workers(service.host, why)
        elif self._services.get(service.process.name) is service:
            self._service_ended(ProcessEnded(service.process.name, KILLED, why))

    def _service_ended(self, ended: ProcessEnded) -> None:
        self._events.append(ended)
        if (service := self._services.pop(ended.name, None)) is not None:
            ray.kill(service.actor, no_restart=True)

    def _take(self, service: _PolledActor, batch: EventBatch) -> None:
        if not service.life and service is next(iter(self._at_work.values()), None):
            self._events.append(WorkersPlaced())  # worker 0 is there
        name = service.process.name if service.process else WORKERS
        if service.life not in ("", batch.life):
            self._events.append(ProcessRestarted(name))
        service.life, service.after = batch.life, batch.then
        service.silent_since = None
        if batch.left_out:
            text = f"[{batch.left_out} lines dropped: the supervisor was away or slow]"
            self._events.append(Output(name, service.host, text))
        for event in batch.events:
            if isinstance(event, Output):
                self._events.append(event)
            elif service.process is None:
                self._worker_ended(event)
            else:
                self._service_ended(event)

    def close(self) -> None:
        """End the workers and the services."""
        for service in (*self._services.values(), *self._at_work.values()):
            with suppress(RayError):
                ray.kill(service.actor, no_restart=True)
        self._services.clear()
        self._at_work.clear()
        ray_cluster.request_nodes([])


def actor_of_workers(node: RayNode, workers: Sequence[Process]) -> Any:
    """Return the class of the actor for the workers of a host, bound to the host's node. All its
    workers see the actor's devices, and each uses the device with the number LOCAL_RANK. Raises
    LaunchError if the node has too few processors."""
    if node.processors < len(workers):
        raise LaunchError(
            f"host {workers[0].host} has {len(workers)} workers in the plan, but only"
            f" {node.processors} CPU in Ray",
            hint="set the node's resources with `ray start --num-cpus`",
        )
    devices = min(len(workers), node.devices)  # checks.py refuses workers without a device
    served = ray.remote(num_cpus=len(workers), num_gpus=devices, max_concurrency=8)
    return served(ServedProcesses).options(scheduling_strategy=ray_cluster.on_node(node.node_id))


def threads_of(workers: WorkerSet, nodes: Mapping[str, RayNode]) -> dict[str, int]:
    """Return the number of threads per worker for each host: equal shares of the processors of a
    machine, even if several nodes run on it. (By default, Ray gives a worker one thread.)"""
    on = Counter(nodes[process.host].host_name for process in workers.processes)
    return {
        process.host: max(1, nodes[process.host].processors // on[nodes[process.host].host_name])
        for process in workers.processes
    }


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
    )
