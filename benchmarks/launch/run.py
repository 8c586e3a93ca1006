"""A run of `launch`, controlled by the commands of a user (`roadtrain plan`, `roadtrain launch`)
and observed through its files. Does NOT compare results with goals.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from roadtrain.errors import DeadlineError, RoadtrainError
from roadtrain.launch.descendants import MARK
from roadtrain.launch.home import RunHome, RunState
from roadtrain.launch.lab_engine import kept_memory
from roadtrain.training.metrics import read_metrics

CLI = (sys.executable, "-m", "roadtrain.cli")
# directory of a run in its home; its name is part of the names of the run's stores in memory
RUN = "bench-launch"
COMMAND_S = 300.0  # limit of a command that a user waits for
TURN_S = 0.1
MOST_RANKS = 8  # ranks of any scene
FIRST_STEPS = 4  # steps after a start that are not steady yet
SUPERVISES = frozenset({"roadtrain.launch.supervise", "roadtrain.launch.standby_main"})


def command(
    *words: str,
    within_s: float = COMMAND_S,
    ok: Sequence[int] = (0,),
    inside: Sequence[str] = (),
) -> str:
    """Run `roadtrain WORDS` and return its output.

    Args:
        inside: words to put before the command, so that the command runs on a host of a lab
        within_s: time limit in seconds
        ok: exit codes that are no error

    Raises:
        RoadtrainError: the exit code is not in `ok`
    """
    done = subprocess.run(
        [*inside, *CLI, *words], capture_output=True, text=True, timeout=within_s, check=False
    )
    if done.returncode not in ok:
        raise RoadtrainError(
            f"`roadtrain {' '.join(words)}` ended with exit code {done.returncode}:"
            f" {(done.stderr or done.stdout)[-1500:]}"
        )
    return done.stdout + done.stderr


@dataclass(frozen=True)
class FoundProcess:
    """A process that runs on this machine: its id, command line and environment."""

    pid: int
    words: tuple[str, ...]
    environment: dict[str, str]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def processes(of: Callable[[FoundProcess], bool]) -> Iterator[FoundProcess]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            words = tuple((entry / "cmdline").read_bytes().decode().split("\0")[:-1])
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(pair.partition("=")[::2] for pair in pairs if pair)
            process = FoundProcess(int(entry.name), words, environment)
            if of(process):
                yield process


class LaunchedRun:
    """A run, used as a context manager: at the end of the `with` block, all its processes are
    killed. `home` has cluster.toml and job.toml, and the run trains in
    `home`/bench-launch.

    Args:
        on: engine that runs the processes, as in `launch --on`
        more: further arguments of `launch`
        inside: words to put before a launch command, so that the command runs on a host of a lab
    """

    def __init__(
        self, name: str, on: str, home: Path, *more: str, inside: Sequence[str] = ()
    ) -> None:
        self.name, self.on, self.home, self.more = name, on, home, more
        self.inside = inside
        self.run_home = RunHome.of(name)
        self.launcher: subprocess.Popen[bytes] | None = None  # the launcher that follows the run

    # commands

    def plan(self, *more: str) -> str:
        """Run `roadtrain plan`, which reads cluster.toml and job.toml and writes plan.toml."""
        files = [str(self.home / name) for name in ("cluster.toml", "job.toml", "plan.toml")]
        return command("plan", files[0], "--job", files[1], "--out", files[2], *more)

    def start(self) -> float:
        """Start the run with `launch --detach`. Returns the time at which this command began, in
        seconds since the epoch.
        """
        then = time.time()
        command(*self._words(), "--detach", inside=self.inside)
        return then

    def follow(self, *words: str) -> None:
        """Start `roadtrain WORDS`, by default `roadtrain launch`, as a launcher attached to the
        run, and wait until the run has begun. Raises RoadtrainError if the run does not begin.
        """
        self._let_go()
        self.launcher = subprocess.Popen(
            [*CLI, *(words or self._words())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + COMMAND_S
        while not self.run_home.is_supervised():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise RoadtrainError(
                    f"run {self.name} did not start within {COMMAND_S:.0f} s, or its launcher has"
                    " ended"
                )
            time.sleep(TURN_S)

    def _words(self) -> list[str]:
        files = [str(self.home / name) for name in ("plan.toml", "job.toml")]
        return ["launch", *files, "--on", self.on, "--name", self.name, *self.more]

    def _let_go(self) -> None:
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
            self.launcher = None

    def stop(self) -> None:
        command("launch", "--stop", self.name, ok=(0, 130, 1, 2), inside=self.inside)

    def resume(self) -> None:
        command("launch", "--resume", self.name, "--detach", inside=self.inside)

    def __enter__(self) -> LaunchedRun:
        if not self.run_home.is_supervised():
            shutil.rmtree(self.run_home.path, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.run_home.is_supervised():
            with contextlib.suppress(RoadtrainError, subprocess.TimeoutExpired):
                self.stop()
        self._let_go()
        for process in processes(self._mine):
            process.kill()
        shutil.rmtree(kept_memory(f"roadtrain:{self.run_home.path}"), ignore_errors=True)

    # its output

    def state(self) -> RunState:
        return self.run_home.state()

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        """Read the lines of a rank's metrics."""
        return read_metrics(self._metrics(rank))

    def _metrics(self, rank: int) -> Path:
        return self.home / RUN / (f"metrics.{rank}.jsonl" if rank else "metrics.jsonl")

    def all_lines(self, rank: int) -> dict[int, dict[str, Any]]:
        """Map each step to its line in the metrics of a rank, including the lines before an absence
        of the rank.
        """
        last, number, found = self._metrics(rank), 1, dict[int, dict[str, Any]]()
        while (before := last.with_name(f"{last.stem}.before-{number}.jsonl")).exists():
            found |= {int(line["step"]): line for line in read_metrics(before)}
            number += 1
        return found | {int(line["step"]): line for line in self.lines(rank)}

    @property
    def step(self) -> int:
        lines = self.lines()
        return int(lines[-1]["step"]) if lines else 0

    def losses(self) -> dict[int, float]:
        """Map each step to the mean loss over the ranks that trained in the step.

        Lines that were written before a step was repeated with fewer ranks are ignored. With
        servers, only worker 0's line counts, because it covers the tokens of all workers.
        """
        of_rank = [self.all_lines(rank) for rank in range(MOST_RANKS)]
        steps = sorted(of_rank[0])
        whole = sum(int(lines[steps[0]]["tokens"]) for lines in of_rank if steps[0] in lines)
        out: dict[int, float] = {}
        for step in steps:
            losses, tokens = list[float](), 0
            rank_lines = [lines[step] for lines in of_rank if step in lines]
            if any(line["tokens"] < rank_lines[0]["tokens"] for line in rank_lines):
                out[step] = float(rank_lines[0]["loss"])
                continue
            for line in rank_lines:
                if tokens < whole:
                    losses.append(float(line["loss"]))
                    tokens += int(line["tokens"])
            out[step] = fmean(losses)
        return out

    def step_s(self, after: int, until: int | None = None) -> float:
        """Compute the median seconds of the steps after step `after`, up to step `until`, without
        the first four steps.
        """
        took = [
            float(line["seconds"])
            for line in self.lines()
            if line["step"] > after + FIRST_STEPS and (until is None or line["step"] <= until)
        ]
        return median(took)

    def log(self) -> str:
        return self.run_home.all_log.read_text(errors="replace")

    def wait_step(self, step: int, within_s: float) -> float:
        """Wait until the step is done, and return the seconds waited. Raises DeadlineError after
        `within_s` seconds, or RoadtrainError if the run ends before.
        """
        return self.wait(lambda: self.step >= step, f"step {step}", within_s)

    def wait_log(self, text: str, offset: int, within_s: float) -> None:
        """Wait until the run's log contains `text` at character `offset` or later."""

        def there() -> bool:
            return self.run_home.all_log.exists() and text in self.log()[offset:]

        self.wait(there, f"the line {text!r}", within_s)

    def wait_end(self, within_s: float) -> int:
        """Wait until the run has ended, and return its exit code."""
        self.wait(lambda: self.state().phase == "ended", "its end", within_s, ended=True)
        return self.state().code

    def wait(
        self, until: Callable[[], bool], what: str, within_s: float, ended: bool = False
    ) -> float:
        then = time.monotonic()
        while not until():
            state = self.state()
            if state.phase == "ended" and not ended and not until():
                raise RoadtrainError(
                    f"run {self.name} ended with exit code {state.code} before {what}:"
                    f" {state.why}\n" + self.log()[-2000:]
                )
            if time.monotonic() > then + within_s:
                raise DeadlineError(
                    f"run {self.name} (step {self.step}, {state.phase}) has not reached {what}"
                    f" within {within_s:.0f} s\n" + self.log()[-2000:]
                )
            time.sleep(TURN_S)
        return time.monotonic() - then

    # its processes

    def _mine(self, process: FoundProcess) -> bool:
        home = str(self.run_home.path)
        mark = process.environment.get(MARK, "")
        return mark.startswith((f"roadtrain:{home}/", f"roadtrain:{self.name}/")) or (
            home in process.words and bool(SUPERVISES & {*process.words})
        )

    def workers(self) -> list[FoundProcess]:
        """Find the worker processes, sorted by rank."""
        found = [
            process
            for process in processes(self._started)
            if "train" in process.words and "RANK" in process.environment
        ]
        return sorted(found, key=lambda process: int(process.environment["RANK"]))

    def services(self, what: str) -> list[FoundProcess]:
        """Find the server processes that have the option `what`: --store, --sum or --switch."""
        return [p for p in processes(self._started) if "serve" in p.words and what in p.words]

    def agents(self) -> list[FoundProcess]:
        return [p for p in processes(self._mine) if "roadtrain.launch.agent" in p.words]

    def held(self) -> list[FoundProcess]:
        """Find the supervisor and all processes that an agent has started."""
        return [
            process
            for process in processes(lambda found: self._started(found) or self._mine(found))
            if "roadtrain.launch.agent" not in process.words
        ]

    def supervisors(self) -> list[FoundProcess]:
        return [p for p in processes(self._mine) if "roadtrain.launch.supervise" in p.words]

    def _started(self, process: FoundProcess) -> bool:
        """Check that the engine of this run started the process."""
        directory = str(self.home / RUN)
        return "roadtrain.cli" in process.words and any(directory in word for word in process.words)
