"""Faults of a launched run, and the consequences of each fault: whether training goes on, the
seconds until it goes on, and the number of repeated steps.

The consequences are read from the log of worker 0. Does NOT compare losses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from benchmarks.launch.bench import START_S
from benchmarks.launch.ray import RayNodes
from benchmarks.launch.run import FoundProcess, LaunchedRun, command
from roadtrain.errors import RoadtrainError
from roadtrain.launch.control_socket import ask_supervisor

STEP = re.compile(r"^\[worker 0 \S+\] step (\d+)/", re.MULTILINE)
STARTED = re.compile(r"starting workers on .*")
TURN_S = 0.05
BACK_S = 60.0  # limit for the run to notice that a host was taken away
SERVE, TRAIN = "serve", "train"


@dataclass
class FaultTarget:
    """The run that faults are injected into. `nodes`: the run's Ray nodes, or None without Ray."""

    run: LaunchedRun
    nodes: RayNodes | None = None

    @property
    def ray(self) -> RayNodes:
        assert self.nodes is not None
        return self.nodes

    def kill_launcher(self) -> None:
        assert self.run.launcher is not None
        self.run.launcher.kill()


Do = Callable[[FaultTarget], None]


@dataclass(frozen=True)
class Fault:
    """A scripted fault. `restarts`: the fault makes workers start again. `again`: training goes on
    only after a command of the user. `fewer`: until the next fault, some steps are trained by fewer
    workers.
    """

    what: str
    do: Do
    restarts: bool = True
    again: bool = False
    fewer: bool = False


@dataclass(frozen=True)
class Outcome:
    """Consequences of a fault.

    Attributes:
        step: the last step that was done before the fault
        seconds: time from the fault until the first step ends that began after the fault. If
            workers start again, it is the first step of these workers.
        repeated: number of steps that were done twice, without the step that the fault interrupted
    """

    fault: Fault
    step: int
    seconds: float
    repeated: int


def strike(target: FaultTarget, fault: Fault) -> Outcome:
    """Inject the fault, wait for the next step, and return the consequences. Raises DeadlineError
    or RoadtrainError if the run does not go on.
    """
    run = target.run
    before = run.log()
    step, then = int(STEP.findall(before)[-1]), time.monotonic()
    fault.do(target)
    while True:
        text = run.log()[len(before) :]
        starts = list(STARTED.finditer(text))
        if starts or not fault.restarts:
            since = starts[-1].end() if starts else 0
            found = STEP.findall(text, since)
            if len(found) > (not starts):
                break
        if time.monotonic() > then + START_S:
            raise RoadtrainError(
                f"the run did no step within {START_S:.0f} s after the fault; its log ends with: "
                f"{' | '.join(_last(text))}"
            )
        state = run.state()
        if state.phase == "ended":
            raise RoadtrainError(f"the run has ended with exit code {state.code}: {state.why}")
        time.sleep(TURN_S)
    seconds = time.monotonic() - then
    done = STEP.findall(text[:since])
    last = int(done[-1]) if done else step
    return Outcome(fault, step, seconds, max(0, last - int(found[0]) + 1))


def _last(text: str) -> Sequence[str]:
    lines = [line for line in text.splitlines() if STEP.match(line) is None]
    return lines[-3:]


def _first(found: Sequence[FoundProcess], what: str) -> FoundProcess:
    if not found:
        raise RoadtrainError(f"no {what} is running")
    return found[0]


def killed(
    what: str, find: Callable[[LaunchedRun], Sequence[FoundProcess]], restarts: bool = True
) -> Fault:
    """Return a fault that kills the first of the processes that `find` returns."""

    def do(target: FaultTarget) -> None:
        _first(find(target.run), what).kill()

    return Fault(f"{what} is killed", do, restarts)


def worker_killed(rank: int) -> Fault:
    def find(run: LaunchedRun) -> list[FoundProcess]:
        return [p for p in run.workers() if p.environment["RANK"] == str(rank)]

    return killed(f"worker {rank}", find)


def worker_killed_twice(rank: int) -> Fault:
    def do(target: FaultTarget) -> None:
        once, offset = worker_killed(rank), len(target.run.log())
        once.do(target)
        target.run.wait_log("starting workers on", offset, BACK_S)
        time.sleep(1.0)
        once.do(target)

    return Fault(f"worker {rank} is killed, and again while it starts", do)


def server_killed() -> Fault:
    return killed("the server", lambda run: run.services("--store"))


