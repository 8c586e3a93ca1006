"""RunStateMachine: keeps a launched run going. Its events and actions are in run_events.py. Does no
I/O.

An event first updates the state. Then every action that the new state allows is announced and
taken. So if one fault ends a host, a service and the workers, the order of the three events does
not matter.

    a service   WAITING -> RUNNING -> WAITING ..       (the service ended, or its host is lost)
                            -> STOPPING -> ENDED       (the run ends)
    the workers WAITING -> RUNNING -> WAITING ..       (a worker failed)
                            -> STOPPING -> WAITING ..  (the workers move to other hosts)
    the run     GOING -> ENDING -> ENDED

Assumes that the engine reports the end of every process that it has started, except for services on
a lost host.
"""

from __future__ import annotations

from collections.abc import Sequence

from roadtrain.launch.protocol import run_events as m
from roadtrain.launch.protocol.run_phases import (
    NEXT_RUN_PHASES,
    ProcessPhase,
    ProcessState,
    RunPhase,
)

# Number of failures of a service, or of the workers, without a committed step, that ends the run.
ENDS_AT_MOST = 6
SERVICE_GRACE_S = 20.0  # time for a service to end on request
LOST_GRACE_S = 5.0  # time for workers to end that cannot finish their step, as peers were lost
# How long to wait for a lost host before workers continue without it. Fewer workers sum in another
# order, so that losses agree only up to rounding (Rule 1). There is no wait for a host whose loss
# was announced by HostLeaving.
BACK_S = 15.0
KILL_S = 60.0  # time between the kill of a process and the deadline for the report of its end
LEFT_OUT_S = 600.0  # pause before the restart of a reducer that failed ENDS_AT_MOST times


