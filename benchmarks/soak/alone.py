"""Faults of `roadtrain soak` for a trainer that runs alone, with a store of two directories.

For a power cut, the process is killed at one of its syncs or writes. Everything that was synced
stays in the directories. Of the data that was not synced, all, nothing or some sectors stay.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak.fault import (
    ALONE,
    Fault,
    NothingToStrike,
    Reference,
    flip_a_bit,
    kind,
    refused,
    unmounted,
)
from benchmarks.soak.power import Action, Strike, begin, cut
from benchmarks.soak.scene import STEPS, Node, Scene, WorkerLog, Wrong, fill
from benchmarks.soak.train import TEXT, TrainerArgs, train_alone
from roadtrain.training.metrics import read_metrics

# printed when a damaged record is dropped; its step is trained again
ASIDE = "set aside"
FLIPPED = ("CURRENT", "store.json", "ledger.0", "ledger.1", "slot0.bin", "slot1.bin", "mark.json")


class AloneScene(Scene):
    """A trainer that runs alone, without servers and links.

    Attributes:
        dirs: directories of the trainer's store
        run: run directory of the trainer
        shadow: directory with the durable content of `dirs` and `run`
    """

    run: Path

    def __enter__(self) -> AloneScene:
        super().__enter__()
        self.dirs, self.run, self.shadow = (
            [self.home / "a", self.home / "b"],
            self.home / "run",
            self.home / "shadow",
        )
        for path in (*self.dirs, self.run):
            path.mkdir()
        (self.home / "text").write_text(TEXT)
        self.others = 0  # number of trainers besides the first
        begin(self.shadow, self.roots)
        return self

    @property
    def roots(self) -> list[Path]:
        return [*self.dirs, self.run]

    def start(  # type: ignore[override]
        self,
        *strikes: Strike,
        steps: int = STEPS,
        dirs: Sequence[Path] | None = None,
    ) -> None:
        self.restarted = time.monotonic()
        self.attempt += 1
        for name in ("paused", "go"):
            (self.shadow / name).unlink(missing_ok=True)
        own = {"attempt": self.attempt, "steps": steps, "strikes": strikes}
        self.workers = [self.trainer(self.log(0), dirs or self.dirs, self.run, **own)]

    def run_once(self, *strikes: Strike, **options: Any) -> list[str]:
        """Start the trainer, wait until it has ended, and return its errors."""
        self.start(*strikes, **options)
        return self.wait_workers()

    def trainer(self, log: Path, dirs: Sequence[Path], run: Path, **fields: Any) -> Node:
        """Start a trainer. `fields`: further fields of its arguments."""
        stores, roots = (tuple(map(str, paths)) for paths in (dirs, self.roots))
        shadow = str(self.shadow)
        args = TrainerArgs(str(self.home), str(run), stores, str(log), shadow, roots, **fields)
        return self.started(train_alone, (args,), log)

    def beside(self, dirs: Sequence[Path], run: Path, **fields: Any) -> WorkerLog:
        """Run a second trainer until it ends, while no other trainer makes progress, and return its
        log. `fields`: further fields of its arguments.
        """
        self.others += 1
        log = self.home / f"other{self.others}.log"
        node = self.trainer(log, dirs, run, **fields)
        self.join(node, "the second trainer to end")
        return WorkerLog.read(log)

    def wait_paused(self) -> None:
        while not (self.shadow / "paused").exists():
            if self.workers[0].ended or time.monotonic() > self.until:
                raise Wrong(
                    f"the trainer ended before the fault: {self.workers[0].log.read_text()[-1000:]}"
                )
            time.sleep(0.005)

    def wait_workers(self) -> list[str]:
        worker = self.workers[0]
        worker.process.join(max(0.0, self.until - time.monotonic()))
        worker.killed |= worker.process.exitcode == -signal.SIGKILL
        return super().wait_workers()

    def cut_power(self, rng: random.Random) -> None:
        self.note(f"power cut: {cut(self.shadow, self.roots, rng)}")

    def logs(self) -> list[WorkerLog]:
        return [WorkerLog.read(self.log(0))]

    def check(self, reference: Sequence[WorkerLog]) -> None:
        """Compare the logs with those of a run without faults. Also check that metrics.jsonl has
        each step once, and that a run with a committed step never goes on with another store or an
        older state.
        """
        super().check(reference)
        expected = {step: line for (_, step), (line, _, _) in reference[0].steps.items()}
        lines = [
            (line["step"], f"{float(line['loss']).hex()} {float(line['grad_norm']).hex()}")
            for line in read_metrics(self.run / "metrics.jsonl")
        ]
        if lines != sorted(expected.items()):
            raise Wrong(f"metrics.jsonl has {lines}, but {expected} in the run without faults")
        whose, reached = "", 0
        committed: dict[int, int] = {}
        for (attempt, _), (_, step, _) in self.logs()[0].steps.items():
            committed[attempt] = max(step, committed.get(attempt, 0))
        for line in self.log(0).read_text(errors="replace").splitlines():
            if match := re.fullmatch(r"(\d+) job (\S+) (\d+)", line):
                attempt, job, step = int(match[1]), match[2], int(match[3])
                if reached and (job != whose or (step < reached and not self.repeats())):
                    raise Wrong(
                        f"attempt {attempt} goes on from step {step} of store {job}, but store"
                        f" {whose} has committed step {reached}"
                    )
                whose, reached = job, max(reached, committed.get(attempt, 0))

    def repeats(self) -> bool:
        return ASIDE in self.log(0).read_text(errors="replace")


def _steps(fault: Fault) -> int:
    return 1 + fault.choice % (STEPS - 2)


def _strike(
    fault: Fault, reference: Reference, actions: Sequence[Action], first: float = 0.0
) -> Strike:
    """Return a Strike at `fault.moment`, a share of all syncs or writes. `first`: smallest share at
    which it acts.
    """
    action = actions[fault.choice % len(actions)]
    of = "write" if action == "kill half" or fault.prompt else "sync"
    moment = first + fault.moment * (1 - first)
    return Strike(of, int(moment * reference.calls[of]), action)  # type: ignore[arg-type]


def _soon(rng: random.Random) -> Strike:
    """Return a Strike that kills the trainer soon after a start."""
    where, most = rng.choice((("ledger", 4), ("slot", 6), ("", 30)))
    return Strike("sync", rng.randrange(most), "kill before", where)


@kind("power cut", alone=ALONE)
def power_cut(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    sentences = scene.run_once(
        _strike(fault, reference, ("kill before", "kill after", "kill half"))
    )
    scene.cut_power(random.Random(fault.choice))
    scene.finish()
    return sentences


@kind("killed and power cut", alone=ALONE)
def killed_and_cut(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    """Kill the trainer between a write and the sync of the written data. Soon after the next start,
    kill the trainer again and cut the power. Returns the trainer's errors.
    """
    rng = random.Random(fault.choice)
    where = rng.choice(("", "ledger"))
    calls = reference.calls["ledger" if where else "sync"]
    sentences = scene.run_once(Strike("sync", int(fault.moment * calls), "kill before", where))
    sentences += scene.run_once(_soon(rng))
    scene.cut_power(rng)
    scene.finish()
    return sentences


@kind("device fails", ends="any", alone=ALONE)
def fails(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    """Let one sync or write fail with EIO. The power may be cut at once or a little later. Returns
    the trainer's errors.
    """
    rng = random.Random(fault.choice)
    strike = _strike(fault, reference, ("EIO",))
    if fault.choice % 3 == 0:  # of the file that commits a step
        strike = Strike("sync", int(fault.moment * reference.calls["ledger"]), "EIO", "ledger")
    sentences = scene.run_once(strike)
    if rng.random() < 0.5:
        sentences += scene.run_once(_soon(rng))
    if rng.random() < 0.7:
        scene.cut_power(rng)
    scene.finish()
    return sentences


@kind("run directory full", ends="sentence", alone=ALONE, mounts=True)
def run_full(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    scene.run = scene.disk(0)
    begin(scene.shadow, scene.roots)
    number = 1 + int(fault.moment * (STEPS - 1))  # each line is synced once
    scene.start(Strike("sync", number, "pause", "metrics.jsonl"))
    scene.wait_paused()
    ballast = fill(scene.run)
    (scene.shadow / "go").touch()
    sentences = refused(scene, rf"FullError.*{scene.run}")
    ballast.unlink()
    scene.finish()
    return sentences


@kind("store unmounted", ends="sentence", alone=ALONE)
def store_unmounted(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    """Leave some directories of the store empty at the next start, as if a disk were not mounted.
    The trainer must refuse to start. Returns the trainer's errors.
    """
    scene.run_once(_first_strike(fault, reference), steps=_steps(fault) if fault.prompt else STEPS)
    if not _trained(scene):
        scene.finish()  # nothing was committed, so beginning anew is right
        raise NothingToStrike
    away = [scene.dirs[:1], scene.dirs[1:], scene.dirs][fault.choice % 3]
    before = contents([scene.run])
    with unmounted(away):
        scene.start()
        sentences = refused(scene, "GoneError|StaleError|ForeignError")
        after = contents([scene.run])
        if changed := [path for path, digest in before.items() if after.get(path) != digest]:
            raise Wrong(f"a start that was refused changed files of the run directory: {changed}")
    scene.finish()
    return sentences


@kind("store copied", ends="sentence", alone=ALONE)
def copied(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    """Go on with a copy of the store, after a start with only one of its directories was refused.
    The original must be refused later, because it is behind. Returns the trainer's errors.
    """
    scene.finish(steps=_steps(fault))
    copies = _copied(scene)
    before = contents(scene.dirs)
    single = copies[fault.choice % 2]
    if fault.prompt:  # also name a second directory, which does not exist
        scene.start(
            dirs=[single if path == single else scene.home / f"{path.name}-new" for path in copies]
        )
    else:
        scene.start(dirs=[single])
    sentences = refused(scene, "GoneError|ForeignError|DamagedError|ConfigError")
    if contents(scene.dirs) != before:
        raise Wrong("training on a copy changed the original")
    scene.finish(dirs=copies)
    if contents(scene.dirs) != before:
        raise Wrong("training on a copy changed the original")
    scene.start()
    sentences += refused(scene, "StaleError")
    scene.dirs = copies
    scene.finish()
    return sentences


@kind("histories mixed", ends="sentence", alone=ALONE)
def mixed(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    """Train a copy of the store to the same step with another learning rate. A start with one
    directory of the store and one of the copy must be refused. Returns the trainer's errors.
    """
    copies, _ = _trained_apart(scene, fault, 0)
    before = contents([*scene.dirs, *copies, scene.run])
    a, b = (copies[0], scene.dirs[1]) if fault.prompt else (scene.dirs[0], copies[1])
    scene.start(dirs=[b, a] if fault.choice % 2 else [a, b])
    sentences = refused(scene, "ForkedError")
    if contents([*scene.dirs, *copies, scene.run]) != before:
        raise Wrong("a start that was refused changed files")
    scene.finish()
    return sentences


@kind("store swapped", ends="sentence", alone=ALONE)
def swapped(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    """Replace the run's store by a copy that was trained in another run directory. The next start
    must be refused. Returns the trainer's errors.
    """
    ahead = fault.choice % 3 - 1
    copies, apart = _trained_apart(scene, fault, ahead)
    swaps = [(path, path.with_suffix(".own"), to) for path, to in zip(scene.dirs, copies)]
    for path, own, copy in swaps:
        path.rename(own)
        copy.rename(path)
    before = contents(scene.roots)
    scene.start()
    words = "ForkedError" if apart and ahead >= 0 else "ForkedError|StaleError"
    sentences = refused(scene, words)
    if contents(scene.roots) != before:
        raise Wrong("a start that was refused changed files")
    for path, own, copy in swaps:
        path.rename(copy)
        own.rename(path)
    scene.finish()
    return sentences


def _copied(scene: AloneScene) -> list[Path]:
    copies = [path.with_name(f"{path.name}-copy") for path in scene.dirs]
    for path, to in zip(scene.dirs, copies):
        shutil.copytree(path, to)
    return copies


def _trained_apart(scene: AloneScene, fault: Fault, ahead: int) -> tuple[list[Path], bool]:
    """Train the run, copy its store, and train both apart; the copy ends `ahead` steps after the
    run. Returns (directories of the copy, True if the copy was trained).
    """
    first = 1 + fault.choice % (STEPS - 3)
    last = first + 1 + fault.choice // 8 % (STEPS - 2 - first)
    scene.finish(steps=first)
    copies = _copied(scene)
    scene.finish(steps=last)
    log = scene.beside(copies, scene.home / "run2", steps=last + ahead, lr=2e-2)
    if log.errors:
        raise Wrong(f"a copy could not be trained: {log.errors}")
    return copies, last + ahead > first


@kind("second trainer", alone=ALONE)
def second(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    """Start a second trainer on the store of the first, which is paused at a sync. Returns the
    error of the second trainer.
    """
    # a quarter of all syncs create the store
    moment = fault.moment / 4 if fault.choice % 2 else fault.moment
    scene.start(Strike("sync", int(moment * reference.calls["sync"]), "pause"))
    scene.wait_paused()
    log = scene.beside(scene.dirs, scene.run if fault.prompt else scene.home / "run2")
    (scene.shadow / "go").touch()
    if not log.errors or log.steps:
        raise Wrong(f"a second trainer was not refused: {log}")
    scene.finished()
    return [log.errors[0]]


@kind("flipped bit", ends="any", alone=ALONE)
def flipped(scene: AloneScene, fault: Fault, reference: Reference) -> list[str]:
    """Flip a bit in a file of the store or of the run directory between two starts. Returns the
    trainer's errors.
    """
    rng = random.Random(fault.choice)
    scene.run_once(_first_strike(fault, reference), steps=_steps(fault) if fault.prompt else STEPS)
    there = [
        p for root in scene.roots for p in root.rglob("*") if p.name in FLIPPED and p.stat().st_size
    ]
    name = rng.choice(sorted({path.name for path in there}) or [""])
    if not name or not _trained(scene):
        scene.finish()
        raise NothingToStrike
    mend = flip_a_bit(scene, sorted(path for path in there if path.name == name), rng)
    sentences = scene.run_once()
    if sentences:
        mend()
        scene.finish()
    return sentences


def _first_strike(fault: Fault, reference: Reference) -> Strike:
    """Return a Strike that kills the trainer at `fault.moment` or, if `fault.prompt`, never
    acts.
    """
    number = int((0.6 + fault.moment * 0.4) * reference.calls["sync"])
    return Strike("sync", 1 << 30 if fault.prompt else number, "kill before")


def _trained(scene: AloneScene) -> bool:
    return any(committed > 0 for _, committed, _ in scene.logs()[0].steps.values())


def contents(roots: Sequence[Path]) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for root in roots
        for path in root.rglob("*")
        if path.is_file()
    }