def server_and_worker_killed() -> Fault:
    def do(target: FaultTarget) -> None:
        server_killed().do(target)
        worker_killed(0).do(target)

    return Fault("the server and worker 0 are killed at once", do)


def reducer_killed(number: int) -> Fault:
    def find(run: LaunchedRun) -> list[FoundProcess]:
        return sorted(run.services("--sum"), key=lambda process: process.words)[number:]

    return killed(f"reducer {number}", find, restarts=False)


def agent_killed(host: str, restarts: bool = True) -> Fault:
    """Return a fault that kills the agent of a host, with all that runs there."""

    def find(run: LaunchedRun) -> list[FoundProcess]:
        return [p for p in run.agents() if p.words[-1].endswith(f"/{host}")]

    return killed(f"the agent of {host}", find, restarts)


def actor_killed(what: str, words: Sequence[str]) -> Fault:
    """Return a fault that kills the Ray actor of a process of the run. `what`: name of the process.
    `words`: words in the command line of the process.
    """

    def do(target: FaultTarget) -> None:
        here = [p for p in target.run.held() if all(word in p.words for word in words)]
        agent = psutil.Process(_first(here, what).pid).parent()
        actor = agent.parent() if agent else None
        assert actor is not None
        actor.kill()

    return Fault(f"the Ray actor of {what} is killed", do)


def launcher_killed() -> Fault:
    what = "the launcher is killed, the run goes on"
    return Fault(what, FaultTarget.kill_launcher, restarts=False)


def launcher_killed_that_stops() -> Fault:
    """Return a fault that kills the launcher of a run that stops without its launcher. The run is
    then resumed.
    """

    def do(target: FaultTarget) -> None:
        run = target.run
        run.stop()
        offset = len(run.log())
        run.follow("launch", "--resume", run.name, "--if-launcher-dies", "stop")
        run.wait_log("] step ", offset, START_S)
        target.kill_launcher()
        code = run.wait_end(START_S)
        if code != 130:
            raise RoadtrainError(
                f"the run ended with exit code {code}, but a clean stop ends with 130"
            )
        run.resume()

    return Fault("the launcher of a run that ends with it is killed; --resume", do, again=True)


def supervisor_killed(then: str) -> Fault:
    def do(target: FaultTarget) -> None:
        for process in target.run.supervisors():
            process.kill()

    return Fault(f"the supervisor is killed, {then}", do)


def noticed(
    what: str,
    act: Callable[[FaultTarget], object],
    line: str,
    within_s: float = BACK_S,
    **fields: bool,
) -> Fault:
    """Return a fault that is complete when the run's log has the text `line`. `fields`: further
    fields of the fault.
    """

    def do(target: FaultTarget) -> None:
        offset = len(target.run.log())
        act(target)
        target.run.wait_log(line, offset, within_s)

    return Fault(what, do, **fields)


def host_taken(host: str, then: str, **fields: bool) -> Fault:
    def act(target: FaultTarget) -> None:
        ask_supervisor(target.run.run_home, "tell", ("hold", host))

    return noticed(f"host {host} is taken away: {then}", act, f"host {host} is lost", **fields)


def host_comes(host: str, then: str, **fields: bool) -> Fault:
    def act(target: FaultTarget) -> None:
        command("launch", "--comes", f"{target.run.name}:{host}")

    return noticed(f"host {host} comes: {then}", act, f"host {host} ", **fields)


def host_leaves(host: str, notice_s: float, then: str, **fields: bool) -> Fault:
    def act(target: FaultTarget) -> None:
        command("launch", "--leaves", f"{target.run.name}:{host}", "--notice", f"{notice_s:g}")

    what = f"host {host} leaves with {notice_s:g} s of notice: {then}"
    return noticed(what, act, f"host {host} is lost", notice_s + BACK_S, **fields)


def node_killed(name: str, part: str, kill: Callable[[RayNodes, str], None]) -> Fault:
    """Return a fault that kills a part of a Ray node."""

    def do(target: FaultTarget) -> None:
        kill(target.ray, name)
        target.ray.add(name)

    return Fault(f"{part} of Ray node {name} killed, a node is added for it", do)


def node_added(name: str) -> Fault:
    what, line = f"Ray node {name} is added as a spare", f"host {name} joined"
    return noticed(what, lambda target: target.ray.add(name), line, restarts=False)


def node_taken(name: str, then: str) -> Fault:
    what, line = f"Ray node {name} is taken away: {then}", f"host {name} is lost"
    return noticed(what, lambda target: target.ray.kill(name), line)
