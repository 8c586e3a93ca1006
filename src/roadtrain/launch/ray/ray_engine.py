"""RayEngine: the LaunchEngine of a Ray cluster. This process is a driver of it.

    a server, reducer or switch   an actor ServedProcess "roadtrain:RUN:NAME", detached, bound to
                                  its host's node; Ray starts it again when it is killed
    the workers                   Ray Train's (workers.py), owned by this driver: they end with it
    a host                        a node (nodes.py)

A new engine of the same run finds the services that still run, and leaves them as they are. `close`
ends all; a driver that is killed leaves the services, not the workers.
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

WORKERS = "workers"  # all of them, as `stop` calls them
BEGIN_S = 60.0  # an actor runs so long after it was created
LOOK_S = 0.5  # between looks at the nodes
PATIENCE_S = 2.0  # of a question for news
AGAIN_S = 0.5  # until an actor that could not be asked is asked again
SILENT_S = 60.0  # an actor that answers no question for so long is given up
DRAIN_S = 30.0  # the mailbox has said all within it
NAME_S = 15.0  # the name of a killed actor is free within it
KILLED = -9


@dataclass
class _PolledActor:
    """An actor that is asked for news. Invariant: one question is under way while `asks` is not
    None."""

    actor: Any
    process: Process | None  # of a service's actor
    life: str = ""  # of the actor, by its last answer
    after: int = 0  # of its news, those that are known
    asks: Any = None
    ask_at: float = 0.0  # no sooner
    silent_since: float | None = None  # when it was asked what it has not answered


class RayEngine:
    """hosts: the plan's; spares: its spare ones. mark: names this run on the cluster. The process
    must be connected (ray_cluster.connect). known: host -> address of its node in starts before.
    begun: an engine before this one had begun the run, and its services are found and left as they
    are; else services of its name are another launch's, and are ended. directory: for what Ray
    Train writes. Raises LaunchError where a host of the plan, not a spare one, has no node and the
    run has not begun."""

    def __init__(
        self,
        hosts: Sequence[PlanHost],
        mark: str,
        *,
        spares: Sequence[PlanHost] = (),
        known: Mapping[str, str] | None = None,
        begun: bool = False,
        directory: Path | None = None,
    ) -> None:
        set_environment()
        self._mark, self._directory = mark, directory
        self._events: list[RunEvent] = []
        self._map = HostMap(hosts, spares, known)
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
        ray_cluster.ask_for(self._map.places_of_workers())
        here = ray_cluster.on_node(ray.get_runtime_context().get_node_id())
        # One that is killed comes again and knows no attempt: so the workers of this one end.
        mailbox = ray.remote(num_cpus=0, max_concurrency=64, max_restarts=-1)(WorkerMailbox)
        self._mailbox = _PolledActor(mailbox.options(scheduling_strategy=here).remote(), None)

    def _refuse_missing(self, hosts: Sequence[PlanHost]) -> None:
        missing = [host for host in self._map.missing() if host in hosts]
        if missing and not self.resumed:
            was_at = self._map.was_at(missing[0].name)
            raise LaunchError(_no_node(missing[0], was_at, ray_cluster.nodes()))

    def _others_with_services(self, plan: Sequence[PlanHost]) -> list[RunEvent]:
        """Hosts that came to an engine before this one, and still sum."""
        known = {host.name for host in plan}
        services = {one.process.host for one in self._services.values() if one.process}
        return [
            HostJoined(name, self._map.address_of(name), self._map.workers_of(name))
            for name in self._map.hosts
            if name in services - known
        ]

    def hosts(self) -> Sequence[HostSeen]:
        self._look()
        return [
            HostSeen(name, self._map.address_of(name), node.devices)
            for name, node in self._map.hosts.items()
        ]

    def ask(self, host: str, words: Sequence[str], told: Mapping[str, Any]) -> Any:
        what = f"`{' '.join(words)}` on {host}"
        task = ray.remote(num_cpus=0, max_retries=0)(run_command)
        there = task.options(scheduling_strategy=ray_cluster.on_node(self._node(host).node_id))
        ref = there.remote(tuple(words), json.dumps(told))
        try:
            done = ray.get(ref, timeout=ASK_S)
        except GetTimeoutError as error:
            ray.cancel(ref, force=True)
            raise LaunchError(f"{what} was not done within {ASK_S:.0f} s") from error
        except RayError as error:
            raise LaunchError(f"{what}: {_first_line(error)}") from error
        return answer_of(what, *done)

    def _node(self, host: str) -> RayNode:
        if (node := self._map.hosts.get(host)) is None:
            known = ", ".join(self._map.hosts)
            raise LaunchError(f"host {host} is no node of the cluster now", hint=f"it has {known}")
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
            f"`{' '.join(words)}` is no verb of Ray", hint="leaves HOST SECONDS, comes HOST"
        )

    def start(self, process: Process) -> None:
        known = self._services.get(process.name)
        if known is not None and known.process == process:
            return  # it was found, and still runs
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
                        f"an actor {service_actor(self._mark, process.name)} has not ended within"
                        f" {NAME_S:.0f} s"
                    ) from None
                kill_named(service_actor(self._mark, process.name))
                time.sleep(0.1)

    def start_workers(self, workers: WorkerSet) -> None:
        assert self._workers is None, "the workers of the attempt before have not ended"
        for process in workers.processes:
            self._node(process.host)
        nodes = self._map.hosts
        users = os.environ.get(ray_cluster.USERS_THREADS, "")
        workers = with_threads(workers, threads_of(workers, nodes), users)
        with suppress(RayError, RuntimeError):
            remove_old_places()
        self._remove_directory()  # of the attempt before
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
            self._hear(0.0 if self._events else max(0.0, min(left, LOOK_S)))
            if self._workers is not None and self._workers.is_over():
                self._hear_all_of_workers()
                self._events.append(self._workers.ended())
                self._workers = None
            if self._events or left <= 0:
                events, self._events = self._events, []
                return events

    def _look(self) -> None:
        """At the nodes."""
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

    def _hear(self, patience_s: float) -> None:
        """What actors have to say."""
        asked = {}
        for service in (self._mailbox, *self._services.values()):
            if service.asks is None and time.monotonic() >= service.ask_at:
                self._ask_news(service, PATIENCE_S)
            if service.asks is not None:
                asked[service.asks] = service
        if not asked:
            time.sleep(min(patience_s, AGAIN_S))
            return
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=patience_s)
        if ready:  # and others that are, too
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for ref in ready:
            service = asked[ref]
            service.asks = None
            try:
                self._take(service, ray.get(ref))
            except RayError:  # until Ray has started it again, or it is taken for silent
                service.ask_at = time.monotonic() + AGAIN_S
        for service in asked.values():  # their answers, where there were any, are taken
            since = service.silent_since
            if since is not None and time.monotonic() - since > SILENT_S:
                self._actor_silent(service)

    def _ask_news(self, service: _PolledActor, patience_s: float) -> None:
        service.silent_since = service.silent_since or time.monotonic()
        service.asks = service.actor.news.remote(service.life, service.after, patience_s)

    def _hear_all_of_workers(self) -> None:
        """They have ended: all that they said is in the mailbox. The answer to a question that was
        asked before may lack the last of it."""
        mailbox, deadline, asked_before = self._mailbox, time.monotonic() + DRAIN_S, True
        while asked_before:
            asked_before = mailbox.asks is not None
            if not asked_before:
                self._ask_news(mailbox, 0.0)
            ref, mailbox.asks = mailbox.asks, None
            try:
                news = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except RayError as error:  # their ends are those that Ray Train told
                why = f"what the workers said last is not known: {_first_line(error)}"
                self._events.append(Output(WORKERS, "", f"[{why}]"))
                return
            self._take(mailbox, news)

    def _actor_silent(self, service: _PolledActor) -> None:
        """Rule 5. Another actor takes its place; its process ends with it."""
        why = f"its actor has not answered for {SILENT_S:.0f} s"
        if service.process is None:
            self._events.append(Output(WORKERS, "", f"[their mailbox begins again: {why}]"))
            service.silent_since = service.asks = None
            ray.kill(service.actor, no_restart=False)
            return
        name = service.process.name
        if self._services.get(name) is not service:
            return
        del self._services[name]
        ray.kill(service.actor, no_restart=True)
        self._events.append(ProcessEnded(name, KILLED, why))

    def _take(self, service: _PolledActor, news: EventBatch) -> None:
        name = service.process.name if service.process else ""
        if service.life and service.life != news.life:
            self._events.append(ProcessRestarted(name))
        service.life, service.after = news.life, news.then
        service.silent_since = None
        if news.left_out:
            host = service.process.host if service.process else ""
            text = f"[{news.left_out} lines left out: the supervisor was away, or slow]"
            self._events.append(Output(name or WORKERS, host, text))
        for event in news.events:
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
        """Workers end with Ray Train's worker processes; services with their actors."""
        if self._workers is not None:
            self._workers.stop(0.0)
        for service in (*self._services.values(), self._mailbox):
            with suppress(RayError):
                ray.kill(service.actor, no_restart=True)
        self._services.clear()
        ray_cluster.ask_for([])
        self._remove_directory()


