"""Supervisor: the main loop of a launched run, in one thread. It passes the engine's events to the
state machine (launch/protocol/run_state.py) and makes the engine carry out the resulting actions.
It also serves requests from the control socket, and writes logs and state to the run's home.

Does NOT decide about restarts (the state machine does), and does NOT import torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from roadtrain.config.machines import LostHost
from roadtrain.errors import ConfigError, LaunchError, RoadtrainError, StoreError
from roadtrain.launch.checks import why_unfit
from roadtrain.launch.control_socket import ControlRequest, ControlSocket
from roadtrain.launch.home import PLANNED_ANEW, ProcessRow, RunHome, RunState, StartPhase
from roadtrain.launch.launch_engine import LaunchEngine
from roadtrain.launch.logs import PLAIN, RunLogs
from roadtrain.launch.measured_run import measure_run
from roadtrain.launch.processes import Process, Role, WorkerSet
from roadtrain.launch.protocol import run_events as m
from roadtrain.launch.protocol.run_phases import ProcessState, RunPhase
from roadtrain.launch.protocol.run_state import RunStateMachine
from roadtrain.launch.resolve import ResolvedRun
from roadtrain.storage.direct import replace_file

TURN_S = 0.2  # interval of the polls of the control socket
HELLO_S = 60.0  # timeout for the launcher's hello, if the run ends with its launcher
WRITE_AGAIN_S = 10.0  # pause between tries to write state.json after a failure
STEP = "step "  # prefix of the line that worker 0 prints for a step
GRACE_STEPS = 4  # workers that must end get at least the predicted time of this many steps
END_TRIES = 6  # number of tries to write the final state.json, as the disk may be full
STATUS = ("-m", "roadtrain.launch.host_status")
COMMITTED = ("-m", "roadtrain.launch.committed")
PUT_FILE = ("-m", "roadtrain.launch.put_file")


def facts_of(
    run: ResolvedRun,
    first_attempt: int,
    committed: int,
    can_run_on: Callable[[Sequence[str]], str],
) -> m.RunFacts:
    """Return the facts about a run that the state machine needs. `first_attempt`: the number of the
    first attempt that this supervisor will start. `committed`: the last committed step, or -1 if it
    is unknown. `can_run_on`: function that returns the reason why workers cannot run on given
    hosts, or ""."""
    machines, replicated = run.machines, run.job.servers.replicas > 1
    grace_s = max(m.STEP_GRACE_S, GRACE_STEPS * run.job.predicted.seconds)
    return m.RunFacts(
        services=tuple(
            m.RunService(
                process.name,
                process.host,
                reducer=process.role is Role.REDUCER,
                replicated=replicated and process.role is Role.SERVER,
            )
            for process in run.services()
        ),
        workers={host.name: host.workers for host in machines.hosts if host.workers},
        can_run_on=can_run_on,
        spares={host.name: host.workers for host in machines.spares},
        shrink=machines.lost_host is LostHost.SHRINK,
        sums_at_reducers=any(host.reducer for host in machines.hosts),
        first_attempt=first_attempt,
        committed=committed,
        step_grace_s=grace_s,
    )


class Supervisor:
    """The supervisor of a run, which continues from the attempt and the step in state.json.
    `ends_with_launcher`: True if the run ends when its launcher ends. `each_turn`: function that is
    called several times a second with the monotonic time."""

    def __init__(
        self,
        run: ResolvedRun,
        engine: LaunchEngine,
        home: RunHome,
        logs: RunLogs,
        *,
        ends_with_launcher: bool = False,
        each_turn: Callable[[float], None] | None = None,
    ) -> None:
        before = home.state()
        self._run, self._engine, self._home, self._logs = run, engine, home, logs
        # With `run.new_store`, the committed step is of an older run until this run has a step.
        seen = before.step >= 0 or StartPhase.STEPPED in before.stamps
        self._begins_anew = run.job.run.new_store and not seen
        self._step = before.step  # the last step known to be committed
        self._machine = RunStateMachine(
            facts_of(run, before.attempt + 1, self._step, lambda hosts: self._run.can_run_on(hosts))
        )
        self._stamps = dict(before.stamps)
        self._workers = WorkerSet(before.attempt, ())  # workers of the last attempt
        self._line_at = 0.0  # wall-clock time of worker 0's latest line, before its first step
        self._failed: deque[m.RunEvent] = deque()  # events that report failed actions
        self._ended: m.EndRun | None = None
        self._written: RunState | None = None  # the state in state.json
        self._write_at = 0.0  # monotonic time of the next try after a failed write, else 0
        self._ends_with_launcher = ends_with_launcher
        self._each_turn = each_turn
        self._began = time.monotonic()
        # The reason of a stop request, or "". An earlier supervisor may have received the request.
        self._stops = before.stops
        self._stop_asked = before.stops  # reason of a request that the state machine has not got
        self._measures = before.stops == PLANNED_ANEW  # measure links after the run has stopped
        self._user_stops = ""  # the user's reason, if a user has asked for the end

    def run(self) -> int:
        """Supervise the run until its end, and return the run's exit code. End all processes of the
        engine, also after an error."""
        try:
            with ControlSocket(self._home) as control:
                self._ask_step(self._run.worker_hosts)
                for event in self._engine.events(0.0):  # a host may be lost already
                    self._take(event)
                self._feed_stop()
                self._feed(m.TimePassed())
                while self._ended is None:
                    self._turn(control)
            if self._measures:
                self._measure()
        except BaseException as error:
            self._logs.notify(f"the supervisor failed and ends all processes: {error!r}")
            self._ended = m.EndRun(1, f"the supervisor failed: {error}")
            raise
        finally:
            try:
                self._engine.close()
            finally:
                self._write_end()
                self._logs.flush()
        return self._ended.code

    def _write_end(self) -> None:
        """Write the final state.json, without which the supervisor would seem to have been
        killed."""
        for _ in range(END_TRIES):
            if self._write_state(now=True):
                return
            time.sleep(WRITE_AGAIN_S)

    def stop(self, why: str) -> None:
        """Request the end of the run. May be called from a signal handler."""
        self._stop_asked = why

    def _turn(self, control: ControlSocket) -> None:
        for event in self._engine.events(TURN_S):
            self._take(event)
        for request in control.requests():
            self._answer(request)
        now = time.monotonic()
        if self._ends_with_launcher and not control.greeted and now > self._began + HELLO_S:
            self._stop_asked = f"the launcher did not connect within {HELLO_S:.0f} s"
        self._feed_stop()
        self._feed(m.TimePassed())
        if self._each_turn is not None:
            self._each_turn(now)
        self._write_state()
        self._logs.flush()

    # -- events --

    def _take(self, event: m.RunEvent) -> None:
        match event:
            case m.Output(name, host, line):
                self._logs.write(name, host, line)
                if name == PLAIN and StartPhase.STEPPED not in self._stamps:
                    self._stamp_line(line)
                return
            case m.WorkersPlaced():
                self._stamps.setdefault(StartPhase.PLACED, time.time())
                return
            case m.ProcessEnded() | m.WorkersEnded() if self._machine.phase is RunPhase.GOING:
                self._ask_step(self._machine.worker_hosts)
            case m.HostJoined():
                event = self._add_host(event)
        self._feed(event)

    def _add_host(self, event: m.HostJoined) -> m.HostJoined:
        """Add the host of `event` to the run. Return the event, with `workers` = 0 if the host
        cannot run workers."""
        count = self._machine.facts.workers_of(event.workers)
        self._run = self._run.with_host(event.host, event.address, count)
        spare = any(host.name == event.host for host in self._run.machines.spares)
        why = why_unfit(self._run, self._engine, event.host) if spare and event.workers else ""
        if why:
            self._logs.notify(f"host {event.host} joined, but is not used for workers: {why}")
            return replace(event, workers=0)
        return event

    def _stamp_line(self, line: str) -> None:
        now = time.time()
        if StartPhase.IMPORTED not in self._stamps:
            self._stamps[StartPhase.IMPORTED] = now
        if line.startswith(STEP):
            self._begins_anew = False
            self._stamps[StartPhase.JOINED] = self._line_at or now
            self._stamps[StartPhase.STEPPED] = now
        self._line_at = now

    def _feed_stop(self) -> None:
        if self._stop_asked:
            self._stops = self._stop_asked
            self._feed(m.StopRequested(self._stop_asked))
            self._stop_asked = ""

    def _ask_step(self, hosts: Sequence[str]) -> None:
        """Read the committed step from the first of the `hosts`, the host of worker 0, and pass it
        to the state machine."""
        if self._begins_anew or not hosts or hosts[0] not in self._machine.here:
            return
        request = {"directory": self._run.directory}
        try:
            step = int(self._engine.ask(hosts[0], COMMITTED, request)["step"])
        except LaunchError as error:
            self._logs.notify(f"the committed step cannot be read: {error}")
            return
        self._learn_step(step)

    def _learn_step(self, step: int) -> None:
        if self._begins_anew:
            return
        self._step = max(self._step, step)
        if self._machine.attempt >= self._machine.facts.first_attempt:
            self._feed(m.Committed(self._step))

    def _feed(self, event: m.RunEvent) -> None:
        for action in self._machine.handle(event, time.monotonic()):
            self._carry_out(action)
        while self._failed:
            self._feed(self._failed.popleft())

    # -- actions --

    def _carry_out(self, action: m.RunAction) -> None:
        match action:
            case m.NotifyUser(text):
                self._logs.notify(text)
            case m.StartService(name):
                try:
                    self._engine.start(self._service(name))
                except RoadtrainError as error:
                    self._failed.append(m.ProcessEnded(name, 1, str(error)))
            case m.StartWorkers(attempt, hosts):
                self._start_workers(attempt, hosts)
            case m.StopProcess(name, grace_s):
                self._engine.stop(name, grace_s)
            case m.SetReducers(hosts):
                self._set_reducers(hosts)
            case m.EndRun(code):
                by_user = code == m.INTERRUPTED and self._user_stops
                self._ended = replace(action, why=self._user_stops) if by_user else action

    def _service(self, name: str) -> Process:
        planned = {process.name: process for process in self._run.services()}
        return planned.get(name) or self._run.reducer(self._machine.places[name].host)

    def _start_workers(self, attempt: int, hosts: Sequence[str]) -> None:
        self._write_state(now=True)  # so that this attempt's number is never reused
        if attempt > self._machine.facts.first_attempt:
            self._ask_step(hosts)
        try:
            self._workers = self._run.workers(
                hosts,
                attempt,
                self._machine.reducers,
                self._step,
                begins_anew=self._begins_anew,
            )
            self._engine.start_workers(self._workers)
        except RoadtrainError as error:
            code = m.REFUSED if isinstance(error, ConfigError) else m.FAILED
            self._failed.append(m.WorkersEnded(attempt, code, "workers", str(error)))
        self._stamps.setdefault(StartPhase.WORKERS, time.time())

    def _set_reducers(self, hosts: Sequence[str]) -> None:
        """Write reducers.txt on all hosts with workers. A host that cannot be reached is only
        logged, because the engine reports its loss."""
        file = {"path": self._run.reducers_path, "content": self._run.reducer_lines(hosts)}
        for host in self._machine.worker_hosts:
            try:
                self._engine.ask(host, PUT_FILE, file)
            except LaunchError as error:
                self._logs.notify(f"the reducers of workers on {host} were not changed: {error}")

    # -- requests --

    def _answer(self, request: ControlRequest) -> None:
        try:
            request.connection.answer(self._reply(request))
        except RoadtrainError as error:
            request.connection.answer({"error": str(error)})

    def _reply(self, request: ControlRequest) -> Mapping[str, Any]:
        match request.verb:
            case "status":
                return self._status()
            case "stop":
                self._stop_asked = self._user_stops = " ".join(request.words) or "asked to stop"
                self._measures = False
                return {}
            case "measure":
                self._stop_asked, self._measures = PLANNED_ANEW, True
                return {}
            case "gone":
                self._stop_asked = "the launcher ended"
                return {}
            case "tell":
                return {"said": self._engine.run_verb(request.words)}
        raise LaunchError(
            f"unknown verb {request.verb!r}", hint="use status, stop, measure or tell"
        )

    def _status(self) -> Mapping[str, Any]:
        """Return the supervisor's state, and the status of the run from the first host of each
        pipeline stage."""
        hosts = self._run.hosts_of_stages(self._machine.worker_hosts)
        hosts = [host for host in hosts if host in self._machine.here]
        run: dict[str, Any] = {"step": -1, "code": 1, "lines": ["no worker has started"]}
        tables: dict[str, Any] = {}
        for host in hosts:
            request = {"directory": self._run.directory, "first": host == hosts[0]}
            try:
                status = self._engine.ask(host, STATUS, request)
            except LaunchError as error:
                status = {"step": -1, "code": 1, "lines": [str(error)], "stages": []}
            run = status if host == hosts[0] else run
            for table in status["stages"]:  # hosts with a shared directory return the same tables
                tables.setdefault(table[0][0], table)
        self._learn_step(int(run["step"]))
        run["stages"] = [table for _, table in sorted(tables.items())]
        return {"state": msgspec.to_builtins(self._state()), "run": run}

    def _measure(self) -> None:
        """Measure the links after all processes have ended, while the engine still has its hosts. A
        failure is only logged."""
        self._logs.notify("measuring the links between the run's hosts")
        path = self._home.measured_path
        try:
            found = measure_run(self._engine, self._run, self._machine.worker_hosts)
            for missing in found.missing:
                self._logs.notify(f"not measured: {missing}")
            replace_file(path, msgspec.json.encode(found), "writing the measurements")
        except (RoadtrainError, OSError) as error:
            self._logs.notify(f"measuring failed: {error}")

    # -- state --

    def _state(self) -> RunState:
        machine, ended = self._machine, self._ended
        return RunState(
            phase=RunPhase.ENDED.value if ended else machine.phase.value,
            code=ended.code if ended else 0,
            why=ended.why if ended else "",
            stops=self._stops,
            attempt=max(machine.attempt, self._workers.attempt),
            step=self._step,
            processes=self._rows(),
            stamps=dict(self._stamps),
        )

    def _rows(self) -> tuple[ProcessRow, ...]:
        to_wall = time.time() - time.monotonic()

        def row(name: str, host: str, state: ProcessState) -> ProcessRow:
            since = round(state.since + to_wall, 1)
            return ProcessRow(name, host, state.phase.value, state.restarts, since)

        machine = self._machine
        services = machine.services.items()
        return (
            *(row(name, machine.places[name].host, state) for name, state in services),
            *(row(p.name, p.host, machine.workers) for p in self._workers.processes),
        )

    def _write_state(self, now: bool = False) -> bool:
        """Write state.json if the state has changed. Return False, and log the problem, if the
        write fails, because a full disk must not end a run. For a fixed time after a failure, only
        calls with `now` = True try again."""
        state = self._state()
        if state == self._written:
            return True
        if time.monotonic() < self._write_at and not now:
            return False
        try:
            self._home.write_state(state)
        except StoreError as error:
            if not self._write_at:
                why = str(error).partition("\n")[0]
                self._logs.notify(
                    f"the run goes on, but writing state.json failed and is retried: {why}"
                )
            self._write_at = time.monotonic() + WRITE_AGAIN_S
            return False
        if self._write_at:
            self._logs.notify("state.json can be written again")
        self._written, self._write_at = state, 0.0
        return True
