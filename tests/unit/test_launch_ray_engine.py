"""The Ray engine, its actors and workers without a cluster: news that waits, ends that are late,
actors and trainers that do not answer, hosts that are gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorUnavailableError

from roadtrain.config.machines import PlanHost
from roadtrain.errors import LaunchError
from roadtrain.launch.home import LaunchRecord, RunHome, RunState
from roadtrain.launch.processes import Process, Role, WorkerSet
from roadtrain.launch.ray import actors, cluster, engine, held_process, start, workers
from roadtrain.launch.ray.nodes import RayNode
from roadtrain.protocol.launch import (
    HostCame,
    HostLost,
    Output,
    ProcessEnded,
    WorkersEnded,
    WorkersPlaced,
)


@dataclass(frozen=True, eq=False)
class Answer:
    answer: Any
    ready: bool


class FakeActor:
    """`fake.method.remote(...)` is done at once; the answer, or the error, is what `get` gives."""

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
    """What the engine uses of Ray; `named`: its actors by their names."""

    util: Any

    def __init__(self) -> None:
        self.named: dict[str, FakeActor] = {}
        self.made: list[FakeActor] = []
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
        self.named = {name: one for name, one in self.named.items() if one is not actor}

    def get_actor(self, name: str) -> FakeActor:
        if name not in self.named:
            raise ValueError(name)
        return self.named[name]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n0")

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        def made(kind: Any) -> Any:
            def create(*words: Any) -> FakeActor:
                self.made.append(FakeActor(kind(*words)))
                return self.made[-1]

            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=create))

        return made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for module in (engine, actors, start):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(cluster, "on_node", lambda node: node)
    monkeypatch.setattr(cluster, "nodes", lambda: [node("n0", "a")])
    monkeypatch.setattr(workers, "trainer_of", lambda *_: SimpleNamespace(fit=lambda: None))
    return fake


def node(node_id: str, label: str) -> RayNode:
    return RayNode(node_id, label, "10.0.0.1", label, label, 4, 0, 1)


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


def made_engine(**told: Any) -> engine.RayEngine:
    return engine.RayEngine([PlanHost("a", "k", workers=1)], "roadtrain:r", **told)


# -- news --


def test_lines_push_out_no_end_and_say_how_many_are_gone() -> None:
    told = actors.KeptNews()
    told.add(ProcessEnded("worker 1", 2, 0.0))
    told.add(*(Output("worker 0", "a", str(n)) for n in range(actors.KEPT + 7)))
    news, events, left_out = told.news("", 0, 0.0), [], 0
    while True:
        events += news.events
        left_out += news.left_out
        if not news.more:
            break
        news = told.news(news.life, news.then, 0.0)
    assert events[0] == ProcessEnded("worker 1", 2, 0.0)
    assert [int(one.line) for one in events[1:]] == list(range(7, actors.KEPT + 7))
    assert left_out == 7
    told.add(Output("worker 0", "a", "last"))
    assert told.news(news.life, news.then, 0.0).events == (Output("worker 0", "a", "last"),)
    assert told.news(news.life, -1, 0.0).events == ()


def test_the_engine_says_how_many_lines_it_has_not_got(fake: FakeRay) -> None:
    made = made_engine()
    made.start_workers(WorkerSet(0, (worker(0),)))
    box = fake.made[0].real
    box.take(0, "n0")
    made.events(0.0)  # it asks
    made.events(0.0)
    box.post(0, [Output("worker 0", "a", "x")] * (actors.KEPT + 3))
    lines = [event.line for event in heard(made, 5) if isinstance(event, Output)]
    assert lines[0].startswith("[3 lines left out") and lines.count("x") == actors.KEPT


def heard(made: engine.RayEngine, calls: int) -> list[Any]:
    return [event for _ in range(calls) for event in made.events(0.05)]


def until_end(made: engine.RayEngine) -> tuple[list[Any], WorkersEnded]:
    events: list[Any] = []
    until(lambda: events.extend(made.events(0.05)) or isinstance(events[-1], WorkersEnded))
    return events, events[-1]


# -- workers --


@pytest.mark.parametrize("code", [0, 2, 130])
def test_an_end_that_waits_behind_thousands_of_lines_is_the_workers_end(
    fake: FakeRay, code: int
) -> None:
    """Ray Train has let go of them before the supervisor heard a word."""
    made = made_engine()
    made.start_workers(WorkerSet(3, (worker(0),)))
    box = fake.made[0].real
    box.take(3, "n0")
    box.post(3, [Output("worker 0", "a", "x")] * (3 * actors.BATCH))
    box.post(3, [ProcessEnded("worker 0", code, 0.0, "said")])
    events, ended = until_end(made)
    assert (ended.attempt, ended.code, ended.first) == (3, code, "worker 0")
    assert sum(isinstance(event, Output) for event in events) == 3 * actors.BATCH
    assert any(isinstance(event, WorkersPlaced) for event in events)


def test_a_mailbox_that_is_gone_leaves_the_ends_that_ray_train_told(fake: FakeRay) -> None:
    made = made_engine()
    made.start_workers(WorkerSet(0, (worker(0),)))
    fake.made[0].fails = ActorUnavailableError("restarting", None)
    assert until_end(made)[1].code == workers.FAILED


@pytest.fixture
def hanging() -> Iterator[Callable[[], None]]:
    over = threading.Event()
    yield over.wait  # type: ignore[misc]
    over.set()


def orders() -> tuple[Any, list[float]]:
    given: list[float] = []
    order = SimpleNamespace(remote=lambda _, grace_s: given.append(grace_s))
    return SimpleNamespace(order=order), given


def test_a_trainer_that_never_begins_its_workers_is_given_up(
    hanging: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5."""
    monkeypatch.setattr(workers, "BEGIN_S", 0.0)
    monkeypatch.setattr(workers, "LET_GO_S", 0.1)
    mailbox, given = orders()
    made = workers.RayWorkers(WorkerSet(0, (worker(0), worker(1))), mailbox, hanging)
    assert made.begun("worker 0") and not made.is_over()
    until(made.is_over)
    assert given == [0.0]  # those that have begun are killed
    ended = made.ended()
    assert ended.code == workers.KILLED and "has not begun worker 1 within" in ended.said


