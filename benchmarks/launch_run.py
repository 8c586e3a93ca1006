"""LaunchedRun: a run of `launch`, driven by the commands that a user types: `roadtrain plan`,
`roadtrain launch --detach`, `--stop`; watched by what it writes (state.json, metrics.jsonl,
all.log).

Processes of a run are found by their words and environment, to be killed. Does NOT judge anything.
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
from roadtrain.training.metrics import read_metrics

CLI = (sys.executable, "-m", "roadtrain.cli")
COMMAND_S = 300.0  # a command that a user waits for
TURN_S = 0.1
MOST_RANKS = 8  # of any scene
FIRST_STEPS = 4  # of a start, which are no steady ones
SUPERVISES = frozenset({"roadtrain.launch.supervise", "roadtrain.launch.standby_main"})


def command(
    *words: str,
    within_s: float = COMMAND_S,
    ok: Sequence[int] = (0,),
    inside: Sequence[str] = (),
) -> str:
    """What `roadtrain WORDS` says; inside: words that a command is typed with on a host of a lab.
    Raises RoadtrainError where it ends with another code."""
    done = subprocess.run(
        [*inside, *CLI, *words], capture_output=True, text=True, timeout=within_s, check=False
    )
    if done.returncode not in ok:
        raise RoadtrainError(
            f"roadtrain {' '.join(words)} ended with {done.returncode}:"
            f" {(done.stderr or done.stdout)[-1500:]}"
        )
    return done.stdout + done.stderr


@dataclass(frozen=True)
class FoundProcess:
    """One of this machine's."""

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
            told = dict(pair.partition("=")[::2] for pair in pairs if pair)
            one = FoundProcess(int(entry.name), words, told)
            if of(one):
                yield one