def _found(mark: str) -> dict[str, tuple[Any, Process, str]]:
    """The services of this run whose actors are there: name -> actor, process, node."""
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
            kill_named(actor)  # it is started anew
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def end_services(mark: str) -> None:
    """Services of this name are killed. Raises LaunchError where an actor does not end."""
    deadline = time.monotonic() + NAME_S
    while left := service_actors(mark):
        if time.monotonic() > deadline:
            raise LaunchError(f"an actor {left[0]} of another launch has not ended")
        end_actors(mark)
        time.sleep(0.1)


def _no_node(host: PlanHost, was_at: str, nodes: Sequence[RayNode]) -> str:
    where = f" ({host.address})" if host.address else ""
    where = f" (it was {was_at})" if was_at and not host.address else where
    there = ", ".join(f"{n.label or n.name} ({n.address})" for n in nodes)
    return (
        f"host {host.name}{where} of the plan is no node of the Ray cluster, which has {there};"
        f" `ray start --labels roadtrain-host={host.name}` says which node it is"
    )


def ray_engine(plan_file: PlanFile, record: LaunchRecord) -> RayEngine:
    """This process becomes a driver of the cluster. Raises LaunchError."""
    home = RunHome.of(record.name)
    machines, state = machines_of(plan_file), home.state()
    begun = StartPhase.CHECKED in state.stamps
    ray_cluster.connect(record.ray_address)
    return RayEngine(
        machines.hosts,
        actor_name(record.name),
        spares=machines.spares,
        # an older run of this name may have left them, where this one never had workers
        known=home.addresses() if begun or state.attempt >= 0 else {},
        begun=begun,
        directory=home.path / "ray",
    )
