"""RunStateMachine: keeps a launched run running. Events and actions: run_events.py. Pure.

Each event first changes what is known; then all that can now be done is done (`_settle`), each
thing said before. So nothing depends on the order in which a host, a service and the workers of one
fault are reported.

    a service   WAITING -> RUNNING -> WAITING ..       (of itself, or its host is lost)
                            -> STOPPING -> ENDED       (the run ends)
    the workers WAITING -> RUNNING -> WAITING ..       (one failed)
                            -> STOPPING -> WAITING ..  (they are to run on other hosts)
    the run     GOING -> ENDING -> ENDED

Assumes that an engine tells the end of all that it was told to start, but for services on a lost
host. Does NOT judge whether a run makes sense on other hosts: `RunFacts.can_run_on` does.
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

ENDS_AT_MOST = 6  # of one service, or of the workers, without a committed step between
SERVICE_GRACE_S = 20.0
LOST_GRACE_S = 5.0  # workers whose peers are gone cannot finish their step
# A lost host has so long to be there again before others go on without it: with fewer workers sums
# are in another order, so losses agree to rounding only (Rule 1). Nobody waits for one that said
# that it leaves.
BACK_S = 15.0
KILL_S = 60.0  # from being killed to its end being told; then it is given up
KILLED = -9
LEFT_OUT_S = 600.0  # a reducer that ends again and again is tried again after it
USERS_MISTAKE = 2  # exit code of `roadtrain: ...`
INTERRUPTED = 130
WORKERS = "workers"  # the name of all of them in StopProcess


class RunStateMachine:
    def __init__(self, facts: m.RunFacts) -> None:
        self.facts = facts
        self.phase = RunPhase.GOING
        self.now = 0.0  # of the last event
        self.step = facts.committed  # the last that is known to be committed
        # By name: those of the plan, then the reducers of hosts that came.
        self.places: dict[str, m.RunService] = {one.name: one for one in facts.services}
        self.services = {one.name: ProcessState(one.name) for one in facts.services}
        self.workers = ProcessState(WORKERS)
        self.worker_hosts: tuple[str, ...] = ()  # of the last attempt, in the order of ranks
        self.attempt = facts.first_attempt - 1  # the last that was started
        self.spares = dict(facts.spares)  # and hosts that came -> workers they can run
        # Hosts that answer; a leaving one does until it is lost, but gets no worker any more.
        self.here = {*facts.workers, *facts.spares, *(one.host for one in facts.services)}
        self.leaving: set[str] = set()
        # Lost host with workers -> from then on the others go on without it, if they can.
        self.without_from: dict[str, float] = {}
        # Reducers that ended again and again: workers sum without them until they start again.
        self.left_out: set[str] = set()
        # Workers were asked to end because a host was lost: their end is a fault.
        self.lost_some = False
        self.reducers = self._reducers()  # hosts that workers were told
        self.code, self.why = 0, ""  # of the run's end
        self._waits_for = ""  # why workers are not started, as it was told last
        self._out: list[m.RunAction] = []  # of the event that is being handled

    def handle(self, event: m.RunEvent, now: float) -> list[m.RunAction]:
        """now: seconds on a clock that never goes back."""
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
                self._host_came(event)
            case m.HostLeaving():
                self._host_leaves(event)
            case m.Committed():
                self._committed(event.step)
            case m.StopRequested():
                self._end(INTERRUPTED, event.why)
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
        what = f"{event.name} on {self.places[event.name].host} ended ({how(event.code)})"
        often = f"{what}, {service.ends} times without a committed step: {event.last_line}"
        if service.ends >= ENDS_AT_MOST and self.places[event.name].reducer:
            self._leave_out(service)
            self._notify(f"{often}; workers sum without it, it starts again in {LEFT_OUT_S:g} s")
        elif service.ends >= ENDS_AT_MOST:
            self._end(1, often)
        else:
            self._notify(f"{what}, it starts again {when}{_quoted(event.last_line)}")

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
            self._notify(f"{name} on {self.places[name].host} was started again by the engine")
            service.enter(ProcessPhase.RUNNING, self.now)
            self.left_out.discard(name)

    def _workers_ended(self, event: m.WorkersEnded) -> None:
        workers = self.workers
        running = workers.phase in (ProcessPhase.RUNNING, ProcessPhase.STOPPING)
        if event.attempt != self.attempt or not running:
            return
        asked = workers.phase is ProcessPhase.STOPPING
        if event.code == 0 or self.phase is not RunPhase.GOING:
            workers.enter(ProcessPhase.ENDED, self.now)
            if event.code == 0:
                self._done()
            return
        workers.enter(ProcessPhase.WAITING, self.now)
        workers.due = self.now
        if asked:
            self._asked_workers_ended(event)
            return
        what = f"{event.first} ended ({how(event.code)})"
        if event.code == INTERRUPTED:
            self._end(INTERRUPTED, f"{event.first} was interrupted")
            return
        when = workers.ended_by_itself(self.now)
        first = self.attempt == self.facts.first_attempt and self.step < 0
        if event.code == USERS_MISTAKE and first:
            self._end(USERS_MISTAKE, event.last_line or what)
        elif workers.ends >= ENDS_AT_MOST:
            self._end(
                1, f"{what}, {workers.ends} times without a committed step: {event.last_line}"
            )
        else:
            self._notify(
                f"{what}: all workers begin again at the committed step, {when}"
                f"{_quoted(event.last_line)}"
            )

    def _asked_workers_ended(self, event: m.WorkersEnded) -> None:
        """To be started elsewhere. Those that lost a host count as failed, so that a host which
        comes and goes does not keep a run from its end for ever."""
        workers = self.workers
        if not self.lost_some:
            if event.code == KILLED:
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

    def _host_came(self, event: m.HostJoined) -> None:
        host = event.host
        if host in self.here and host not in self.leaving:
            return
        known = host in self.facts.workers or host in self.spares or self._services_on(host)
        self.here.add(host)
        self.leaving.discard(host)
        self.without_from.pop(host, None)
        if known:
            self._notify(f"host {host} is there again")
            if host in self.spares:
                self.spares[host] = self.facts.workers_of(event.workers)
            for name in self._services_on(host):
                self.services[name].due = self.now
                self.left_out.discard(name)
            return
        self.spares[host] = self.facts.workers_of(event.workers)
        if not self.facts.sums_at_reducers:
            self._notify(f"host {host} came, with {self.spares[host]} workers: it is a spare one")
        elif self.phase is RunPhase.GOING:
            self._notify(f"host {host} came: it sums for the workers from now on")
            name = f"reducer {host}"
            self.places[name] = m.RunService(name, host, reducer=True)
            self.services[name] = ProcessState(name, since=self.now)

    def _host_leaves(self, event: m.HostLeaving) -> None:
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

    # -- what follows --

    def _settle(self) -> None:
        """All that can be done now."""
        if self.phase is RunPhase.GOING:
            self._start_services()
            self._set_reducers()
            self._run_workers()
        if self.phase is RunPhase.ENDING:  # maybe since a moment ago
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
                + ", ".join(f"{one.name} on {self.places[one.name].host}" for one in due)
            )
        for service in due:
            service.enter(ProcessPhase.RUNNING, self.now)
            self.left_out.discard(service.name)
            self._out.append(m.StartService(service.name))

    def _set_reducers(self) -> None:
        reducers = self._reducers()
        if reducers != self.reducers:
            self._notify(f"workers sum with {', '.join(reducers) or 'no spare host'}")
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
                    f"workers begin again on {self._described(hosts)} after this step",
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
        """Workers end where some run on this host, to be started elsewhere, or as soon as they can
        be. Whether they do."""
        running = self.workers.phase is ProcessPhase.RUNNING and self.phase is RunPhase.GOING
        if not running or host not in self.worker_hosts:
            return False
        hosts, why = self._choose()
        then = f"begin again on {self._described(hosts)}" if hosts else f"wait: {why}"
        self._stop(self.workers, f"host {host} {cause}: workers end and {then}", grace_s)
        return True

    def _done(self) -> None:
        if self.phase is RunPhase.GOING:
            self._end(0, "all workers are done")
        elif self.code == INTERRUPTED:  # the run was faster than the wish to stop it
            self.code, self.why = 0, "all workers are done"

    def _end(self, code: int, why: str) -> None:
        if self.phase is not RunPhase.GOING:
            return
        self._enter(RunPhase.ENDING)
        self.code, self.why = code, why
        self._notify(f"the run ends: {why}")

    def _enter(self, phase: RunPhase) -> None:
        assert phase in NEXT_RUN_PHASES[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase

    def _bring_down(self) -> None:
        """Workers first: they need the services to commit their step."""
        if not self._is_down(self.workers, self.facts.step_grace_s):
            return
        down = [self._is_down(one, SERVICE_GRACE_S) for one in reversed(self.services.values())]
        if all(down):
            self._enter(RunPhase.ENDED)
            self._notify(
                {0: "the run is done", INTERRUPTED: "the run is stopped"}.get(
                    self.code, "the run failed"
                )
            )
            self._out.append(m.EndRun(self.code, self.why))

    def _is_down(self, process: ProcessState, grace_s: float) -> bool:
        """Ask it to end, if it was not; whether it has ended."""
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
        """Rule 5: the wait for an end has a deadline."""
        assert process.stop_until is not None
        if self.now < process.stop_until:
            return
        waited = f"{process.name} did not end within {self.now - process.since:.0f} s"
        process.enter(ProcessPhase.ENDED, self.now)
        if self.phase is RunPhase.GOING:
            self._end(1, f"{waited}: there must never be two of them")
        else:
            self._notify(f"{waited}: given up")

    # -- what is known --

    def _choose(self) -> tuple[tuple[str, ...], str]:
        """The hosts that workers run best on now, in the order of ranks; or none, and why."""
        planned = tuple(self.facts.workers)
        missing = [host for host in planned if not self._is_usable(host)]
        if not missing:
            return planned, ""
        free = [host for host in self.spares if self._is_usable(host) and host not in planned]
        instead: dict[str, str] = {}
        for host in missing:
            fits = [one for one in free if self.spares[one] == self.facts.workers[host]]
            if fits:
                instead[host] = fits[0]
                free.remove(fits[0])
        replaced = tuple(
            instead.get(host, host) for host in planned if host in instead or host not in missing
        )
        fewer = tuple(host for host in planned if host not in missing)
        why = f"{', '.join(missing)} must be there again"
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
                why = f"{', '.join(missing)} must be there again ({refused})"
        return (), why

    def _is_usable(self, host: str) -> bool:
        return host in self.here and host not in self.leaving

    def _lacking(self) -> list[str]:
        """Servers and switches that workers cannot begin without."""
        lacking = [
            name
            for name, service in self.services.items()
            if service.phase is not ProcessPhase.RUNNING and not self.places[name].reducer
        ]
        lost = self._lost_replicated()
        return [name for name in lacking if name not in lost] if len(lost) == 1 else lacking

    def _lost_replicated(self) -> list[str]:
        """Servers on lost hosts whose chunks another one has too: of two lost ones no third may
        have them."""
        places = self.places.items()
        return [name for name, one in places if one.replicated and one.host not in self.here]

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
        """What follows from a host's going for its servers and switches."""
        names = [name for name in self._services_on(host) if not self.places[name].reducer]
        if not names:
            return ""
        lost = {*self._lost_replicated(), *(one for one in names if self.places[one].replicated)}
        alone = lost == {*names} and len(names) == 1
        then = "the others go on" if alone else "workers wait until it is back"
        return f"; with it {', '.join(names)}: {then}"

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
            ended = [one.name for one in processes if one.phase is ProcessPhase.ENDED]
            assert not ended, f"{ended} ended for good while the run goes on"
        if self.phase is RunPhase.ENDED:
            assert all(one.phase is ProcessPhase.ENDED for one in processes)
        assert not self._out


def how(code: int) -> str:
    """A process ended."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _quoted(said: str) -> str:
    return f": {said}" if said else ""
