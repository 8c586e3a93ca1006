"""Item `plan` of `launch`: plan and launch from cluster.toml and job.toml, and compare the seconds
of a step with the prediction. Also check that losses stay the same after all processes of a host
were killed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from benchmarks.common.report import Row
from benchmarks.launch.bench import START_S, STEP_S, Bench, attempted, differing, row
from benchmarks.launch.ray_links import LINKED, linked_nodes
from benchmarks.launch.scene import CLUSTERS, SERVER, SUMS, Scene

WITHIN = 0.10
SETTLES_S = 15.0  # Ray's own processes need processors for so long; speeds are measured afterwards


def rows(bench: Bench) -> Iterator[Row]:
    for name, scene in (("server", SERVER), ("clusters", CLUSTERS), ("sums", SUMS)):
        yield from attempted(scene.name, run_and_kill(bench, name, scene))
    yield from attempted(LINKED.name, on_ray(bench))


def on_ray(bench: Bench) -> Iterator[Row]:
    with linked_nodes(bench.home / "ray-nodes") as nodes:
        time.sleep(SETTLES_S)
        words = ("ray", "--ray-address", nodes.address)
        yield from run_and_kill(bench, "ray", LINKED, *words, inside=nodes.inside)


def run_and_kill(
    bench: Bench, name: str, scene: Scene, on: str = "lab", *more: str, inside: Sequence[str] = ()
) -> Iterator[Row]:
    """Run a scene and measure its steps. Then run it again, kill the processes of a host, and
    compare the losses. The arguments are those of `Bench.launched`.
    """
    case = scene.name
    with bench.launched(scene, name, bench.steps, on, *more, inside=inside) as run:
        run.wait_end(bench.steps * STEP_S)
        promised = bench.plan_of(run).predicted
        assert promised is not None
        took = run.step_s(0)
        met = abs(took / promised.seconds - 1) <= WITHIN
        beside = ("predicted", promised.seconds)
        yield row(case, "a step", "s", took, f"within {WITHIN:.0%}", met, beside=beside)
        with bench.again(run, f"{run.home.name}-killed", on) as killed:
            killed.wait_step(bench.steps // 3, bench.steps * STEP_S)
            for process in killed.agents()[:1] or killed.workers()[:1]:
                process.kill()
            seconds = killed.wait_step(killed.step + 2, START_S)
            killed.wait_end(START_S + bench.steps * STEP_S)
            what = "processes of a host killed: seconds until the step after the next"
            yield row(case, what, "s", seconds, "it goes on by itself", True)
            apart = differing(run.losses(), killed.losses())
            same = not apart and len(killed.losses()) == len(run.losses())
            metric = "steps whose loss is not as without the kill"
            yield row(case, metric, "", float(len(apart)), "0", same)