class RunStateMachine:
    """The state of one run, and the rules that keep the run going."""

    def __init__(self, facts: m.RunFacts) -> None:
        self.facts = facts
        self.phase = RunPhase.GOING
        self.now = 0.0  # time of the last event
        self.step = facts.committed  # the last step known to be committed
        # The plan's services and the reducers of hosts that joined, by their names.
        self.places: dict[str, m.RunService] = {place.name: place for place in facts.services}
        self.services = {name: ProcessState(name) for name in self.places}
        self.workers = ProcessState(m.WORKERS)
        self.worker_hosts: tuple[str, ...] = ()  # hosts of the last attempt, in rank order
        self.attempt = facts.first_attempt - 1  # number of the last attempt that was started
        self.spares = dict(facts.spares)  # workers that each spare or joined host can run
        # Hosts that are up. A leaving host stays in the set until it is lost, but gets no workers.
        self.here = {*facts.workers, *facts.spares, *(place.host for place in facts.services)}
        self.leaving: set[str] = set()
        # For each lost host, the time from which workers may continue without the host.
        self.without_from: dict[str, float] = {}
        # Names of reducers that failed too often. Workers do not use them until their restart.
        self.left_out: set[str] = set()
        # True if workers were asked to end because a host was lost. Their end counts as a failure.
        self.lost_some = False
        self.reducers = self._reducers()  # hosts of the reducers that workers use
        self.code, self.why = 0, ""  # exit code and reason of the run's end
        self._waits_for = ""  # the last announced reason why workers are not started
        self._out: list[m.RunAction] = []  # actions for the event that is being handled

    def handle(self, event: m.RunEvent, now: float) -> list[m.RunAction]:
        """Process an event, and return the actions that the supervisor must carry out. `now`: the
        monotonic time of the event in seconds."""
        if isinstance(event, m.Output) or self.phase is RunPhase.ENDED:
            return []
        self.now = now
        match event:
            case m.ProcessEnded():
                self._service_ended(event)
            case m.ProcessRestarted():
                self._service_restarted(event.name)
            case m.WorkersEnded():
                self._workers_ended(event)
            case m.HostLost():
                self._host_lost(event)
            case m.HostJoined():
                self._host_joined(event)
            case m.HostLeaving():
                self._host_leaving(event)
            case m.Committed():
                self._committed(event.step)
            case m.StopRequested():
                self._end(m.INTERRUPTED, event.why)
        self._settle()
        out, self._out = self._out, []
        return out

    # -- events --

    def _service_ended(self, event: m.ProcessEnded) -> None:
        service = self.services.get(event.name)
        if service is None or service.phase in (ProcessPhase.WAITING, ProcessPhase.ENDED):
            return
        if service.phase is ProcessPhase.STOPPING or self.phase is not RunPhase.GOING:
            service.enter(ProcessPhase.ENDED, self.now)
            return
        service.enter(ProcessPhase.WAITING, self.now)
        when = service.ended_by_itself(self.now)
        end = f"{event.name} on {self.places[event.name].host} ended ({exit_text(event.code)})"
        often = f"{end}, {service.ends} times without a committed step: {event.last_line}"
        if service.ends >= ENDS_AT_MOST and self.places[event.name].reducer:
            self._leave_out(service)
            self._notify(f"{often}; workers run without it, it is restarted in {LEFT_OUT_S:g} s")
        elif service.ends >= ENDS_AT_MOST:
            self._end(1, often)
        else:
            self._notify(f"{end}, it is restarted {when}{_quoted(event.last_line)}")

    def _leave_out(self, reducer: ProcessState) -> None:
        reducer.ends, reducer.due = 0, self.now + LEFT_OUT_S
        self.left_out.add(reducer.name)

    def _service_restarted(self, name: str) -> None:
        service = self.services.get(name)
        if service is None or self.phase is not RunPhase.GOING:
            return
        if service.phase is ProcessPhase.RUNNING:
            service.enter(ProcessPhase.WAITING, self.now)
        if self.places[name].host in self.here:
            self._notify(f"{name} on {self.places[name].host} was restarted by the engine")
            service.enter(ProcessPhase.RUNNING, self.now)
            self.left_out.discard(name)

    def _workers_ended(self, event: m.WorkersEnded) -> None:
        workers = self.workers
        running = workers.phase in (ProcessPhase.RUNNING, ProcessPhase.STOPPING)
        if event.attempt != self.attempt or not running:
            return
        stopping = workers.phase is ProcessPhase.STOPPING
        if event.code == 0 or self.phase is not RunPhase.GOING:
            workers.enter(ProcessPhase.ENDED, self.now)
            if event.code == 0:
                self._done()
            return
        workers.enter(ProcessPhase.WAITING, self.now)
        workers.due = self.now
        if stopping:
            self._stopped_workers_ended(event)
            return
        end = f"{event.first} ended ({exit_text(event.code)})"
        if event.code == m.INTERRUPTED:
            self._end(m.INTERRUPTED, f"{event.first} was interrupted")
            return
        when = workers.ended_by_itself(self.now)
        first = self.attempt == self.facts.first_attempt and self.step < 0
        if event.code == m.REFUSED and first:
            self._end(m.REFUSED, event.last_line or end)
        elif workers.ends >= ENDS_AT_MOST:
            self._end(1, f"{end}, {workers.ends} times without a committed step: {event.last_line}")
        else:
            self._notify(
                f"{end}: all workers restart from the committed step {when}"
                f"{_quoted(event.last_line)}"
            )

    def _stopped_workers_ended(self, event: m.WorkersEnded) -> None:
        """Handle the end of workers that were stopped to move to other hosts. The loss of a host
        counts as a failure."""
        workers = self.workers
        if not self.lost_some:
            if event.code == m.KILLED:
                self._notify(f"{event.first} was killed before it had committed its step")
            return
        self.lost_some = False
        workers.ended_by_itself(self.now)
        if workers.ends >= ENDS_AT_MOST:
            self._end(1, f"hosts were lost {workers.ends} times without a committed step")

    def _host_lost(self, event: m.HostLost) -> None:
        host = event.host
        if host not in self.here:
            return
        self.here.discard(host)
        self.without_from[host] = self.now + (0.0 if host in self.leaving else BACK_S)
        self.leaving.discard(host)
        self._notify(f"host {host} is lost: {event.why}{self._without(host)}")
        for name in self._services_on(host):
            service = self.services[name]
            if service.phase is ProcessPhase.RUNNING:
                service.enter(ProcessPhase.WAITING, self.now)
            elif service.phase is ProcessPhase.STOPPING:
                service.enter(ProcessPhase.ENDED, self.now)
        if self._move_workers_from(host, "is lost", LOST_GRACE_S):
            self.lost_some = True

    def _host_joined(self, event: m.HostJoined) -> None:
        host = event.host
        if host in self.here and host not in self.leaving:
            return
        seen = host in self.facts.workers or host in self.spares or self._services_on(host)
        self.here.add(host)
        self.leaving.discard(host)
        self.without_from.pop(host, None)
        if seen:
            self._notify(f"host {host} is back")
            if host in self.spares:
                self.spares[host] = self.facts.workers_of(event.workers)
            for name in self._services_on(host):
                self.services[name].due = self.now
                self.left_out.discard(name)
            return
        self.spares[host] = self.facts.workers_of(event.workers)
        if not self.facts.sums_at_reducers:
            self._notify(f"host {host} joined as a spare host for {self.spares[host]} workers")
        elif self.phase is RunPhase.GOING:
            self._notify(f"host {host} joined: the workers use it as a reducer")
            name = f"reducer {host}"
            self.places[name] = m.RunService(name, host, reducer=True)
            self.services[name] = ProcessState(name, since=self.now)

    def _host_leaving(self, event: m.HostLeaving) -> None:
        host = event.host
        if host not in self.here or host in self.leaving:
            return
        self.leaving.add(host)
        self._notify(f"host {host} leaves within {event.within_s:g} s{self._without(host)}")
        self._move_workers_from(host, "leaves", 0.8 * event.within_s)

    def _committed(self, step: int) -> None:
        if step <= self.step:
            return
        self.step = step
        for process in (self.workers, *self.services.values()):
            process.ends = 0

    # -- actions --

    def _settle(self) -> None:
        """Take every action that the current state allows."""
        if self.phase is RunPhase.GOING:
            self._start_services()
            self._set_reducers()
            self._run_workers()
        if self.phase is RunPhase.ENDING:  # the methods above may have changed the phase
            self._bring_down()

    def _start_services(self) -> None:
        due = [
            service
            for service in self.services.values()
            if service.phase is ProcessPhase.WAITING
            and service.due <= self.now
            and self.places[service.name].host in self.here
        ]
        if due:
            self._notify(
                "starting "
                + ", ".join(f"{state.name} on {self.places[state.name].host}" for state in due)
            )
        for service in due:
            service.enter(ProcessPhase.RUNNING, self.now)
            self.left_out.discard(service.name)
            self._out.append(m.StartService(service.name))

    def _set_reducers(self) -> None:
        reducers = self._reducers()
        if reducers != self.reducers:
            self._notify(f"workers use the reducers on {', '.join(reducers) or 'no host'}")
            self.reducers = reducers
            self._out.append(m.SetReducers(reducers))

    def _run_workers(self) -> None:
        workers = self.workers
        if workers.phase is ProcessPhase.STOPPING:
            self._watch_stop(workers)
        elif workers.phase is ProcessPhase.RUNNING:
            hosts, _ = self._choose()
            if self._width(hosts) > self._width(self.worker_hosts):
                self._stop(
                    workers,
                    f"workers restart on {self._described(hosts)} after this step",
                    self.facts.step_grace_s,
                )
        elif workers.phase is ProcessPhase.WAITING and workers.due <= self.now:
            self._start_workers()

    def _start_workers(self) -> None:
        hosts, why = self._choose()
        if lacking := self._lacking():
            hosts, why = (), f"{', '.join(lacking)} must run first"
        if not hosts:
            if why != self._waits_for:
                self._notify(f"workers wait: {why}")
            self._waits_for = why
            return
        self._waits_for = ""
        self.attempt, self.worker_hosts = self.attempt + 1, hosts
        self._notify(f"starting workers on {self._described(hosts)}")
        self.workers.enter(ProcessPhase.RUNNING, self.now)
        self._out.append(m.StartWorkers(self.attempt, hosts))

    def _move_workers_from(self, host: str, cause: str, grace_s: float) -> bool:
        """If a worker runs on a host, stop all workers, so that they restart on other hosts. Return
        True if this call stops them. `cause`: what happens to the host, for the user."""
        running = self.workers.phase is ProcessPhase.RUNNING and self.phase is RunPhase.GOING
        if not running or host not in self.worker_hosts:
            return False
        hosts, why = self._choose()
        then = f"restart on {self._described(hosts)}" if hosts else f"wait: {why}"
        self._stop(self.workers, f"host {host} {cause}: workers end and {then}", grace_s)
        return True

    def _done(self) -> None:
        if self.phase is RunPhase.GOING:
            self._end(0, "all workers are done")
        elif self.code == m.INTERRUPTED:  # the workers were done before the stop took effect
            self.code, self.why = 0, "all workers are done"

    def _end(self, code: int, why: str) -> None:
        if self.phase is not RunPhase.GOING:
            return
        self._enter(RunPhase.ENDING)
        self.code, self.why = code, why
        self._notify(f"the run ends: {why}")

    def _enter(self, phase: RunPhase) -> None:
        assert phase in NEXT_RUN_PHASES[self.phase], f"no transition from {self.phase} to {phase}"
        self.phase = phase

    def _bring_down(self) -> None:
        """Stop the workers first and then the services, which workers need to commit their step."""
        if not self._is_down(self.workers, self.facts.step_grace_s):
            return
        down = [self._is_down(each, SERVICE_GRACE_S) for each in reversed(self.services.values())]
        if all(down):
            self._enter(RunPhase.ENDED)
            self._notify(
                {0: "the run is done", m.INTERRUPTED: "the run is stopped"}.get(
                    self.code, "the run failed"
                )
            )
            self._out.append(m.EndRun(self.code, self.why))

    def _is_down(self, process: ProcessState, grace_s: float) -> bool:
        """Stop a process if it is not stopping yet. Return True if it has ended."""
        if process.phase is ProcessPhase.WAITING:
            process.enter(ProcessPhase.ENDED, self.now)
        elif process.phase is ProcessPhase.RUNNING:
            self._stop(process, f"stopping {process.name}", grace_s)
        elif process.phase is ProcessPhase.STOPPING:
            self._watch_stop(process)
        return process.phase is ProcessPhase.ENDED

    def _stop(self, process: ProcessState, text: str, grace_s: float) -> None:
        self._notify(text)
        process.enter(ProcessPhase.STOPPING, self.now)
        process.stop_until = self.now + grace_s + KILL_S
        self._out.append(m.StopProcess(process.name, grace_s))

    def _watch_stop(self, process: ProcessState) -> None:
        """Treat a stopping process as ended after its deadline, and end the run."""
        assert process.stop_until is not None
        if self.now < process.stop_until:
            return
        waited = f"{process.name} did not end within {self.now - process.since:.0f} s"
        process.enter(ProcessPhase.ENDED, self.now)
        if self.phase is RunPhase.GOING:
            self._end(1, f"{waited}, so it cannot be restarted")
        else:
            self._notify(f"{waited}: giving up on it")

    # -- queries --

    def _choose(self) -> tuple[tuple[str, ...], str]:
        """Return the best available hosts for the workers, in rank order, and "". If workers cannot
        run now, return () and the reason."""
        planned = tuple(self.facts.workers)
        missing = [host for host in planned if not self._is_usable(host)]
        if not missing:
            return planned, ""
        free = [host for host in self.spares if self._is_usable(host) and host not in planned]
        instead: dict[str, str] = {}
        for host in missing:
            fits = [name for name in free if self.spares[name] == self.facts.workers[host]]
            if fits:
                instead[host] = fits[0]
                free.remove(fits[0])
        replaced = tuple(
            instead.get(host, host) for host in planned if host in instead or host not in missing
        )
        fewer = tuple(host for host in planned if host not in missing)
        why = f"{', '.join(missing)} must be back first"
        shrink = self.facts.shrink
        if shrink and any(self.now < self.without_from.get(host, 0.0) for host in missing):
            shrink, why = False, f"{', '.join(missing)} may be back within {BACK_S:g} s"
        choices = [replaced] if len(instead) == len(missing) or shrink else []
        choices += [fewer] if shrink and fewer != replaced else []
        for hosts in filter(None, choices):
            refused = self.facts.can_run_on(hosts)
            if not refused:
                return hosts, ""
            if shrink == self.facts.shrink:
                why = f"{', '.join(missing)} must be back first ({refused})"
        return (), why

    def _is_usable(self, host: str) -> bool:
        return host in self.here and host not in self.leaving

    def _lacking(self) -> list[str]:
        """Return the names of the servers and switches that workers need but that do not run."""
        lacking = [
            name
            for name, service in self.services.items()
            if service.phase is not ProcessPhase.RUNNING and not self.places[name].reducer
        ]
        lost = self._lost_replicated()
        return [name for name in lacking if name not in lost] if len(lost) == 1 else lacking

    def _lost_replicated(self) -> list[str]:
        """Return the names of the servers that are on lost hosts and have a replica."""
        places = self.places.items()
        return [name for name, place in places if place.replicated and place.host not in self.here]

    def _reducers(self) -> tuple[str, ...]:
        return tuple(
            place.host
            for name, place in self.places.items()
            if place.reducer and name not in self.left_out and self._is_usable(place.host)
        )

    def _services_on(self, host: str) -> list[str]:
        return [name for name, place in self.places.items() if place.host == host]

    def _width(self, hosts: Sequence[str]) -> int:
        return sum(self.facts.workers.get(host) or self.spares.get(host, 0) for host in hosts)

    def _described(self, hosts: Sequence[str]) -> str:
        width, full = self._width(hosts), self._width([*self.facts.workers])
        share = f"{width} workers" if width == full else f"{width} of {full} workers"
        return f"{', '.join(hosts)} ({share})"

    def _without(self, host: str) -> str:
        """Return a text on the effect of losing a host, or "" if it has no servers and no
        switches."""
        names = [name for name in self._services_on(host) if not self.places[name].reducer]
        if not names:
            return ""
        lost = {*self._lost_replicated(), *(name for name in names if self.places[name].replicated)}
        alone = lost == {*names} and len(names) == 1
        then = "workers go on with its replicas" if alone else "workers wait until it is back"
        return f"; it runs {', '.join(names)}: {then}"

    def _notify(self, text: str) -> None:
        self._out.append(m.NotifyUser(text))

    def check(self) -> None:
        """Assert every invariant."""
        processes = [self.workers, *self.services.values()]
        assert self.services.keys() == self.places.keys()
        assert self.leaving <= self.here
        assert not self.without_from.keys() & self.here
        assert all(self.places[name].reducer for name in self.left_out)
        assert not self.lost_some or self.workers.phase is not ProcessPhase.RUNNING
        for process in processes:
            assert (process.stop_until is not None) == (process.phase is ProcessPhase.STOPPING)
            assert process.ends < ENDS_AT_MOST or self.phase is not RunPhase.GOING
        for name, service in self.services.items():
            if service.phase in (ProcessPhase.RUNNING, ProcessPhase.STOPPING):
                assert self.places[name].host in self.here, f"{name} runs on a lost host"
        if self.workers.phase is ProcessPhase.RUNNING and self.phase is RunPhase.GOING:
            assert all(map(self._is_usable, self.worker_hosts)), "workers run on a lost host"
        if self.phase is RunPhase.GOING:
            assert self.reducers == self._reducers()
            ended = [process.name for process in processes if process.phase is ProcessPhase.ENDED]
            assert not ended, f"{ended} ended for good while the run goes on"
        if self.phase is RunPhase.ENDED:
            assert all(process.phase is ProcessPhase.ENDED for process in processes)
        assert not self._out


def exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _quoted(line: str) -> str:
    return f": {line}" if line else ""
