"""Item `plan` of `launch`: plan and launch from cluster.toml and job.toml, and compare the seconds
of a step with the prediction. Also check that losses stay the same after all processes of a host
were killed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.common.report import Row
from benchmarks.launch.bench import START_S, STEP_S, Bench, differing, row
from benchmarks.launch.ray_links import LINKED, linked_nodes
from benchmarks.launch.run import LaunchedRun
from benchmarks.launch.scene import CLUSTERS, SERVER, SUMS
from roadtrain.errors import RoadtrainError

WITHIN = 0.10
SETTLES_S = 15.0  # Ray's own processes need processors for so long; speeds are measured afterwards


def rows(bench: Bench) -> Iterator[Row]:
    for name, scene in (("server", SERVER), ("clusters", CLUSTERS), ("sums", SUMS)):
        try:
            with bench.launched(scene, name, bench.steps) as run:
                yield from run_and_kill(bench, run, scene.name)
        except RoadtrainError as error:
            yield failed(scene.name, error)
    try:
        with linked_nodes(bench.home / "ray-nodes") as nodes:
            time.sleep(SETTLES_S)
            words = ("ray", "--ray-address", nodes.address)
            with bench.launched(LINKED, "ray", bench.steps, *words, inside=nodes.inside) as run:
                yield from run_and_kill(bench, run, LINKED.name, "ray")
    except RoadtrainError as error:
        yield failed(LINKED.name, error)


def failed(case: str, error: RoadtrainError) -> Row:
    return row(case, str(error).partition("\n")[0], "", None, "it runs", False)


def run_and_kill(bench: Bench, run: LaunchedRun, case: str, on: str = "lab") -> Iterator[Row]:
    """Measure the started run until its end. Then run it again, kill the processes of a host, and
    compare the losses.
    """
    run.wait_end(bench.steps * STEP_S)
    promised = bench.plan_of(run).predicted
    assert promised is not None
    took = run.step_s(0)
    met = abs(took / promised.seconds - 1) <= WITHIN
    beside = ("predicted", promised.seconds)
    yield row(case, "a step", "s", took, f"within {WITHIN:.0%}", met, beside=beside)
    with bench.again(run, f"{run.home.name}-killed", on) as killed:
        killed.wait_step(bench.steps // 3, bench.steps * STEP_S)
        victims = killed.agents()[:1] or killed.workers()[:1]
        for process in victims:
            process.kill()
        at = killed.step
        seconds = killed.wait_step(at + 2, START_S)
        killed.wait_end(START_S + bench.steps * STEP_S)
        apart = differing(run.losses(), killed.losses())
        what = "processes of a host killed: seconds until the step after the next"
        yield row(case, what, "s", seconds, "it goes on by itself", True)
        whole = len(killed.losses()) == len(run.losses())
        metric = "steps whose loss is not as without the kill"
        yield row(case, metric, "", float(len(apart)), "0", not apart and whole)
