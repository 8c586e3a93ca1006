"""HostAgents: the LaunchEngine for launches on this host and in a lab. It starts one agent per host
(agent.py) and restarts an agent that ends.

The end of an agent counts as the loss of its host. There is no background thread: messages of
agents are handled only inside the methods of HostAgents. Does NOT create hosts (here.py,
lab_engine.py).
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from roadtrain.errors import LaunchError, WireError
from roadtrain.launch import agent_messages as m
from roadtrain.launch.agent_link import AgentHost, AgentLink
from roadtrain.launch.descendants import MARK, kill_marked
from roadtrain.launch.launch_engine import HostSeen, answer_of, run_command
from roadtrain.launch.processes import THREADS, Process, WorkerSet, with_threads
from roadtrain.launch.protocol.run_events import (
    KILLED,
    WORKERS,
    HostJoined,
    HostLeaving,
    HostLost,
    Output,
    ProcessEnded,
    RunEvent,
)
from roadtrain.launch.worker_run import WorkerRun
from roadtrain.retry import undone_on_error

TURN_S = 0.1  # interval of the checks for agents that are slow, silent or due to start
AGAIN_S = 1.0  # pause before an agent is restarted


@dataclass
class _HostState:
    """The state of a host and of the agent on this host."""

    host: AgentHost
    link: AgentLink | None = None
    lost: bool = False  # HostLost was reported, and HostJoined has not been reported since then
    held: bool = False  # True while no agent may be started on this host
    start_at: float = 0.0  # monotonic time at which to start an agent, while there is none

    @property
    def usable(self) -> bool:
        return self.link is not None and self.link.ready is not None


class HostAgents:
    """A LaunchEngine with one agent per host. The constructor waits until all agents are ready, and
    raises LaunchError if an agent fails. `mark`: the label of the run's processes (descendants.py),
    the same in all launches of the run, so that a later launch can kill leftover processes."""

    resumed = False  # the processes of an engine end with it, so a new engine never finds any
    verbs = "leaves HOST SECONDS, comes HOST, hold HOST"

    def __init__(self, hosts: Sequence[AgentHost], mark: str) -> None:
        self._mark = mark
        self._places = {host.name: _HostState(host) for host in hosts}
        self._selector = selectors.DefaultSelector()
        self._events: list[RunEvent] = []
        self._services: dict[str, str] = {}  # the host of each running service
        self._workers: WorkerRun | None = None
        self._leaving: dict[str, float] = {}  # monotonic time at which each leaving host is lost
        # An earlier supervisor may have been killed just now, or have left a frozen agent. The old
        # processes must neither run beside the new ones nor end them.
        kill_marked(f"{mark}/")
        with undone_on_error(self.close):
            self._begin_all()

    def _begin_all(self) -> None:
        for place in self._places.values():
            self._begin(place)
        while not all(place.usable for place in self._places.values()):
            self._turn(TURN_S)
            for event in self._events:
                if isinstance(event, HostLost):
                    raise LaunchError(f"cannot use host {event.host}: {event.why}")

    def hosts(self) -> Sequence[HostSeen]:
        return [
            HostSeen(at.host.name, at.host.address, ready.devices)
            for at in self._places.values()
            if at.link is not None and (ready := at.link.ready) is not None
        ]

    def ask(self, host: str, words: Sequence[str], request: Mapping[str, Any]) -> Any:
        """Run a short command on a host, and block until it ends. Meanwhile, messages of agents
        stay queued."""
        at, command = self._link(host).host, f"`{' '.join(words)}` on {host}"
        environment = {**os.environ, **at.environment, MARK: f"{self._mark}/{host}#ask"}
        try:
            done = run_command(words, json.dumps(request), at.spawn, env=environment)
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"{command}: {error}") from error
        return answer_of(command, *done)

    def _link(self, host: str) -> AgentLink:
        place = self._place(host)
        if place.link is None or not place.usable:
            raise LaunchError(f"host {host} is down: no agent is running on the host")
        return place.link

    def _place(self, host: str) -> _HostState:
        if host not in self._places:
            names = ", ".join(self._places)
            raise LaunchError(f"the run has no host {host!r}", hint=f"its hosts are {names}")
        return self._places[host]

    def start(self, process: Process) -> None:
        self._link(process.host).send(m.BeginProcess(process))
        self._services[process.name] = process.host

    def start_workers(self, workers: WorkerSet) -> None:
        assert self._workers is None, "the workers of the previous attempt have not ended"
        hosts = {process.name: process.host for process in workers.processes}
        self._workers = WorkerRun(workers.attempt, hosts)
        threads = {name: place.host.threads for name, place in self._places.items()}
        workers = with_threads(workers, threads, os.environ.get(THREADS, ""))
        for n, process in enumerate(workers.processes):
            try:
                self._link(process.host).send(m.BeginProcess(process))
            except (LaunchError, WireError) as error:
                for later in workers.processes[n + 1 :]:
                    del self._workers.hosts[later.name]
                return self._worker_ended(process.name, KILLED, str(error))
        return None

    def stop(self, name: str, grace_s: float) -> None:
        if name != WORKERS:
            if name in self._services:
                self._send_end(self._services[name], name, grace_s)
        elif self._workers is not None:
            self._workers.stopping = True
            self._end_workers(grace_s)

    def _end_workers(self, grace_s: float) -> None:
        assert self._workers is not None
        for worker, host in list(self._workers.hosts.items()):
            self._send_end(host, worker, grace_s)

    def _send_end(self, host: str, name: str, grace_s: float) -> None:
        if link := self._places[host].link:
            link.send(m.EndProcess(name, grace_s))

    def events(self, timeout_s: float) -> Sequence[RunEvent]:
        deadline = time.monotonic() + timeout_s
        self._turn(0.0)
        while not self._events and (left := deadline - time.monotonic()) > 0:
            self._turn(left)
        events, self._events = self._events, []
        return events

    def run_verb(self, words: Sequence[str]) -> str:
        match words:
            case ["leaves", host, seconds] if seconds.replace(".", "", 1).isdecimal():
                self._place(host)
                self._leaving[host] = time.monotonic() + float(seconds)
                self._events.append(HostLeaving(host, float(seconds)))
                return f"{host} leaves within {float(seconds):g} s"
            case ["comes", host]:
                return self.free_host(host)
            case ["hold", host]:
                return self.hold_host(host)
        raise LaunchError(
            f"this engine does not know the verb `{' '.join(words)}`",
            hint=f"the verbs of this engine are {self.verbs}",
        )

    def hold_host(self, name: str) -> str:
        """Kill a host's agent and processes, and start no agent on this host until `free_host` is
        called. Return a reply for the user."""
        place = self._place(name)
        place.held = True
        self._leaving.pop(name, None)
        if place.link is not None:
            place.link.kill()
            self._lose(place, "it was taken down with `hold`")
        return f"{name} is down until `comes {name}`"

    def free_host(self, name: str) -> str:
        """Make a host, which may be new to the run, available again: undo `hold_host` and cancel an
        announced loss. Return a reply for the user."""
        if name not in self._places and (new := self._new_host(name)) is not None:
            self._places[name] = _HostState(new, lost=True)  # HostJoined follows the first message
        place = self._place(name)
        if self._leaving.pop(name, None) is not None:
            self._events.append(HostJoined(name, place.host.address, place.host.workers))
        place.held, place.start_at = False, 0.0
        return f"{name} comes"

    def _new_host(self, name: str) -> AgentHost | None:
        """Return a host that the run has not used yet; None if there is none of this name."""
        return None

    def close(self) -> None:
        links = [place.link for place in self._places.values() if place.link is not None]
        for link in links:
            link.end_input()  # tell all agents before waiting for one, so that they end together
        for place in self._places.values():
            if place.link is not None:
                self._forget(place)
        kill_marked(f"{self._mark}/")  # processes that a killed agent has left
        self._selector.close()
        self._places.clear()

    def _turn(self, timeout_s: float) -> None:
        """Handle messages of agents for at most `timeout_s` seconds, and then do the work that is
        due."""
        for key, _ in self._selector.select(min(timeout_s, TURN_S)):
            key.data()
        now = time.monotonic()
        for host in [host for host, at in self._leaving.items() if at <= now]:
            self.hold_host(host)
        for place in list(self._places.values()):
            if place.link is None:
                if not place.held and now >= place.start_at:
                    self._begin(place)
            elif why := place.link.why_silent():
                place.link.kill()
                self._lose(place, why)
            else:
                place.link.flush()
        if self._workers is not None and (why := self._workers.end_late(now)):
            self._events.append(Output(WORKERS, "", f"{why}: the remaining workers are killed"))
            self._end_workers(0.0)

    def _begin(self, place: _HostState) -> None:
        try:
            place.link = link = AgentLink(place.host, self._mark)
        except OSError as error:
            return self._lose(place, f"its agent cannot be started: {error}")
        output, errors = link.pipes
        self._selector.register(output, selectors.EVENT_READ, partial(self._read, place, link))
        self._selector.register(
            errors, selectors.EVENT_READ, partial(self._read_errors, place, link)
        )
        return None

    def _read(self, place: _HostState, link: AgentLink) -> None:
        if place.link is not link:
            return None  # the agent was lost earlier in this turn
        was_starting = not place.usable
        messages = link.read()
        if messages is None:
            return self._lose(place, "")
        if was_starting and place.usable and place.lost:
            place.lost = False
            host = place.host
            self._events.append(HostJoined(host.name, host.address, host.workers))
        for message in messages:
            self._take(place.host.name, message)
        return None

    def _read_errors(self, place: _HostState, link: AgentLink) -> None:
        if place.link is not link:
            return
        lines = link.read_errors()
        if lines is None:  # `_read` handles the end of the agent, at the end of its stdout
            self._selector.unregister(link.pipes[1])
        for line in lines or ():
            self._events.append(Output("agent", place.host.name, line))

    def _take(self, host: str, message: m.FromAgent) -> None:
        match message:
            case m.OutputLine(name, line):
                self._events.append(Output(name, host, line))
            case m.ProcessExited(name, code, last):
                if self._workers is not None and name in self._workers.hosts:
                    self._worker_ended(name, code, last)
                elif self._services.pop(name, None) is not None:
                    self._events.append(ProcessEnded(name, code, last))

    def _worker_ended(self, name: str, code: int, last_line: str) -> None:
        assert self._workers is not None
        if self._workers.end(name, code, last_line, time.monotonic()):
            self._end_workers(0.0)
        if (ended := self._workers.ended()) is not None:
            self._workers = None
            self._events.append(ended)

    def _lose(self, place: _HostState, why: str) -> None:
        name = place.host.name
        how = self._forget(place) if place.link is not None else ""
        kill_marked(f"{self._mark}/{name}#")
        place.start_at = time.monotonic() + AGAIN_S
        if not place.lost:
            place.lost = True
            self._events.append(HostLost(name, why or how))
        for service in [service for service, host in self._services.items() if host == name]:
            del self._services[service]
        if self._workers is not None:
            for worker in [w for w, host in self._workers.hosts.items() if host == name]:
                if self._workers is not None:
                    self._worker_ended(worker, KILLED, f"its host {name} was lost")

    def _forget(self, place: _HostState) -> str:
        """Remove the agent of a host, and wait for its end. Return a text that says how it
        ended."""
        link, place.link = place.link, None
        assert link is not None
        for pipe in link.pipes:
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        return link.wait()
