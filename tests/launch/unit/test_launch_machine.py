"""RunStateMachine under single faults, two faults at once, and random faults of a fake engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.launch.protocol.run_events import (
    Committed,
    EndRun,
    HostJoined,
    HostLeaving,
    HostLost,
    NotifyUser,
    Output,
    ProcessEnded,
    ProcessRestarted,
    RunAction,
    RunEvent,
    RunFacts,
    RunService,
    SetReducers,
    StartService,
    StartWorkers,
    StopProcess,
    StopRequested,
    TimePassed,
    WorkersEnded,
)
from roadtrain.launch.protocol.run_phases import ProcessPhase, RunPhase
from roadtrain.launch.protocol.run_state import RunStateMachine

SERVER, REDUCER = RunService("server s0 0", "s0"), RunService("reducer r0", "r0", reducer=True)
REPLICATED = tuple(
    RunService(f"server {host} 0", host, replicated=True) for host in ("s0", "s1", "s2")
)


def facts(**changes) -> RunFacts:
    """Facts of a run: one worker each on a and b, a server, a reducer, a spare host."""
    fields = {
        "services": (SERVER, REDUCER),
        "workers": {"a": 1, "b": 1},
        "can_run_on": lambda hosts: "",
        "spares": {"spare": 1},
    }
    return RunFacts(**{**fields, **changes})


class Driven:
    """A state machine whose clock the test advances."""

    def __init__(self, **changes) -> None:
        self.machine, self.at = RunStateMachine(facts(**changes)), 0.0
        self.lines: list[str] = []
        self.actions = self(TimePassed())

    def __call__(self, event: RunEvent) -> list[RunAction]:
        """Feed an event. Returns the actions except messages to the user, which go to `lines`."""
        out = self.machine.handle(event, self.at)
        self.machine.check()
        assert_announced(out)
        self.lines += [action.text for action in out if isinstance(action, NotifyUser)]
        return [action for action in out if not isinstance(action, NotifyUser)]

    def later(self, seconds: float) -> list[RunAction]:
        self.at += seconds
        return self(TimePassed())

    def failed(self, code: int = 1, message: str = "") -> list[RunAction]:
        return self(WorkersEnded(self.machine.attempt, code, "worker 1", message))

    def ended(self, name: str, code: int = 1, message: str = "") -> list[RunAction]:
        return self(ProcessEnded(name, code, message))

    def lost(self, host: str) -> list[RunAction]:
        return self(HostLost(host, "its agent is gone"))

    def joined(self, host: str, workers: int = 1) -> list[RunAction]:
        return self(HostJoined(host, "10.0.0.1", workers))

    def leaves(self, host: str) -> list[RunAction]:
        return self(HostLeaving(host, 100))


def assert_announced(actions: Sequence[RunAction]) -> None:
    """Check that a message to the user precedes every other action."""
    for i, action in enumerate(actions):
        if not isinstance(action, NotifyUser):
            assert any(isinstance(earlier, NotifyUser) for earlier in actions[:i]), action


def start(name: str) -> StartService:
    return StartService(name)


def stop_workers(grace_s: float) -> StopProcess:
    return StopProcess("workers", grace_s)


def test_services_start_before_workers() -> None:
    run = Driven()
    assert run.actions == [
        start("server s0 0"),
        start("reducer r0"),
        StartWorkers(0, ("a", "b")),
    ]
    assert run.later(1) == [] and run(Output("worker 0", "a", "step 1")) == []


def test_the_run_ends_when_its_workers_are_done() -> None:
    run = Driven()
    assert run.failed(0) == [StopProcess("reducer r0", 20), StopProcess("server s0 0", 20)]
    assert run.ended("server s0 0", 0) == []
    assert run.ended("reducer r0", 130) == [EndRun(0, "all workers are done")]
    assert run.later(9) == [] and run.joined("new") == []


def test_a_service_is_restarted_at_once_and_then_with_delays() -> None:
    run = Driven()
    assert run.ended("server s0 0", -9, "killed") == [start("server s0 0")]
    assert run.lines[-2] == ("server s0 0 on s0 ended (signal 9), it is restarted at once: killed")
    assert run.ended("server s0 0") == []  # after 1 s
    assert run.later(0.5) == []
    assert run.later(0.6) == [start("server s0 0")]
    run(Committed(7))  # counts from zero again
    assert run.ended("server s0 0") == [start("server s0 0")]


def test_a_service_that_ends_six_times() -> None:
    run = Driven()
    for _ in range(5):
        run.ended("server s0 0", 2, "roadtrain: the store is another job's")
        assert run.machine.phase is RunPhase.GOING
        run.later(31)
    # Rule 5
    assert run.ended("server s0 0", 2, "roadtrain: the store is another job's") == [
        stop_workers(120)
    ]
    assert run.failed(-9) == [StopProcess("reducer r0", 20)]
    (end,) = run.ended("reducer r0")
    assert end.code == 1 and end.why.endswith(
        "6 times without a committed step: " + ("roadtrain: the store is another job's")
    )


def test_workers_sum_without_a_reducer_that_ends_six_times() -> None:
    run = Driven()
    for _ in range(5):
        run.ended("reducer r0", 1)
        run.later(31)
    assert run.ended("reducer r0", 1, "port 7000 is taken") == [SetReducers(())]
    assert "port 7000 is taken; workers run without it" in run.lines[-2]
    assert run.machine.phase is RunPhase.GOING and run.later(599) == []
    assert run.later(2) == [start("reducer r0"), SetReducers(("r0",))]


def test_a_host_that_leaves_and_returns_too_often_ends_the_run() -> None:
    """Rule 5: a committed step in between counts as progress."""
    run = Driven(spares={}, shrink=False)

    def lose_and_come() -> None:
        run.lost("b")
        run.failed(-9)
        run.joined("b")
        run.later(31)

    for step in range(2):
        for _ in range(5):
            lose_and_come()
        run(Committed(step))
    for _ in range(6):
        assert run.machine.phase is RunPhase.GOING
        lose_and_come()
    assert run.machine.why == "hosts were lost 6 times without a committed step"


def test_a_resumed_run_knows_its_committed_step() -> None:
    """Exit code 2 is then no mistake in the job, since the run has trained."""
    run = Driven(first_attempt=3, committed=7)
    run.failed(2, "roadtrain: no answer")
    assert run.machine.phase is RunPhase.GOING


def test_workers_get_the_time_of_a_step_to_end() -> None:
    run = Driven(step_grace_s=900.0)
    assert run(StopRequested("asked"))[0] == stop_workers(900)


def test_workers_killed_before_their_step_was_committed_are_reported() -> None:
    run = Driven(spares={})
    run.leaves("b")
    run.failed(-9)
    assert "worker 1 was killed before it had committed its step" in run.lines


def test_a_service_restarted_by_the_engine() -> None:
    run = Driven()
    assert run(ProcessRestarted("server s0 0")) == []
    assert run.machine.services["server s0 0"].restarts == 1
    assert run.machine.services["server s0 0"].phase is ProcessPhase.RUNNING


def test_failed_workers_are_restarted() -> None:
    run = Driven()
    assert run.failed(-9) == [StartWorkers(1, ("a", "b"))]
    assert run.lines[-2] == (
        "worker 1 ended (signal 9): all workers restart from the committed step at once"
    )
    assert run(WorkersEnded(0, 1, "worker 0")) == []  # an earlier attempt
    assert run.failed(1, "LostError") == [] and run.later(1) == [StartWorkers(2, ("a", "b"))]


def test_workers_that_fail_six_times() -> None:
    run = Driven()
    for _ in range(5):
        run.failed(1)
        run.later(31)
    run.failed(1, "FullError: /mnt: 3 GiB")
    assert run.machine.phase is RunPhase.ENDING and run.machine.code == 1
    assert "FullError: /mnt: 3 GiB" in run.machine.why


def test_a_mistake_of_the_user_ends_the_run_at_once() -> None:
    run = Driven()
    run.failed(2, "roadtrain: unknown key")
    assert (run.machine.code, run.machine.why) == (2, "roadtrain: unknown key")


@pytest.mark.parametrize("before", [Committed(1), WorkersEnded(0, 1, "worker 0")])
def test_exit_code_2_later_is_a_fault_like_others(before: RunEvent) -> None:
    run = Driven()
    run(before)
    run.failed(2, "roadtrain: LostError")
    assert run.machine.phase is RunPhase.GOING


def test_an_interrupted_worker() -> None:
    run = Driven()
    run.failed(130)
    assert (run.machine.phase, run.machine.code) == (RunPhase.ENDING, 130)


def test_a_stop_request_ends_the_run() -> None:
    run = Driven()
    assert run(StopRequested("the user asked for it")) == [stop_workers(120)]
    assert run(StopRequested("again")) == []
    assert run.failed(130) == [StopProcess("reducer r0", 20), StopProcess("server s0 0", 20)]
    run.ended("server s0 0", 0)
    assert run.ended("reducer r0", 0) == [EndRun(130, "the user asked for it")]


def test_workers_that_do_not_end_are_abandoned() -> None:
    run = Driven(services=())
    run(StopRequested("asked"))
    assert run.later(179) == []
    assert run.later(2) == [EndRun(130, "asked")]  # Rule 5


def test_a_spare_host_replaces_a_lost_worker_host() -> None:
    run = Driven()
    assert run.lost("b") == [stop_workers(5)]
    assert run.lines[-1] == "host b is lost: workers end and restart on a, spare (2 workers)"
    assert run.failed(-9) == [StartWorkers(1, ("a", "spare"))]
    assert run.joined("b") == []  # no wider than before
    assert run.failed(-9) == []  # the second time without a committed step
    assert run.later(1) == [StartWorkers(2, ("a", "b"))]


def test_the_other_hosts_continue_without_a_lost_worker_host() -> None:
    run = Driven(spares={"large": 2})
    run.lost("b")
    assert run.failed(1) == [] and "b may be back within 15 s" in run.lines[-1]  # Rule 1
    assert run.later(15) == [StartWorkers(1, ("a",))]
    assert run.lines[-1] == "starting workers on a (1 of 2 workers)"
    assert run.joined("b") == [stop_workers(120)]  # back to full width after this step
    assert run.failed(130) == [StartWorkers(2, ("a", "b"))]


@pytest.mark.parametrize(
    "changes",
    [
        {"shrink": False, "spares": {}},
        {"can_run_on": lambda hosts: "4 stages need 2 workers"},
    ],
)
def test_all_wait_for_a_lost_worker_host_that_is_needed(changes) -> None:
    run = Driven(**changes)
    run.lost("b")
    assert run.failed(1) == [] and run.later(99) == []
    assert "b must be back first" in run.lines[-1]
    assert run.joined("b") == [StartWorkers(1, ("a", "b"))]


def test_all_worker_hosts_are_lost() -> None:
    run = Driven(spares={})
    run.lost("a")
    assert run.lost("b") == [] and run.machine.workers.phase is ProcessPhase.STOPPING
    assert run.joined("a") == [] and run.failed(-9) == []
    assert run.later(15) == [StartWorkers(1, ("a",))]


def test_a_spare_host_waits_for_the_end_of_the_lost_workers() -> None:
    """There are never two attempts at once."""
    run = Driven(workers={"a": 1}, services=())
    assert run.lost("a") == [stop_workers(5)]
    assert run.failed(-9) == [StartWorkers(1, ("spare",))]


def test_a_worker_host_returns_before_the_others_continue() -> None:
    run = Driven(spares={})
    run.lost("b")
    assert run.failed(1) == [] and run.later(14) == []
    assert run.joined("b") == [
        StartWorkers(1, ("a", "b"))
    ]  # the same number of workers: the same bits (Rule 1)


def test_all_worker_hosts_are_lost_while_the_run_ends() -> None:
    run = Driven(services=())
    run(StopRequested("asked"))
    run.lost("a")
    assert run.lost("b") == []
    assert run.failed(-9) == [EndRun(130, "asked")]


def test_a_server_host_is_lost() -> None:
    run = Driven()
    assert run.lost("s0") == []
    assert "workers wait until it is back" in run.lines[-1]
    assert run.ended("server s0 0", -9) == []  # its end is known
    assert run.failed(1) == [] and "server s0 0 must run first" in run.lines[-1]
    assert run.joined("s0") == [start("server s0 0"), StartWorkers(1, ("a", "b"))]


def test_a_lost_server_host_with_replicas() -> None:
    run = Driven(services=REPLICATED)
    assert run.lost("s0") == [] and "workers go on with its replicas" in run.lines[-1]
    assert run.failed(1) == [StartWorkers(1, ("a", "b"))]
    assert run.joined("s0") == [start("server s0 0")]


def test_two_lost_server_hosts_that_may_hold_both_copies_of_a_chunk() -> None:
    run = Driven(services=REPLICATED)
    run.lost("s0")
    assert run.lost("s1") == [] and "workers wait until it is back" in run.lines[-1]
    assert run.failed(1) == []  # Rule 3: workers would start without the chunks that both held
    assert run.joined("s1") == [start("server s1 0"), StartWorkers(1, ("a", "b"))]


def test_a_reducer_host_is_lost_and_returns() -> None:
    run = Driven()
    assert run.lost("r0") == [SetReducers(())]
    assert run.failed(1) == [StartWorkers(1, ("a", "b"))]
    assert run.joined("r0") == [start("reducer r0"), SetReducers(("r0",))]


def test_a_host_leaves() -> None:
    run = Driven(spares={})
    assert run.leaves("r0") == [SetReducers(())]
    assert run.leaves("r0") == []
    assert run.leaves("b") == [stop_workers(80)]
    assert run.failed(130) == [StartWorkers(1, ("a",))]
    assert run.lost("b") == []
    assert run.leaves("s0") == [] and "workers wait until it is back" in run.lines[-1]


def test_a_leaving_host_stays() -> None:
    run = Driven(spares={})
    run.leaves("b")
    assert run.joined("b") == []
    assert run.failed(130) == [StartWorkers(1, ("a", "b"))]


def test_a_host_outside_the_plan_joins() -> None:
    run = Driven(sums_at_reducers=True)
    assert run.joined("new") == [start("reducer new"), SetReducers(("r0", "new"))]
    assert run.lost("new") == [SetReducers(("r0",))]
    run = Driven(spares={})
    assert run.joined("new", 8) == []
    run.lost("a")
    assert run.failed(1) == [StartWorkers(1, ("new", "b"))]  # one worker, like the host it replaces


def test_two_hosts_are_lost_at_once() -> None:
    run = Driven(shrink=True)
    run.lost("a")
    run.lost("r0")
    assert run.lost("b") == [] and run.failed(-9) == []
    assert run.later(15) == [StartWorkers(1, ("spare",))]


def test_a_worker_and_its_server_end_at_once() -> None:
    run = Driven()
    run.ended("server s0 0", -9)
    assert run.ended("server s0 0", -9) == []
    assert run.failed(1) == []  # workers wait for the server, which starts after 1 s
    assert run.later(1) == [start("server s0 0"), StartWorkers(1, ("a", "b"))]


def test_a_resumed_run_continues_to_count_its_attempts() -> None:
    assert Driven(first_attempt=3).actions[-1] == StartWorkers(3, ("a", "b"))


HOSTS = ["a", "b", "s0", "r0", "spare", "new"]


class FakeEngine:
    """Carries out actions and reports ends as an engine must."""

    def __init__(self, run: RunFacts) -> None:
        self.machine, self.at = RunStateMachine(run), 0.0
        self.up = set(HOSTS[:-1])
        self.running: set[str] = set()  # services
        self.attempt: int | None = None  # attempt of the running workers
        self.worker_hosts: tuple[str, ...] = ()
        self.ended: EndRun | None = None
        self.stopping: list[str] = []  # asked to end but not yet ended
        self.feed(TimePassed())

    def feed(self, event: RunEvent) -> None:
        actions = self.machine.handle(event, self.at)
        self.machine.check()
        assert_announced(actions)
        failed: list[RunEvent] = []
        for action in actions:
            assert self.ended is None
            match action:
                case StartService(name):
                    assert name not in self.running
                    host = self.machine.places[name].host
                    if host in self.up:
                        self.running.add(name)
                    else:  # the machine cannot know about it yet
                        failed.append(ProcessEnded(name, 1, "no such host"))
                case StartWorkers(attempt, hosts):
                    assert self.attempt is None, "two attempts at once"
                    if self.up.issuperset(hosts):
                        self.attempt, self.worker_hosts = attempt, hosts
                    else:
                        failed.append(WorkersEnded(attempt, 1, "worker 0", "no host"))
                case StopProcess(name, grace_s):
                    self.stopping.append(name)
                    if not grace_s:  # killed
                        failed += self.kill(name)
                case EndRun():
                    self.ended = action
                    assert not self.running and self.attempt is None, "a process still runs"
        for event in failed:
            self.feed(event)

    def kill(self, name: str) -> list[RunEvent]:
        if name != "workers":
            self.running.discard(name)
            return [ProcessEnded(name, -9)]
        attempt, self.attempt = self.attempt, None
        return [] if attempt is None else [WorkersEnded(attempt, -9, "worker 0")]

    def end_service(self, name: str, code: int) -> None:
        if name in self.running:
            self.running.discard(name)
            self.feed(ProcessEnded(name, code))

    def end_workers(self, code: int) -> None:
        if (attempt := self.attempt) is not None:
            self.attempt = None
            self.feed(WorkersEnded(attempt, code, "worker 0"))

    def end_stopping(self) -> None:
        stopping, self.stopping = self.stopping, []
        for name in stopping:
            if name == "workers":
                self.end_workers(130)
            else:
                self.end_service(name, 0)

    def lose(self, host: str) -> None:
        if host not in self.up:
            return
        self.up.discard(host)
        self.running = {n for n in self.running if self.machine.places[n].host != host}
        self.feed(HostLost(host, "gone"))
        if self.attempt is not None and not self.up & {*self.worker_hosts}:
            self.end_workers(-9)

    def wait(self, seconds: float) -> None:
        self.at += seconds
        if seconds > 20:  # an engine kills processes that do not end in time
            self.end_stopping()
        self.feed(TimePassed())


OPTIONS = st.fixed_dictionaries(
    {
        "shrink": st.booleans(),
        "services": st.sampled_from(
            [(SERVER, REDUCER), (replace(SERVER, replicated=True), REDUCER)]
        ),
        "sums_at_reducers": st.booleans(),
        "can_run_on": st.sampled_from([lambda hosts: "", lambda hosts: "too few"]),
    }
)
FAULTS = st.lists(
    st.one_of(
        st.tuples(st.just("lose"), st.sampled_from(HOSTS)),
        st.tuples(st.just("came"), st.sampled_from(HOSTS)),
        st.tuples(st.just("leaves"), st.sampled_from(HOSTS)),
        st.tuples(st.just("service"), st.sampled_from(["server s0 0", "reducer r0"])),
        st.tuples(st.just("workers"), st.sampled_from([1, 2, -9])),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 5.0, 50.0])),
        st.tuples(st.just("asked"), st.none()),
        st.tuples(st.just("committed"), st.none()),
        st.tuples(st.just("restarted"), st.sampled_from(["server s0 0", "reducer r0"])),
    ),
    max_size=30,
)


@settings(max_examples=400, deadline=None)
@given(OPTIONS, FAULTS, st.booleans())
@pytest.mark.slow
def test_random_faults(options, faults, stops) -> None:
    """Rule 5: after any faults workers run again once all hosts have returned, and a run that is
    asked to stop ends. check() and the engine's asserts hold throughout."""
    engine = FakeEngine(facts(**options))
    for step, (kind, what) in enumerate(faults):
        if engine.ended is None:
            happen(engine, kind, what, step)
    for host in HOSTS[:-1]:
        engine.up.add(host)
        engine.feed(HostJoined(host, "", 1))
    for _ in range(8):
        engine.end_stopping()
        engine.wait(31)
    machine = engine.machine
    if machine.phase is RunPhase.GOING:
        assert engine.attempt is not None, "no progress although all hosts have returned"
        assert len(machine.worker_hosts) == 2
        if stops:
            engine.feed(StopRequested("asked"))
        else:
            engine.end_workers(0)
        for _ in range(3):
            engine.end_stopping()
    assert engine.ended is not None and engine.ended.code in (0, 1, 2, 130)


def happen(engine: FakeEngine, kind: str, what, step: int) -> None:
    match kind:
        case "lose":
            engine.lose(what)
        case "came":
            engine.up.add(what)
            engine.feed(HostJoined(what, "", 1))
        case "leaves":
            engine.feed(HostLeaving(what, 60))
        case "service":
            engine.end_service(what, -9)
        case "workers":
            engine.end_workers(what)
        case "wait":
            engine.wait(what)
        case "asked":
            engine.end_stopping()
        case "committed":
            engine.feed(Committed(step))
        case "restarted":
            if what in engine.running:
                engine.feed(ProcessRestarted(what))
