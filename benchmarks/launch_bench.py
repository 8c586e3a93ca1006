"""What the items of `launch` have in common: where they work, how long they run, and runs without
faults that others are held against. Does NOT judge anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch_run import LaunchedRun
from benchmarks.launch_scene import Scene
from benchmarks.report import Row
from roadtrain.config.plan_file import PlanFile, load_plan_file

START_S = 240.0  # from the command to the first step, on a machine with other work
STEP_S = 30.0  # of a step, at most
STORES = "/dev/shm/roadtrain-run"  # how the stores of a plan in memory begin, of a run in DIR/run


@dataclass(frozen=True)
class Bench:
    """`home`: goes when the benchmark ends."""

    home: Path
    quick: bool

    @property
    def steps(self) -> int:
        """That a run makes of which step times are taken."""
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
        """From the two files alone: planned and started. The name is the run's and its
        directory's. inside: as of LaunchedRun."""
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
        """The same plan and job in another run directory."""
        home = self.home / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        for file in ("cluster.toml", "job.toml", "plan.toml"):
            text = (run.home / file).read_text().replace(str(run.home / "run"), str(home / "run"))
            (home / file).write_text(text.replace(STORES, f"{STORES}-again"))
        with LaunchedRun(f"bench-{name}", on, home, *run.more, inside=run.inside) as other:
            other.start()
            other.wait_step(1, START_S)
            yield other

    def forget_stores(self) -> None:
        """Those that runs left in this machine's own memory, not in that of a lab's hosts."""
        for left in Path(STORES).parent.glob(f"{Path(STORES).name}-*"):
            shutil.rmtree(left, ignore_errors=True)

    def plan_of(self, run: LaunchedRun) -> PlanFile:
        return load_plan_file(run.home / "plan.toml")


def differing(one: dict[int, float], other: dict[int, float]) -> list[int]:
    """Steps of both whose losses are not the same, bit for bit."""
    return [step for step in sorted(one.keys() & other.keys()) if one[step] != other[step]]


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
    """beside: what ours is held against; the ratio is ours over it."""
    name, peer = beside or (None, None)
    ratio = ours / peer if peer and ours is not None else None
    return Row(case, metric, unit, ours, peer, name, ratio, None, goal, met)
