"""Item `faults` of `launch`: 30 scripted faults of launched runs: what was done, whether the run
went on by itself, how long until a step was done after it, and whether the losses are those of a
run without faults, bit for bit.

The runs: two workers and a server in the lab, two workers and two hosts that sum in the lab, two
stages on this host, two Ray nodes. A fault comes once the one before is over. Needs root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.launch_bench import START_S, STEP_S, Bench, differing, row
from benchmarks.launch_ray import on_ray, ray_scene
from benchmarks.launch_run import LaunchedRun, command
from benchmarks.launch_scene import SERVER, SUMS, HostKind, Scene
from benchmarks.report import Row
from roadtrain.errors import RoadtrainError

BETWEEN = 4  # steps
AFTER = 2  # steps after a fault until it is over
HERE = Scene(
    "two stages on this host",
    (HostKind("gpu", 1000, 2, addresses=("127.0.0.1", "127.0.0.2")),),
    "zero1",
)
Do = Callable[[LaunchedRun], None]


@dataclass(frozen=True)
class Fault:
    """`by_itself`: False: a user goes on with it (`--resume`), as is promised of a supervisor that
    is killed."""

    what: str
    do: Do
    by_itself: bool = True


def kill_worker(rank: int) -> Fault:
    return Fault(f"worker {rank} is killed", lambda run: run.workers()[rank].kill())


def kill_service(what: str, word: str, number: int = 0) -> Fault:
    return Fault(f"{what} {number} is killed", lambda run: run.services(word)[number].kill())


def kill_agent(number: int) -> Fault:
    def do(run: LaunchedRun) -> None:
        sorted(run.agents(), key=lambda one: one.words)[number].kill()

    return Fault(f"the agent of host {number} is killed, with all on its host", do)


def _kill_supervisor(run: LaunchedRun) -> None:
    for one in run.supervisors():
        one.kill()
    run.wait(lambda: not run.run_home.is_supervised(), "the end of its supervisor", 60, ended=True)
    time.sleep(1.0)  # what it has started sees that it is gone
    run.resume()


def leave(host: str) -> Fault:
    def do(run: LaunchedRun) -> None:
        command("launch", "--leaves", f"{run.name}:{host}", "--notice", "5")
        time.sleep(8.0)
        command("launch", "--comes", f"{run.name}:{host}")

    return Fault(f"host {host} leaves with 5 s of notice, and comes back", do)


SUPERVISOR = Fault("the supervisor is killed; --resume", _kill_supervisor, by_itself=False)
OF_SERVER: Sequence[Fault] = (
    kill_worker(0),
    kill_service("server", "--store"),
    kill_worker(1),
    kill_agent(0),
    kill_agent(2),
    leave("gpu1"),
    kill_service("server", "--store"),
    SUPERVISOR,
    kill_worker(1),
    kill_agent(1),
)
OF_SUMS: Sequence[Fault] = (
    kill_service("reducer", "--sum", 0),
    kill_service("reducer", "--sum", 1),
    kill_worker(0),
    leave("spare0"),
    kill_agent(3),
    kill_worker(1),
    leave("spare1"),
    kill_agent(0),
)
OF_STAGES: Sequence[Fault] = (
    kill_worker(0),
    kill_worker(1),
    kill_agent(0),
    kill_agent(1),
    leave("gpu1"),
    SUPERVISOR,
)
OF_RAY: Sequence[Fault] = (
    kill_worker(0),
    kill_worker(1),
    kill_worker(0),
    kill_worker(1),
    kill_worker(0),
    kill_worker(1),
)


def rows(bench: Bench) -> Iterator[Row]:
    scenes: Sequence[tuple[str, Scene, str, Sequence[Fault]]] = (
        ("f-server", SERVER, "lab", OF_SERVER),
        ("f-sums", SUMS, "lab", OF_SUMS),
        ("f-stages", HERE, "here", OF_STAGES),
    )
    for name, scene, on, faults in scenes:
        yield from tried(bench, name, scene, on, faults[:2] if bench.quick else faults)
    try:
        with on_ray(bench.home / "fault-nodes") as address:
            more = ("--ray-address", address)
            yield from tried(bench, "f-ray", ray_scene(), "ray", OF_RAY, *more)
    except RoadtrainError as error:
        yield row("two Ray nodes", str(error).partition("\n")[0], "", None, "it runs", False)


def tried(
    bench: Bench, name: str, scene: Scene, on: str, faults: Sequence[Fault], *more: str
) -> Iterator[Row]:
    """All of a scene's, one after the other; what cannot be tried any more is a missed goal."""
    steps = (len(faults) + 2) * (BETWEEN + AFTER + 4)
    left = list(faults)
    try:
        with bench.launched(scene, name, steps, on, *more) as run:
            for fault in faults:
                yield once(scene, run, fault)
                left.remove(fault)
            last = run.step
            losses = run.losses()
            run.stop()
            with bench.again(run, f"{name}-plain", on) as plain:
                plain.wait_step(last, START_S + last * STEP_S)
                theirs = plain.losses()
        apart = [step for step in differing(losses, theirs) if step <= last]
        what = f"{len(faults)} faults, {last} steps: steps whose loss is not as without them"
        yield row(scene.name, what, "", float(len(apart)), "0", not apart)
    except RoadtrainError as error:
        why = str(error).partition("\n")[0]
        for fault in left or faults[-1:]:
            goal = "it goes on by itself"
            yield row(scene.name, f"{fault.what}: {why}", "s", None, goal, False)
            why = "not tried, the run is gone"


def once(scene: Scene, run: LaunchedRun, fault: Fault) -> Row:
    """Seconds from the fault until AFTER more steps are done."""
    run.wait_step(run.step + BETWEEN, START_S + BETWEEN * STEP_S)
    at, then = run.step, time.monotonic()
    fault.do(run)
    run.wait_step(at + AFTER, START_S)
    goal = "it goes on by itself" if fault.by_itself else "it goes on with --resume"
    seconds = time.monotonic() - then
    print(f"{scene.name}: {fault.what}: {seconds:.1f} s", flush=True)
    return row(scene.name, fault.what, "s", seconds, goal, True)
