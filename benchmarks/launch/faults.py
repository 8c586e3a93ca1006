"""Item `faults` of `launch`: scripted faults of launched runs, one after another. The item checks
whether a run goes on by itself, and measures the seconds until the next step and the number of
repeated steps. Losses are compared with those of a run without faults on this host.

    lab    two workers and a server; two workers and hosts that sum
    here   on this machine: two workers in one process group, and a spare host
    ray    two workers and a server on three Ray nodes

As long as all workers of the plan run, losses are equal bit for bit. After steps with fewer
workers, losses may differ by up to 0.001 %, because gradients were summed in another order. Needs
root.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks.common.report import Row
from benchmarks.launch import fault
from benchmarks.launch import scene as scenes
from benchmarks.launch.bench import START_S, STEP_S, Bench, first_line, row
from benchmarks.launch.fault import Fault, FaultTarget, Outcome, strike
from benchmarks.launch.ray import RayNodes, on_nodes
from benchmarks.launch.run import LaunchedRun
from benchmarks.launch.scene import MODEL, HostKind, Scene
from roadtrain.config.machines import PlanHost
from roadtrain.config.plan_file import load_plan_file
from roadtrain.errors import RoadtrainError

BETWEEN = 4  # steps before each fault
STEPS = 100_000  # more steps than any of these runs makes
ROUNDING = 1e-5  # relative difference of a loss
TINY = MODEL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MORE = {"model": {"config": TINY}, "run": {"log_every": 1}}
KEPT = MORE | {"parallelism": {"snapshot_every": 4}}
SUMMING = ("10.9.0.3", "10.9.0.4", "10.9.0.5")
LOOPBACK = "127.1.0."  # addresses of the run without faults, instead of the lab's


@dataclass(frozen=True)
class FaultScene:
    """A scene and its faults.

    Attributes:
        on: engine that runs the processes, as in `launch --on`
        nodes: names of the hosts of a Ray cluster, if the scene runs on Ray
        spares: spare hosts to add to the plan
        later: hosts of the cluster to remove from the plan, so that a fault can add them
    """

    name: str
    scene: Scene
    on: str
    faults: Sequence[Fault]
    nodes: tuple[str, ...] = ()
    spares: tuple[PlanHost, ...] = ()
    later: tuple[str, ...] = ()


SERVER = FaultScene(
    "server",
    replace(scenes.SERVER, name="lab: two workers and a server", accumulate=2, more=MORE),
    "lab",
    (
        fault.launcher_killed(),
        fault.worker_killed(0),
        fault.server_killed(),
        fault.worker_killed_twice(1),
        fault.agent_killed("gpu0"),
        fault.agent_killed("spare"),
        fault.server_and_worker_killed(),
        fault.supervisor_killed("the standby goes on"),
        fault.launcher_killed_that_stops(),
        fault.host_taken("gpu1", "worker 0 goes on alone", fewer=True),
        fault.host_comes("gpu1", "two workers again", fewer=True),
        fault.host_leaves("gpu1", 5.0, "worker 0 goes on alone", fewer=True),
        fault.host_comes("gpu1", "two workers again", fewer=True),
    ),
)
SUMS = FaultScene(
    "sums",
    replace(
        scenes.SUMS,
        name="lab: two workers and hosts that sum",
        hosts=(scenes.SUMS.hosts[0], HostKind("spare", 100, 3, computes=False, addresses=SUMMING)),
        accumulate=2,
        more=KEPT,
    ),
    "lab",
    (
        fault.reducer_killed(0),
        fault.worker_killed(1),
        fault.agent_killed("spare1", restarts=False),
        fault.host_comes("spare2", "it sums, too", restarts=False),
        fault.host_taken("spare0", "the others sum", restarts=False),
        fault.host_comes("spare0", "it sums again", restarts=False),
        fault.host_leaves("spare1", 5.0, "the others sum", restarts=False),
        fault.reducer_killed(1),
        fault.agent_killed("gpu1"),
    ),
    later=("spare2",),
)
MEET = FaultScene(
    "here",
    Scene(
        "here: two workers that meet, a spare host",
        (HostKind("gpu", 1000, 2, addresses=("127.0.0.1", "127.0.0.2")),),
        "zero1",
        accumulate=64,
        more=KEPT,
    ),
    "here",
    (
        fault.worker_killed(1),
        fault.agent_killed("gpu1"),
        fault.supervisor_killed("the standby goes on"),
        fault.host_taken("gpu1", "a spare host takes its place"),
    ),
    spares=(PlanHost("gpu2", "gpu", "127.0.0.3", workers=1),),
)


RAY = FaultScene(
    "ray",
    Scene(
        "Ray: two workers and a server on three nodes",
        (HostKind("gpu", 1000, 2), HostKind("spare", 1000, computes=False)),
        "server",
        accumulate=64,
        more=MORE,
    ),
    "ray",
    (
        fault.launcher_killed(),
        fault.worker_killed(1),
        fault.server_killed(),
        fault.actor_killed("the server", ["serve"]),
        fault.supervisor_killed("Ray starts it again"),
        fault.actor_killed("the supervisor", ["roadtrain.launch.supervise"]),
        fault.node_killed("gpu1", "all processes", RayNodes.kill),
        fault.node_killed("gpu1", "the raylet", RayNodes.kill_raylet),
        fault.node_added("late"),
        fault.node_taken("gpu1", "the added one takes its place"),
    ),
    nodes=("spare", "gpu0", "gpu1"),
)


def rows(bench: Bench) -> Iterator[Row]:
    for scene in (SERVER, SUMS, MEET, RAY):
        yield from tried(bench, replace(scene, faults=scene.faults[: 2 if bench.quick else None]))


def tried(bench: Bench, scene: FaultScene) -> Iterator[Row]:
    """Run all faults of a scene, and yield their rows. A fault that the run does not survive misses
    its goal.
    """
    case = scene.scene.name
    found: list[Outcome] = []
    failed: dict[Fault, str] = {}
    losses: dict[int, float] = {}
    theirs: dict[int, float] = {}
    try:
        losses = struck(bench, scene, found, failed)
        theirs = without_faults(bench, scene, max(losses))
    except (RoadtrainError, OSError) as error:
        for each in scene.faults:
            failed.setdefault(each, f"the scene ended: {first_line(error)}")
    for each in scene.faults:
        goal = "it goes on with --resume" if each.again else "it goes on by itself"
        if each in failed:
            yield row(case, f"{each.what}: {failed[each]}", "s", None, goal, False)
    same, apart, worst = True, 0, 0.0
    for number, after in enumerate(found):
        same = same and not after.fault.fewer
        until = found[number + 1].step if number + 1 < len(found) else max(losses)
        off = [_off(losses, theirs, step) for step in range(after.step + 1, until + 1)]
        worst = max([worst, *off])
        good = max(off, default=0.0) <= (0.0 if same else ROUNDING)
        apart += not good
        bound = "losses bit for bit" if same else f"losses within {ROUNDING:g}"
        goal = "it goes on with --resume" if after.fault.again else "it goes on by itself"
        what = f"{after.fault.what}; {after.repeated} steps again"
        yield row(case, what, "s", after.seconds, f"{goal}, {bound}", good)
    if losses and theirs:
        what = f"{len(found)} faults, {max(losses)} steps: largest difference of a loss"
        yield row(case, what, "of it", worst, f"0, {ROUNDING:g} after fewer workers", not apart)


def struck(
    bench: Bench, scene: FaultScene, found: list[Outcome], failed: dict[Fault, str]
) -> dict[int, float]:
    """Inject all faults of `scene` into one run, one after another, and return the run's training
    losses by step. Appends each outcome to `found`, and maps each fault that the run does not
    survive to the reason in `failed`.
    """
    with ExitStack() as stack:
        nodes = stack.enter_context(on_nodes(*scene.nodes)) if scene.nodes else None
        more = ("--ray-address", nodes.address) if nodes else ()
        run = stack.enter_context(planned(bench, scene, f"f-{scene.name}", scene.on, *more))
        run.follow()
        run.wait_log("] step ", 0, START_S)
        target = FaultTarget(run, nodes)
        for each in scene.faults:
            try:
                run.wait_step(run.step + BETWEEN, START_S)
                found.append(strike(target, each))
                report = f"{found[-1].seconds:.1f} s, {found[-1].repeated} steps again"
            except (RoadtrainError, OSError) as error:
                failed[each] = report = first_line(error)
                go_on(run)
            print(f"{scene.scene.name}: step {run.step}: {each.what}: {report}", flush=True)
        run.wait_step(run.step + BETWEEN, START_S)
        run.stop()
        return run.losses()


def go_on(run: LaunchedRun) -> None:
    if run.state().phase == "ended" or not run.run_home.is_supervised():
        run.resume()


def without_faults(bench: Bench, scene: FaultScene, last: int) -> dict[int, float]:
    """Run the same job on this host without faults, up to step `last`, and return its losses."""
    with planned(bench, scene, f"f-{scene.name}-plain", "here") as run:
        run.start()
        run.wait_step(last, START_S + last * STEP_S)
        return run.losses()


def planned(bench: Bench, scene: FaultScene, name: str, on: str, *more: str) -> LaunchedRun:
    """Write the cluster file and the job file of a scene, and plan a run, with stores below the
    directory of this benchmark.

    Args:
        name: name of the run, and of its directory
        on: engine that runs the processes, as in `launch --on`
        more: further arguments of `launch`
    """
    home = bench.home / name
    shutil.rmtree(home, ignore_errors=True)
    scene.scene.write(home, STEPS, "files")
    run = LaunchedRun(f"bench-{name}", on, home, *more)
    shutil.rmtree(run.run_home.path, ignore_errors=True)
    run.plan("--placements", scene.scene.placements, "--constants", "lab")
    plan = load_plan_file(home / "plan.toml")
    assert plan.machines is not None
    hosts = tuple(host for host in plan.machines.hosts if host.name not in scene.later)
    machines = replace(plan.machines, hosts=hosts, spares=(*plan.machines.spares, *scene.spares))
    text = replace(plan, machines=machines).to_toml().replace("/dev/shm/", f"{home}/")
    if on == "here":
        text = text.replace("10.9.0.", LOOPBACK)
    (home / "plan.toml").write_text(text)
    return run


def _off(losses: dict[int, float], theirs: dict[int, float], step: int) -> float:
    """Compute the relative difference between the losses of a step in two runs; infinite if a run
    does not have the step.
    """
    if step not in losses or step not in theirs:
        return float("inf")
    return abs(losses[step] - theirs[step]) / abs(theirs[step])
