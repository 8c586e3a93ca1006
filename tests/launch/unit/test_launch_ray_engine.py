"""The Ray engine and its actors without a cluster: queued events, late ends, actors that do not start
or answer, lost hosts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError

from roadtrain.config.machines import PlanHost
from roadtrain.errors import LaunchError
from roadtrain.launch import worker_run
from roadtrain.launch.home import LaunchRecord, RunHome, RunState, StartPhase
from roadtrain.launch.processes import Process, Role, WorkerSet, with_threads
from roadtrain.launch.protocol.run_events import (
    HostJoined,
    HostLost,
    Output,
    ProcessEnded,
    WorkersEnded,
    WorkersPlaced,
)
from roadtrain.launch.ray import (
    actors,
    held_process,
    start,
)
from roadtrain.launch.ray import (
    ray_cluster as cluster,
)
from roadtrain.launch.ray import (
    ray_engine as engine,
)
from roadtrain.launch.ray.nodes import RayNode


@dataclass(frozen=True, eq=False)
class Answer:
    answer: Any
    ready: bool


class FakeActor:
    """Runs `fake.method.remote(...)` at once; `get` returns the answer or raises the error."""

    def __init__(self, real: Any) -> None:
        self.real, self.killed = real, 0
        self.fails: Exception | None = None
        self.silent = False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *words: self._do(name, words))

    def _do(self, name: str, words: tuple[Any, ...]) -> Any:
        if name == "news":
            words = (*words[:2], 0.0)
        answer = self.fails or getattr(self.real, name)(*words)
        return Answer(answer, not self.silent)


class FakeRay:
    """The part of Ray that the engine uses. named: Actors by name."""

    util: Any

    def __init__(self) -> None:
        self.named: dict[str, FakeActor] = {}
        self.made: list[FakeActor] = []
        self.did: list[Any] = []
        self.resources: list[tuple[int, int]] = []  # processors and devices of each actor
        self.util = SimpleNamespace(list_named_actors=lambda: list(self.named))

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> Any:
        ready = [ref for ref in refs if ref.ready][:num_returns]
        time.sleep(0.0 if ready else timeout)
        return ready, [ref for ref in refs if ref not in ready]

    def kill(self, actor: FakeActor, no_restart: bool) -> None:
        actor.killed += 1
        self.named = {
            name: named_actor
            for name, named_actor in self.named.items()
            if named_actor is not actor
        }

    def get_actor(self, name: str) -> FakeActor:
        if name not in self.named:
            raise ValueError(name)
        return self.named[name]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n0")

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        def made(kind: Any) -> Any:
            self.resources.append((options["num_cpus"], options.get("num_gpus", 0)))

            def create(*words: Any) -> FakeActor:
                self.made.append(FakeActor(kind(*words)))
                return self.made[-1]

            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=create))

        return made


@dataclass(eq=False)
class FakeService:
    """Stands for the actor of a service, or of the workers of a host, on a node."""

    process: Process
    node: str
    processes: Sequence[Process] = ()
    alive: bool = True
    log: actors.EventLog = field(default_factory=actors.EventLog)
    grace_periods: list[float] = field(default_factory=list)

    def place(self) -> tuple[Process, str, bool]:
        return self.process, self.node, self.alive

    def stop(self, grace_s: float) -> None:
        self.grace_periods.append(grace_s)

    def news(self, life: str, after: int, patience_s: float) -> actors.EventBatch:
        return self.log.news(life, after, patience_s)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for module in (engine, actors, start):
        monkeypatch.setattr(module, "ray", fake)
    # The real class would ask Ray itself once it is an orphan, long after this test.
    monkeypatch.setattr(
        engine, "ServedProcesses", lambda processes, _: FakeService(processes[0], "n0", processes)
    )
    monkeypatch.setattr(cluster, "request_nodes", lambda places: fake.did.append(places))
    monkeypatch.setattr(cluster, "on_node", lambda node: node)
    monkeypatch.setattr(cluster, "nodes", lambda: [node("n0", "a")])
    return fake


def node(node_id: str, label: str) -> RayNode:
    return RayNode(node_id, label, "10.0.0.1", label, label, 4, 0)


def worker(rank: int, host: str = "a") -> Process:
    return Process(f"worker {rank}", Role.WORKER, host, (), "/")


def server(host: str = "a", name: str = "server a 0") -> Process:
    return Process(name, Role.SERVER, host, (), "/")


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 10
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def made_engine(**options: Any) -> engine.RayEngine:
    return engine.RayEngine([PlanHost("a", "k", workers=1)], "roadtrain:r", **options)


# -- news --


def test_lines_never_displace_an_end_and_dropped_lines_are_counted() -> None:
    log = actors.EventLog()
    log.add(ProcessEnded("worker 1", 2))
    log.add(*(Output("worker 0", "a", str(n)) for n in range(actors.KEPT + 7)))
    news = log.news("", 0, 0.0)
    events = news.events
    assert events[0] == ProcessEnded("worker 1", 2)
    assert [int(event.line) for event in events[1:]] == list(range(7, actors.KEPT + 7))
    assert news.left_out == 7
    log.add(Output("worker 0", "a", "last"))
    assert log.news(news.life, news.then, 0.0).events == (Output("worker 0", "a", "last"),)
    assert log.news(news.life, -1, 0.0).events == ()


def test_the_engine_reports_how_many_lines_were_dropped(fake: FakeRay) -> None:
    made = made_engine()
    made.start_workers(WorkerSet(0, (worker(0),)))
    log = fake.made[0].real.log
    made.events(0.0)  # it asks
    made.events(0.0)
    log.add(*[Output("worker 0", "a", "x")] * (actors.KEPT + 3))
    lines = [e.line for e in events_of(made, 5) if isinstance(e, Output)]
    assert lines[0].startswith("[3 lines dropped") and lines.count("x") == actors.KEPT


def events_of(made: engine.RayEngine, calls: int) -> list[Any]:
    return [event for _ in range(calls) for event in made.events(0.05)]


def until_end(made: engine.RayEngine) -> tuple[list[Any], WorkersEnded]:
    events: list[Any] = []
    until(
        lambda: (
            events.extend(made.events(0.05)) or (events and isinstance(events[-1], WorkersEnded))
        )
    )
    return events, events[-1]


# -- workers --


@pytest.mark.parametrize("code", [0, 2, 130])
def test_an_end_queued_behind_thousands_of_lines_is_reported(fake: FakeRay, code: int) -> None:
    made = made_engine()
    made.start_workers(WorkerSet(3, (worker(0),)))
    log = fake.made[0].real.log
    log.add(*[Output("worker 0", "a", "x")] * 3000)
    log.add(ProcessEnded("worker 0", code, "said"))
    events, ended = until_end(made)
    assert (ended.attempt, ended.code, ended.first) == (3, code, "worker 0")
    lines = [event for event in events if isinstance(event, Output) and event.line == "x"]
    assert len(lines) == 3000
    assert any(isinstance(event, WorkersPlaced) for event in events)
    assert fake.made[0].killed  # which frees its processors for the next attempt


@pytest.fixture
def two(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> engine.RayEngine:
    """An engine of hosts a and b, whose workers 0 and 1 were begun."""
    there = [node("n0", "a"), node("n1", "b")]
    monkeypatch.setattr(cluster, "nodes", lambda: there)
    hosts = [PlanHost(name, "k", workers=1) for name in "ab"]
    made = engine.RayEngine(hosts, "roadtrain:r")
    made.start_workers(WorkerSet(0, (worker(0), worker(1, "b"))))
    return made


def workers_of(fake: FakeRay) -> tuple[FakeService, FakeService]:
    on_a, on_b = (actor.real for actor in fake.made)
    return on_a, on_b


def end(service: FakeService, code: int) -> None:
    """Let the worker of a host end."""
    service.log.add(ProcessEnded(service.process.name, code))


def test_a_dead_actor_ends_its_workers(fake: FakeRay, two: engine.RayEngine) -> None:
    events_of(two, 1)
    fake.made[1].fails = ActorDiedError()
    on_a, _ = workers_of(fake)
    until(lambda: (events_of(two, 1), on_a.grace_periods)[1])
    assert on_a.grace_periods == [0.0]  # it cannot finish its step without worker 1
    end(on_a, -9)
    ended = until_end(two)[1]
    assert (ended.code, ended.first) == (engine.KILLED, "worker 1")
    assert "its actor has ended" in ended.last_line


def test_an_actor_that_answers_again_keeps_its_workers(
    fake: FakeRay, two: engine.RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "AGAIN_S", 0.05)
    events_of(two, 1)
    fake.made[1].fails = ActorUnavailableError("its node is slow", None)
    events_of(two, 3)
    fake.made[1].fails = None
    for service in workers_of(fake):
        end(service, 0)
    assert until_end(two)[1].code == 0


def test_workers_that_ray_does_not_start_are_abandoned(
    fake: FakeRay, two: engine.RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5."""
    monkeypatch.setattr(engine, "SILENT_S", 0.05)
    fake.made[1].silent = True  # it waits for processors
    on_a, _ = workers_of(fake)
    time.sleep(0.1)
    assert not [event for event in events_of(two, 5) if isinstance(event, WorkersEnded)]
    monkeypatch.setattr(engine, "WORKERS_BEGIN_S", 0.0)
    two.events(0.05)
    assert on_a.grace_periods == [0.0] and fake.made[1].killed
    end(on_a, -9)
    ended = until_end(two)[1]
    assert ended.code == engine.KILLED and "has not started it within 0 s" in ended.last_line