def test_a_trainer_that_never_lets_go_of_ended_workers_is_given_up(
    hanging: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5."""
    monkeypatch.setattr(workers, "LET_GO_S", 0.1)
    made = workers.RayWorkers(WorkerSet(0, (worker(0),)), orders()[0], hanging)
    made.begun("worker 0")
    made.take(ProcessEnded("worker 0", 0, 0.0))
    assert not made.is_over()
    until(made.is_over)
    assert made.ended().code == 0


def test_each_worker_asks_for_a_device_or_sees_those_of_its_node() -> None:
    """Rule 6: where only some nodes have any, Ray does not hide them."""
    at = {"a": node("n0", "a"), "b": RayNode("n1", "b", "10.0.0.2", "b", "b", 4, 2, 1)}
    config = {"mailbox": None, "attempt": 0}

    def told(*hosts: str) -> Any:
        places = {at[host].node_id: [worker(n, host)] for n, host in enumerate(hosts)}
        made = workers.trainer_of(places, at, config, "m")
        return made.scaling_config.resources_per_worker, made.run_config.worker_runtime_env

    assert told("b") == ({"CPU": 1, "GPU": 1}, {})
    assert told("a") == ({"CPU": 1}, {})
    assert told("a", "b") == ({"CPU": 1}, {"env_vars": workers.SEES_DEVICES})


# -- services --


def test_whatever_fails_the_end_of_a_held_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(held_process, "HostAgents", broken)
    said: list[Any] = []
    held_process.HeldProcess(server(), "m", said.append).wait(10)
    (ended,) = said
    assert isinstance(ended, ProcessEnded) and "a fault of ours" in ended.said


class FakeService:
    """As a ServedProcess on a node."""

    def __init__(self, process: Process, node: str) -> None:
        self.process, self.node = process, node

    def place(self) -> tuple[Process, str]:
        return self.process, self.node

    def news(self, life: str, after: int, patience_s: float) -> actors.News:
        return actors.News("life", max(after, 0), ())


@pytest.mark.parametrize("why", ["unavailable", "silent"])
def test_an_actor_that_answers_nothing_is_replaced(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Rule 5."""
    monkeypatch.setattr(engine, "SILENT_S", 0.3)
    monkeypatch.setattr(engine, "AGAIN_S", 0.05)
    actor = fake.named["roadtrain:r:server a 0"] = FakeActor(FakeService(server(), "n0"))
    made = made_engine()
    if why == "silent":
        actor.silent = True
    else:
        actor.fails = ActorUnavailableError("its node is slow", None)
    began = time.monotonic()
    (ended,) = until(lambda: [e for e in made.events(0.05) if isinstance(e, ProcessEnded)])
    assert 0.3 <= time.monotonic() - began < 5
    assert "has not answered for" in ended.said and ended.name == "server a 0" and actor.killed


def test_a_run_that_had_begun_goes_on_without_a_host_that_is_gone(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without services: the supervisor was started again meanwhile."""
    monkeypatch.setattr(cluster, "nodes", list)
    with pytest.raises(LaunchError, match="host a of the plan is no node of the Ray cluster"):
        made_engine()
    made = made_engine(begun=True)
    assert made.goes_on
    assert [e.host for e in made.events(0.0) if isinstance(e, HostLost)] == ["a"]


def test_a_host_that_came_and_sums_is_told_to_the_next_supervisor(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "nodes", lambda: [node("n0", "a"), node("n9", "new")])
    reducer = server("new", "reducer new")
    fake.named["roadtrain:r:reducer new"] = FakeActor(FakeService(reducer, "n9"))
    events = made_engine(begun=True).events(0.0)
    assert [(e.host, e.workers) for e in events if isinstance(e, HostCame)] == [("new", 4)]


@pytest.mark.parametrize("supervised", [True, False])
def test_a_service_ends_where_there_never_will_be_a_supervisor(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    stops: list[float] = []

    class Held:
        alive = True

        def __init__(self, process: Process, *_: Any) -> None:
            self.process = process

        def stop(self, grace_s: float) -> None:
            stops.append(grace_s)

        def wait(self, timeout_s: float) -> None: ...

    monkeypatch.setattr(actors, "HeldProcess", Held)
    if supervised:
        fake.named["roadtrain:r"] = FakeActor(None)
    served = actors.ServedProcess(server(), "roadtrain:r")
    own = fake.named["roadtrain:r:server a 0"] = FakeActor(served)
    served.look_after(time.monotonic() + actors.ORPHAN_S - 1)
    assert not own.killed
    served.look_after(time.monotonic() + actors.ORPHAN_S + 1)
    assert bool(own.killed) != supervised and bool(stops) != supervised
    served.close()  # its thread would ask a Ray that is no longer the fake one


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

    def __init__(self, process: Process, mark: str, tell: Callable[[Any], None]) -> None:
        Ends.begun += 1
        tell(ProcessEnded(process.name, -9, 0.0, "killed"))

    def wait(self, timeout_s: float) -> None: ...


def supervised(home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor, until it has ended."""
    monkeypatch.setattr(start, "AGAIN_S", 0.0)
    monkeypatch.setattr(start, "HeldProcess", Ends)
    for name in ("roadtrain:r", "roadtrain:r:server a 0", "roadtrain:r2:server a 0"):
        fake.named[name] = FakeActor(None)
    start.SupervisedRun(str(home.path), "roadtrain:r", {})
    until(lambda: list(fake.named) == ["roadtrain:r2:server a 0"])


def test_a_run_that_is_given_up_leaves_no_service(
    home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised(home, fake, monkeypatch)
    assert home.state().phase == "ended" and "6 times in a row: killed" in home.state().why


def test_a_run_whose_state_cannot_be_read_ends_its_actor(
    home: RunHome, fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    (home.path / "state.json").write_text("damaged")
    Ends.begun = 0
    supervised(home, fake, monkeypatch)
    assert not Ends.begun


@pytest.mark.parametrize("here", [True, False])
def test_while_its_node_is_there_a_run_is_alive_though_the_cluster_does_not_answer(
    home: RunHome, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    def refuses(address: str) -> None:
        raise LaunchError("no Ray cluster is reached")

    words = ["raylet", "--gcs-address=10.0.0.1:6379"]
    processes = [SimpleNamespace(info={"name": words[0], "cmdline": words})] if here else []
    monkeypatch.setattr(cluster, "connect", refuses)
    monkeypatch.setattr(cluster.psutil, "process_iter", lambda _: processes)
    home.write_state(RunState(phase="going"))
    assert start.is_alive(home) is here
    for port, there in ((6379, here), (6380, False)):
        record = LaunchRecord(
            name="r", engine="ray", launched=1.0, directory="/", ray_address=f"head:{port}"
        )
        home.write_record(record)
        assert start.is_alive(home) is there
