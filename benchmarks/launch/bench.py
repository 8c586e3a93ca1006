"""Directories, numbers of steps, and starts of runs for the items of `launch`. Does NOT compare
results with goals.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.report import Row
from benchmarks.launch.run import RUN, LaunchedRun
from benchmarks.launch.scene import Scene
from roadtrain.config.plan_file import PlanFile, load_plan_file
from roadtrain.errors import RoadtrainError

START_S = 240.0  # limit from the command to the first step, on a machine with other work
STEP_S = 30.0  # limit of one step
STORES = f"/dev/shm/roadtrain-{RUN}"  # prefix of the stores of a run in memory


@dataclass(frozen=True)
class Bench:
    """Settings of a benchmark. `home`: directory of all runs, removed when the benchmark ends."""

    home: Path
    quick: bool

    @property
    def steps(self) -> int:
        """The number of steps in a run whose step times are measured."""
        return 12 if self.quick else 24

    @contextmanager
    def launched(
        self,
        scene: Scene,
        name: str,
        steps: int,
        on: str = "lab",
        *more: str,
        inside: Sequence[str] = (),
    ) -> Iterator[LaunchedRun]:
        """Write cluster.toml and job.toml, make a plan from them, and start a run. Yields the run
        after its first step.

        Args:
            name: name of the run, and of its directory
            on: engine that runs the processes, as in `launch --on`
            more: further arguments of `launch`
            inside: words to put before a launch command, so that the command runs on a host of a
                lab
        """
        home = self.home / name
        shutil.rmtree(home, ignore_errors=True)
        scene.write(home, steps, on)
        with LaunchedRun(f"bench-{name}", on, home, *more, inside=inside) as run:
            words = ("--placements", scene.placements, "--constants", scene.constants(on))
            run.plan(*words)
            if (samples := self.plan_of(run).plan.micro_batch) != scene.batch_size:
                scene.write(home, steps, on, samples)
                run.plan(*words)
            run.start()
            run.wait_step(1, START_S)
            yield run

    @contextmanager
    def again(self, run: LaunchedRun, name: str, on: str = "lab") -> Iterator[LaunchedRun]:
        """Start a second run with the plan and the job of `run` in another directory. Yields the
        second run after its first step.
        """
        home = self.home / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        for file in ("cluster.toml", "job.toml", "plan.toml"):
            text = (run.home / file).read_text().replace(str(run.home / RUN), str(home / RUN))
            (home / file).write_text(text.replace(STORES, f"{STORES}-again"))
        with LaunchedRun(f"bench-{name}", on, home, *run.more, inside=run.inside) as other:
            other.start()
            other.wait_step(1, START_S)
            yield other

    def forget_stores(self) -> None:
        """Remove the stores that runs left in the memory of this machine (/dev/shm)."""
        for store in Path(STORES).parent.glob(f"{Path(STORES).name}-*"):
            shutil.rmtree(store, ignore_errors=True)

    def plan_of(self, run: LaunchedRun) -> PlanFile:
        return load_plan_file(run.home / "plan.toml")


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def attempted(case: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of a case, and a row with the error if the case fails."""
    try:
        yield from rows
    except RoadtrainError as error:
        print(f"{case} ended: {error}", flush=True)
        yield row(case, first_line(error), "", None, "it runs", False)


def differing(losses: dict[int, float], other: dict[int, float]) -> list[int]:
    """Return the steps that both runs have and whose losses are not equal bit for bit."""
    return [step for step in sorted(losses.keys() & other.keys()) if losses[step] != other[step]]


def row(
    case: str,
    metric: str,
    unit: str,
    ours: float | None,
    goal: str | None = None,
    met: bool | None = None,
    *,
    beside: tuple[str, float] | None = None,
) -> Row:
    """Build a row. `beside`: (name, value) that `ours` is divided by for the row's ratio."""
    name, peer = beside or (None, None)
    ratio = ours / peer if peer and ours is not None else None
    return Row(case, metric, unit, ours, peer=peer, peer_name=name, ratio=ratio, goal=goal, met=met)