def test_a_silent_actor_of_workers_is_abandoned(
    fake: FakeRay, two: engine.RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5."""
    monkeypatch.setattr(engine, "SILENT_S", 0.1)
    events_of(two, 1)
    for actor in fake.made:
        actor.silent = True
    ended = until_end(two)[1]
    assert ended.code == engine.KILLED and "has not answered for" in ended.last_line


def test_a_stop_spares_only_workers_that_have_begun(fake: FakeRay, two: engine.RayEngine) -> None:
    fake.made[1].silent = True
    events_of(two, 2)
    on_a, on_b = workers_of(fake)
    two.stop("workers", 1000.0)
    assert on_a.grace_periods == [1000.0] and not on_b.grace_periods and fake.made[1].killed
    two.stop("workers", 0.1)
    assert on_a.grace_periods == [1000.0, 0.1]
    end(on_a, 130)
    ended = until_end(two)[1]
    assert (ended.code, ended.first) == (engine.KILLED, "worker 1")
    assert "before Ray had started it" in ended.last_line


def test_a_stop_before_any_worker_has_begun_ends_the_attempt(
    fake: FakeRay, two: engine.RayEngine
) -> None:
    two.stop("workers", 1000.0)
    assert until_end(two)[1].code == engine.KILLED
    assert all(actor.killed for actor in fake.made)
    two.start_workers(WorkerSet(1, (worker(0), worker(1, "b"))))  # the engine is free again


def test_workers_on_dead_nodes_count_as_ended(
    fake: FakeRay, two: engine.RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5: nothing else reports it."""
    events_of(two, 1)
    monkeypatch.setattr(cluster, "nodes", lambda: [node("n0", "a")])
    monkeypatch.setattr(cluster, "why_dead", {"n1": "no heartbeat"}.__getitem__)
    two.hosts()  # looks at the nodes
    on_a, _ = workers_of(fake)
    assert on_a.grace_periods == [0.0]
    end(on_a, -9)
    events, ended = until_end(two)
    assert any(isinstance(event, HostLost) for event in events)
    assert (ended.code, ended.first, ended.last_line) == (
        engine.KILLED,
        "worker 1",
        "its host b was lost",
    )


def test_a_worker_that_ends_on_request_is_no_failure(fake: FakeRay, two: engine.RayEngine) -> None:
    """The other workers still commit the step."""
    events_of(two, 1)
    two.stop("workers", 5.0)
    on_a, on_b = workers_of(fake)
    end(on_a, 130)
    events_of(two, 2)
    assert on_b.grace_periods == [5.0]
    end(on_b, 130)
    assert until_end(two)[1].code == 130


def test_workers_that_do_not_end_with_the_others_are_killed(
    fake: FakeRay, two: engine.RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5."""
    monkeypatch.setattr(worker_run, "ALL_END_S", 0.05)
    events_of(two, 1)
    on_a, on_b = workers_of(fake)
    end(on_a, 0)
    until(lambda: (events_of(two, 1), on_b.grace_periods)[1])
    assert on_b.grace_periods == [0.0]
    end(on_b, -9)
    assert until_end(two)[1].first == "worker 1"


def test_each_worker_gets_its_share_of_its_nodes_cores() -> None:
    """Ray by itself gives each worker a single thread."""
    at = {"a": node("n0", "a"), "b": RayNode("n1", "b", "10.0.0.2", "b", "b", 2, 2)}
    own = replace(worker(3, "b"), environment={"OMP_NUM_THREADS": "7"})
    all = WorkerSet(0, (worker(0), worker(1, "b"), worker(2, "b"), own))
    made = with_threads(all, engine.threads_of(all, at), "")
    assert [process.environment["OMP_NUM_THREADS"] for process in made.processes] == [
        "4",
        "1",
        "1",
        "7",
    ]
    at["b"] = RayNode("n1", "b", "10.0.0.2", "a", "b", 4, 2)  # another node of a's machine
    two = WorkerSet(0, (worker(0), worker(1, "b")))
    made = with_threads(two, engine.threads_of(two, at), "")
    assert [process.environment["OMP_NUM_THREADS"] for process in made.processes] == ["2", "2"]
    made = with_threads(all, engine.threads_of(all, at), "3")
    assert [process.environment["OMP_NUM_THREADS"] for process in made.processes] == [
        "3",
        "3",
        "3",
        "7",
    ]


def test_an_attempt_starts_with_its_threads(fake: FakeRay) -> None:
    made = made_engine()
    assert fake.did == [[{"CPU": 1}]]  # of the autoscaler
    made.start_workers(WorkerSet(0, (worker(0),)))
    (process,) = fake.made[0].real.processes
    assert process.environment == {"OMP_NUM_THREADS": "4"}
    made.close()
    assert fake.did[1:] == [[]] and fake.made[0].killed


def test_workers_reserve_the_processors_and_devices_of_their_node(fake: FakeRay) -> None:
    """Rule 6: a host with devices uses them, even if other hosts have none."""
    three = [worker(rank, "b") for rank in range(3)]
    for devices, reserved in ((0, 0), (8, 3), (2, 2)):  # two: for a job on processors
        at = RayNode("n1", "b", "10.0.0.2", "b", "b", 4, devices)
        engine.actor_of_workers(at, three)
        assert fake.resources[-1] == (3, reserved)
    at = RayNode("n1", "b", "10.0.0.2", "b", "b", 2, 8)
    with pytest.raises(LaunchError, match="host b has 3 workers in the plan, but only 2 CPU"):
        engine.actor_of_workers(at, three)


# -- services --


def test_the_end_of_a_held_process_is_reported_after_any_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(held_process, "HostAgents", broken)
    events: list[Any] = []
    held_process.HeldProcess(server(), "m", events.append).wait(10)
    (ended,) = events
    assert isinstance(ended, ProcessEnded) and "a fault of ours" in ended.last_line


@pytest.mark.parametrize("why", ["unavailable", "silent"])
@pytest.mark.slow
def test_an_unresponsive_actor_is_replaced(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Rule 5."""
    monkeypatch.setattr(engine, "SILENT_S", 0.3)
    monkeypatch.setattr(engine, "AGAIN_S", 0.05)
    actor = fake.named["roadtrain:r:server a 0"] = FakeActor(FakeService(server(), "n0"))
    made = made_engine(begun=True)
    if why == "silent":
        actor.silent = True
    else:
        actor.fails = ActorUnavailableError("its node is slow", None)
    began = time.monotonic()
    (ended,) = until(lambda: [e for e in made.events(0.05) if isinstance(e, ProcessEnded)])
    assert 0.3 <= time.monotonic() - began < 5
    assert "has not answered for" in ended.last_line and ended.name == "server a 0" and actor.killed


def test_a_started_run_continues_without_a_lost_host(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including a run without services whose supervisor was restarted meanwhile."""
    monkeypatch.setattr(cluster, "nodes", list)
    with pytest.raises(LaunchError, match="the Ray cluster has no node for host a of"):
        made_engine()
    made = made_engine(begun=True)
    assert made.resumed
    assert [e.host for e in made.events(0.0) if isinstance(e, HostLost)] == ["a"]


def test_services_of_another_launch_are_stopped_before_the_checks(fake: FakeRay) -> None:
    """Their stores and ports are free afterwards."""
    actor = fake.named["roadtrain:r:server a 0"] = FakeActor(FakeService(server(), "n0"))
    other = fake.named["roadtrain:r2:server a 0"] = FakeActor(FakeService(server(), "n0"))
    made = made_engine()
    assert not made.resumed and actor.killed and not other.killed
    made.start(server())
    assert fake.made[-1] is not actor  # a new actor


def test_a_running_service_is_kept_and_an_ended_service_gets_a_new_actor(
    fake: FakeRay,
) -> None:
    """Started by the next supervisor."""
    runs = fake.named["roadtrain:r:server a 0"] = FakeActor(FakeService(server(), "n0"))
    over = server(name="server a 1")
    ended = fake.named["roadtrain:r:server a 1"] = FakeActor(FakeService(over, "n0"))
    ended.real.alive = False
    made = made_engine(begun=True)
    count = len(fake.made)
    made.start(server())
    assert len(fake.made) == count and not runs.killed and ended.killed
    made.start(over)
    assert len(fake.made) == count + 1


def test_hosts_without_an_address_keep_their_node(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's store is on that node's disk."""
    there = [
        RayNode("n0", "y", "10.0.0.1", "y", "", 4, 0),
        RayNode("n1", "x", "10.0.0.2", "x", "", 4, 0),
    ]
    monkeypatch.setattr(cluster, "nodes", lambda: there)

    def made(address: str, *, begun: bool) -> engine.RayEngine:
        hosts = [PlanHost("h", "k", workers=1)]
        return engine.RayEngine(hosts, "roadtrain:r", addresses={"h": address}, begun=begun)

    assert {host.name: host.address for host in made("10.0.0.2", begun=False).hosts()} == {
        "h": "10.0.0.2"
    }
    with pytest.raises(LaunchError, match=r"no node for host h \(it was 10\.0\.0\.3\) of the plan"):
        made("10.0.0.3", begun=False)
    events = made("10.0.0.3", begun=True).events(0.0)
    assert [e.host for e in events if isinstance(e, HostLost)] == ["h"]
    assert [e.host for e in events if isinstance(e, HostJoined)] == ["y"]  # it may stand in


def test_a_spare_host_without_a_node_does_not_stop_the_run(fake: FakeRay) -> None:
    made = made_engine(spares=[PlanHost("d", "k", "10.0.0.9", workers=1)])
    assert not made.resumed
    assert [e.host for e in made.events(0.0) if isinstance(e, HostLost)] == ["d"]


def test_a_host_is_reported_with_its_address_in_the_plan(fake: FakeRay) -> None:
    hosts = [PlanHost("a", "k", "192.168.0.1", workers=1)]
    made = engine.RayEngine(hosts, "roadtrain:r")
    assert [host.address for host in made.hosts()] == ["192.168.0.1"]
    made.run_verb(["comes", "a"])
    (joined,) = made.events(0.0)
    assert isinstance(joined, HostJoined) and joined.address == "192.168.0.1"


def test_the_next_supervisor_learns_of_a_joined_host_that_sums(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "nodes", lambda: [node("n0", "a"), node("n9", "new")])
    reducer = server("new", "reducer new")
    fake.named["roadtrain:r:reducer new"] = FakeActor(FakeService(reducer, "n9"))
    events = made_engine(begun=True).events(0.0)
    assert [(e.host, e.workers) for e in events if isinstance(e, HostJoined)] == [("new", 4)]


@pytest.mark.parametrize("supervised", [True, False])
def test_a_service_ends_if_no_supervisor_ever_comes(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    monkeypatch.setattr(actors, "HeldProcess", lambda *_: None)
    monkeypatch.setattr(actors.ServedProcesses, "_watch", lambda _: None)
    if supervised:
        fake.named["roadtrain:r"] = FakeActor(None)
    served = actors.ServedProcesses((server(),), "roadtrain:r")
    own = fake.named["roadtrain:r:server a 0"] = FakeActor(served)
    served.end_if_orphaned(time.monotonic() + actors.ORPHAN_S - 1)
    assert not own.killed
    served.end_if_orphaned(time.monotonic() + actors.ORPHAN_S + 1)
    assert bool(own.killed) != supervised


# -- the supervisor's actor --


@pytest.fixture
def home(tmp_path: Path) -> RunHome:
    home = RunHome(tmp_path / "r")
    home.write(LaunchRecord(name="r", engine="ray", launched=1.0, directory="/"), "", "")
    return home


class Ends:
    """A supervisor that ends at once."""

    alive = False
    begun = 0

    def __init__(self, process: Process, mark: str, report: Callable[[Any], None]) -> None:
        Ends.begun += 1
        report(ProcessEnded(process.name, -9, "killed"))

    def wait(self, timeout_s: float) -> None: ...


def supervised(home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the supervisor's actor until it has ended."""
    monkeypatch.setattr(start, "AGAIN_S", 0.0)
    monkeypatch.setattr(start, "HeldProcess", Ends)
    for name in ("roadtrain:r", "roadtrain:r:server a 0", "roadtrain:r2:server a 0"):
        fake.named[name] = FakeActor(None)
    start.SupervisedRun(str(home.path), "roadtrain:r", {}, 1.0)
    until(lambda: list(fake.named) == ["roadtrain:r2:server a 0"])


def test_an_abandoned_run_leaves_no_service(
    home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised(home, fake, monkeypatch)
    assert home.state().phase == "ended" and "6 times in a row: killed" in home.state().why


def test_a_run_with_damaged_state_is_still_supervised(
    home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.path / "state.json").write_text("damaged")
    Ends.begun = 0
    supervised(home, fake, monkeypatch)
    assert Ends.begun and "times in a row" in home.state().why


def test_the_actor_of_a_run_without_a_home_ends(
    home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for file in ("state.json", "launch.json"):
        (home.path / file).unlink()
    Ends.begun = 0
    supervised(home, fake, monkeypatch)
    assert not Ends.begun


def test_the_actor_of_an_ended_start_does_not_begin_the_next(
    home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--resume` a moment after the end."""
    home.write_state(RunState(stamps={StartPhase.LAUNCHED: 2.0}))
    Ends.begun = 0
    supervised(home, fake, monkeypatch)
    assert not Ends.begun and home.state().phase == "starting"


def test_an_actor_that_cannot_be_killed_does_not_block_the_next(
    home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fake.kill

    def kill(actor: FakeActor, no_restart: bool) -> None:
        if fake.named.get("roadtrain:r:a") is actor:
            raise ActorUnavailableError("its node is slow", None)
        real(actor, no_restart)

    monkeypatch.setattr(fake, "kill", kill)
    monkeypatch.setattr(start, "HeldProcess", Ends)
    home.write_state(RunState(phase="ended"))
    for name in ("roadtrain:r", "roadtrain:r:a", "roadtrain:r:b"):
        fake.named[name] = FakeActor(None)
    start.SupervisedRun(str(home.path), "roadtrain:r", {}, 1.0)
    until(lambda: list(fake.named) == ["roadtrain:r:a"])
    until(lambda: fake.did == [[]])  # the autoscaler is asked for nothing


@pytest.fixture
def begins(home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Start the supervisor's actor."""
    monkeypatch.setattr(cluster, "connect", lambda _: None)
    monkeypatch.setattr(fake, "shutdown", lambda: None, raising=False)
    monkeypatch.setattr(start, "SupervisedRun", lambda *_: None)
    return lambda: start.start_supervisor(home)


@pytest.mark.slow
def test_a_launch_waits_for_the_actor_of_an_ended_run(
    home: RunHome, fake: FakeRay, begins: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_await_supervisor", lambda _: None)
    fake.named["roadtrain:r"] = FakeActor(None)
    later = threading.Timer(0.3, fake.named.clear)
    later.start()
    begins()
    later.join()
    assert len(fake.made) == 1
    monkeypatch.setattr(start, "NAME_S", 0.2)
    fake.named["roadtrain:r"] = FakeActor(None)
    with pytest.raises(LaunchError, match="a run of this name is still running"):
        begins()


def test_an_interrupted_launch_leaves_no_actor(
    fake: FakeRay, begins: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "_await_supervisor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begins()
    assert [actor.killed for actor in fake.made] == [1]


@pytest.mark.parametrize("here", [True, False])
def test_a_run_is_alive_while_its_node_is_up_even_if_the_cluster_does_not_answer(
    home: RunHome, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    def refuses(address: str) -> None:
        raise LaunchError("cannot connect")

    words = ["raylet", "--gcs-address=10.0.0.1:6379"]
    processes = [SimpleNamespace(info={"name": words[0], "cmdline": words})] if here else []
    monkeypatch.setattr(cluster, "connect", refuses)
    monkeypatch.setattr(cluster.psutil, "process_iter", lambda _: processes)
    addresses_by_host = {"head": {"10.0.0.1"}, "10.0.0.1": {"10.0.0.1"}, "other": {"10.0.0.2"}}
    monkeypatch.setattr(cluster, "addresses_of", lambda host: addresses_by_host.get(host, set()))
    home.write_state(RunState(phase="going"))
    assert start.is_alive(home) is here
    for head, there in (
        ("head:6379", here),
        ("head:6380", False),
        ("other:6379", False),  # the head is elsewhere now
        ("nameless:6379", here),
    ):
        record = LaunchRecord(name="r", engine="ray", launched=1.0, directory="/", ray_address=head)
        home.write_record(record)
        assert start.is_alive(home) is there, head


def test_all_addresses_of_this_host_mean_the_same_host() -> None:
    """Ray chooses the address by which it names the head."""
    (own, *_) = (
        entry.address
        for all in cluster.psutil.net_if_addrs().values()
        for entry in all
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    )
    assert cluster.is_same("localhost:1", f"{own}:1")
    assert not cluster.is_same("localhost:1", f"{own}:2")
    assert not cluster.is_same("localhost:1", "192.0.2.7:1")