class LaunchedRun:
    """`home`: of the two files; the run trains in `home`/run. Inside the context it is alive; after
    it, nothing of it is. `inside`: as of `command`."""

    def __init__(
        self, name: str, on: str, home: Path, *more: str, inside: Sequence[str] = ()
    ) -> None:
        self.name, self.on, self.home, self.more = name, on, home, more
        self.inside = inside
        self.run_home = RunHome.of(name)
        self.launcher: subprocess.Popen[bytes] | None = None  # that follows the run

    # commands

    def plan(self, *more: str) -> str:
        """From cluster.toml and job.toml to plan.toml."""
        files = [str(self.home / name) for name in ("cluster.toml", "job.toml", "plan.toml")]
        return command("plan", files[0], "--job", files[1], "--out", files[2], *more)

    def start(self) -> float:
        """Seconds since the epoch at which the command was typed."""
        then = time.time()
        command(*self._words(), "--detach", inside=self.inside)
        return then

    def follow(self, *words: str) -> None:
        """As `start`, or `roadtrain WORDS`, by a launcher that stays. Returns when the run has
        begun. Raises RoadtrainError."""
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
                raise RoadtrainError(f"run {self.name} was not started: its launcher has ended")
            time.sleep(TURN_S)

    def _words(self) -> list[str]:
        files = [str(self.home / name) for name in ("plan.toml", "job.toml")]
        return ["launch", *files, "--on", self.on, "--name", self.name, *self.more]

    def _let_go(self) -> None:
        """The launcher that stays is killed."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
            self.launcher = None

    def stop(self) -> None:
        command("launch", "--stop", self.name, ok=(0, 130, 1, 2), inside=self.inside)

    def resume(self) -> None:
        command("launch", "--resume", self.name, "--detach", inside=self.inside)

    def __enter__(self) -> LaunchedRun:
        """A lab's stores are in the run's home: those of a benchmark before are another run's."""
        if not self.run_home.is_supervised():
            shutil.rmtree(self.run_home.path, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.run_home.is_supervised():
            with contextlib.suppress(RoadtrainError, subprocess.TimeoutExpired):
                self.stop()
        self._let_go()
        for one in processes(self._mine):
            one.kill()

    # what it shows

    def state(self) -> RunState:
        return self.run_home.state()

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        """Of the metrics of a rank."""
        return read_metrics(self._metrics(rank))

    def _metrics(self, rank: int) -> Path:
        return self.home / "run" / (f"metrics.{rank}.jsonl" if rank else "metrics.jsonl")

    def all_lines(self, rank: int) -> dict[int, dict[str, Any]]:
        """Step -> its line, also those of before the rank was away for some steps."""
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
        """Step -> the mean over its ranks: a data-parallel rank's line tells of its own
        micro-batches. Where fewer ranks ran, each has more of a step's tokens: lines that the
        others wrote of such a step before it was done again do not count. Worker 0 of servers
        tells of all workers, and so of more tokens than another one."""
        of_rank = [self.all_lines(rank) for rank in range(MOST_RANKS)]
        steps = sorted(of_rank[0])
        whole = sum(int(lines[steps[0]]["tokens"]) for lines in of_rank if steps[0] in lines)
        out: dict[int, float] = {}
        for step in steps:
            losses, tokens = list[float](), 0
            told = [lines[step] for lines in of_rank if step in lines]
            if any(line["tokens"] < told[0]["tokens"] for line in told):
                out[step] = float(told[0]["loss"])
                continue
            for line in told:
                if tokens < whole:
                    losses.append(float(line["loss"]))
                    tokens += int(line["tokens"])
            out[step] = fmean(losses)
        return out

    def step_s(self, after: int, until: int | None = None) -> float:
        """The median of steps behind `after`, the first ones left out."""
        took = [
            float(line["seconds"])
            for line in self.lines()
            if line["step"] > after + FIRST_STEPS and (until is None or line["step"] <= until)
        ]
        return median(took)

    def log(self) -> str:
        return self.run_home.all_log.read_text(errors="replace")

    def wait_step(self, step: int, within_s: float) -> float:
        """Seconds until it was done. Raises DeadlineError, or RoadtrainError where the run ended
        before."""

        def done() -> bool:
            return self.step >= step

        return self.wait(done, f"step {step}", within_s)

    def wait_log_step(self, offset: int, within_s: float) -> None:
        """Until worker 0 has said a step in what all.log has from `offset` on."""

        def said() -> bool:
            return self.run_home.all_log.exists() and "] step " in self.log()[offset:]

        self.wait(said, "a step", within_s)

    def wait_end(self, within_s: float) -> int:
        """The run's code."""
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
                    f"run {self.name} ended with {state.code} before {what}: {state.why}\n"
                    + self.log()[-2000:]
                )
            if time.monotonic() > then + within_s:
                raise DeadlineError(
                    f"run {self.name} (step {self.step}, {state.phase}) has not come to {what}"
                    f" within {within_s:.0f} s\n" + self.log()[-2000:]
                )
            time.sleep(TURN_S)
        return time.monotonic() - then

    # its processes

    def _mine(self, one: FoundProcess) -> bool:
        home = str(self.run_home.path)
        mark = one.environment.get(MARK, "")
        return mark.startswith((f"roadtrain:{home}/", f"roadtrain:{self.name}/")) or (
            home in one.words and bool(SUPERVISES & {*one.words})
        )

    def workers(self) -> list[FoundProcess]:
        """By rank."""
        found = [
            one
            for one in processes(self._started)
            if "train" in one.words and "RANK" in one.environment
        ]
        return sorted(found, key=lambda one: int(one.environment["RANK"]))

    def services(self, what: str) -> list[FoundProcess]:
        """what: a word that only these are started with: --store, --sum, --switch."""
        return [
            one for one in processes(self._started) if "serve" in one.words and what in one.words
        ]

    def agents(self) -> list[FoundProcess]:
        return [one for one in processes(self._mine) if "roadtrain.launch.agent" in one.words]

    def held(self) -> list[FoundProcess]:
        """All that an agent has started, and the supervisor."""
        return [
            one
            for one in processes(lambda one: self._started(one) or self._mine(one))
            if "roadtrain.launch.agent" not in one.words
        ]

    def supervisors(self) -> list[FoundProcess]:
        return [one for one in processes(self._mine) if "roadtrain.launch.supervise" in one.words]

    def _started(self, one: FoundProcess) -> bool:
        """By the run's engine, whichever it is: its processes name the run's directory."""
        directory = str(self.home / "run")
        return "roadtrain.cli" in one.words and any(directory in word for word in one.words)
