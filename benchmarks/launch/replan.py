"""Item `replan` of `launch`: slow a link to a quarter of its rate, run `launch --replan`, and
compare steps under the old and the new plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.report import Row
from benchmarks.launch.bench import START_S, STEP_S, Bench, attempted, differing, row
from benchmarks.launch.run import LaunchedRun, command
from benchmarks.launch.scene import SERVED, STAGES, Scene
from roadtrain.config.plan_file import load_plan_file
from roadtrain.launch.control_socket import ask_supervisor

SLOWED, QUARTER = "gpu1", 0.25
STEPS = 10_000  # more steps than are made


def rows(bench: Bench) -> Iterator[Row]:
    for name, scene in (("replan-served", SERVED), ("replan-stages", STAGES)):
        yield from attempted(scene.name, slowed(bench, name, scene))


def slowed(bench: Bench, name: str, scene: Scene) -> Iterator[Row]:
    case = f"{scene.name}: a link is slowed to a quarter"
    with bench.launched(scene, name, STEPS) as run:
        run.wait_step(bench.steps, bench.steps * STEP_S)
        first = run.step
        yield row(case, "a step before", "s", run.step_s(0, first))
        rate = scene.hosts[0].rate * QUARTER
        words = ["rate", SLOWED, "0", f"{rate:g}Mbit/s"]
        ask_supervisor(run.run_home, "tell", words)
        slow = run.step
        run.wait_step(slow + bench.steps, bench.steps * STEP_S)
        old, before = run.step_s(slow, run.step), bench.plan_of(run)
        yield row(case, "a step by the old plan, slowed", "s", old)
        print(output := command("launch", "--replan", run.name, "--detach", within_s=1200.0))
        new_plan = load_plan_file(run.run_home.plan_path)
        again = run.step
        run.wait_step(again + bench.steps, START_S + bench.steps * STEP_S)
        new = run.step_s(again, run.step)
        assert new_plan.predicted is not None
        met = new < old and new_plan != before and "the old plan stays" not in output
        goal = "another plan, which is faster"
        yield row(case, "a step by the new plan", "s", new, goal, met, beside=("old plan", old))
        beside = ("predicted", new_plan.predicted.seconds)
        yield row(case, "a step by the new plan", "s", new, beside=beside)
        last = run.step
        lossless = _same_losses(bench, run, last)
        yield row(case, "steps whose loss differs by 1e-4", "", float(lossless), "0", not lossless)


def _same_losses(bench: Bench, run: LaunchedRun, until: int) -> int:
    """Return the number of steps up to `until` whose losses differ by more than rounding from those
    of a run without the slow link.
    """
    with bench.again(run, f"{run.home.name}-plain") as plain:
        plain.wait_step(until, START_S + until * STEP_S)
        ours, theirs = run.losses(), plain.losses()
        far = [
            step for step in differing(ours, theirs) if abs(ours[step] / theirs[step] - 1) > 1e-4
        ]
        return len([step for step in far if step <= until])
