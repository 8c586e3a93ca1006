"""`roadtrain soak --sums`: scripted faults of spare hosts, while workers compute sums without
pause. All workers and hosts are real processes.

A scene has two to four workers and two spare hosts (`roadtrain serve --sum`), and ten faults happen
in it, one after another. In each round, the workers sum several tensors and check the sums. A fault
is over when all workers have done five more rounds. A round that takes more than five seconds is a
failure. Fault K of a seed is always the same fault. Does NOT kill workers.

    python -m benchmarks.soak.sums HOME RANK WORKERS [ADDRESS TOKEN_FILE]    (one worker)
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import machine
from benchmarks.sums.pending_sums import PendingSums
from roadtrain.errors import PeerError, RoadtrainError
from roadtrain.servers import frames as m
from roadtrain.servers import health
from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.sums.sums import SumSetup, connect
from roadtrain.transport.address import address_of, token_of
from roadtrain.transport.tcp import TcpOptions

FAULTS_A_SCENE, ROUNDS_ON, GAP_S, HARD_S = 10, 5, 5.0, 60.0
SIZES = {1: 300_000, 2: 50_001, 3: 10}  # tensor -> elements; tensor 0 carries the stop flag
KINDS = (
    "killed",
    "added",
    "slowed",
    "killed and back",
    "stopped",
    "not wanted",
    "killed with another",
    "all killed",
    "added and killed at once",
    "killed",
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault. `how`: "went on", "failed" or "hung". `gap_s`: seconds of the longest
    round around the fault.
    """

    number: int
    kind: str
    workers: int
    how: str
    gap_s: float
    seconds: float
    why: str = ""


# a worker process


def worker(
    home: Path, rank: int, workers: int, address: str = "127.0.0.1", token: str | None = None
) -> None:
    numbers = iter(range(1 << 30))

    def exchange(words: bytes) -> list[bytes]:
        number = next(numbers)
        (home / f"tell {number} {rank}.part").write_bytes(words)
        (home / f"tell {number} {rank}.part").rename(home / f"tell {number} {rank}")
        paths = [home / f"tell {number} {other}" for other in range(workers)]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        return [path.read_bytes() for path in paths]

    connected = connect(
        SpareHosts(str(home / "spares"), None, token_of(token)),
        SumSetup(rank, workers, False, "sum", address, 1 << 28, HARD_S),
        exchange,
    )
    pending = PendingSums(connected.near)
    pattern = {key: np.arange(size, dtype=np.float32) % 97 for key, size in SIZES.items()}
    grads, outs = (
        {key: np.zeros(size, np.float32) for key, size in {0: 1, **SIZES}.items()} for _ in range(2)
    )
    number = 0
    with open(home / f"rounds {rank}", "w") as log:
        while not outs[0][0]:
            grads[0][0] = rank == 0 and (home / "stop").exists()
            for key, base in pattern.items():
                np.add(base * (rank + 1), number % 13, out=grads[key])
            for key in grads:
                pending.sum(
                    key, m.as_bytes(grads[key]), outs[key].view(np.uint8).data, "fp32", priority=key
                )
            pending.wait()
            for key, base in pattern.items():  # small integers, so the sums are exact
                expected = base * (workers * (workers + 1) // 2) + workers * (number % 13)
                if not np.array_equal(outs[key], expected):
                    raise RoadtrainError(
                        f"round {number}: worker {rank} received a wrong sum of tensor {key}"
                    )
            number += 1
            print(number, time.monotonic(), file=log, flush=True)
    connected.ends.close()


# the other processes


class Spare:
    """A running process of a spare host."""

    def __init__(self, port: int = 0) -> None:
        words = ("serve", f"127.0.0.1:{port}", "--sum", "--budget", "64MiB")
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "roadtrain.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"summing at (\S+),", line)
        if found is None:
            self.end()
            raise RoadtrainError(f"a spare host printed an unexpected first line: {line!r}")
        self.address = found[1]
        self._reader = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._reader.start()

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if hasattr(self, "_reader"):
            self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Scene:
    """Workers, spare hosts, and a file with the addresses of the spare hosts."""

    def __init__(self, workers: int, rng: random.Random, stack: ExitStack) -> None:
        self.workers, self.rng, self._stack = workers, rng, stack
        self.home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roadtrain-soak-")))
        self.spares: list[Spare] = []
        self.paused_s = 0.0  # time for which a process was stopped
        for _ in range(2):
            self.add()
        self.processes = []
        for rank in range(workers):
            own = [str(self.home), str(rank), str(workers)]
            words = [sys.executable, "-m", "benchmarks.soak.sums", *own]
            with open(self.home / f"worker {rank}", "w") as log:
                process = subprocess.Popen(words, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.processes.append(process)
        self.further(1, 0.0)

    def add(self, port: int = 0) -> Spare:
        spare = Spare(port)
        self._stack.callback(spare.end)
        self.spares.append(spare)
        self.write()
        return spare

    def drop(self, spare: Spare) -> None:
        self.spares.remove(spare)
        self.write()

    def write(self) -> None:
        (self.home / "new").write_text("".join(f"{spare.address}\n" for spare in self.spares))
        (self.home / "new").rename(self.home / "spares")

    def pick(self) -> Spare:
        return self.rng.choice(self.spares)

    def pause(self, spare: Spare, seconds: float) -> None:
        spare.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        spare.process.send_signal(signal.SIGCONT)
        self.paused_s += seconds

    def rounds(self) -> list[list[tuple[int, float]]]:
        """Return for each worker a list with (number of rounds done, monotonic time) for each
        round.
        """
        out = []
        for rank in range(self.workers):
            path = self.home / f"rounds {rank}"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            pairs = [line.split() for line in lines if line.endswith("\n")]
            out.append([(int(number), float(at)) for number, at in pairs])
        return out

    def further(self, rounds: int, since: float) -> None:
        """Wait until all workers have done `rounds` rounds since the time `since`. Raises
        TimeoutError after 60 seconds, and RoadtrainError if a worker has ended.
        """

        def done() -> bool:
            return all(sum(at > since for _, at in worker) >= rounds for worker in self.rounds())

        self._wait(done, f"workers did not finish {rounds} more rounds")

    def used(self, spare: Spare) -> None:
        def sums() -> bool:
            answer = health.ask(address_of(spare.address), TcpOptions())
            return not isinstance(answer, PeerError) and answer[0].startswith("sums for 1")

        self._wait(sums, f"no worker used the new spare host {spare.address}", 0.1)

    def _wait(self, until: Callable[[], bool], why: str, pause_s: float = 0.02) -> None:
        deadline = time.monotonic() + HARD_S
        while not until():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{why} within {HARD_S:.0f} s; last (round, time) of each worker:"
                    f" {[worker[-1:] for worker in self.rounds()]}"
                )
            time.sleep(pause_s)

    def check(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                words = (self.home / f"worker {rank}").read_text().splitlines()
                raise RoadtrainError(
                    f"worker {rank} ended with exit code {process.returncode};"
                    f" last line of its output: {words[-1] if words else ''}"
                )

    def finish(self) -> None:
        (self.home / "stop").touch()
        for process in self.processes:
            if process.wait(HARD_S):
                self.check()


def strike(scene: Scene, kind: str) -> None:
    """Inject a fault, and wait until the workers use the spare host that it adds, if any."""
    if kind == "added" or not scene.spares:
        scene.used(scene.add())
    elif kind == "slowed":
        spare = scene.pick()
        for _ in range(8):  # half of the time
            scene.pause(spare, 0.1)
            time.sleep(0.1)
    elif kind == "stopped":
        scene.pause(scene.pick(), scene.rng.uniform(0.5, 2.0))
    elif kind == "not wanted":
        scene.drop(scene.pick())
    elif kind == "added and killed at once":
        spare = scene.add()
        time.sleep(scene.rng.uniform(0.0, 2.0))
        spare.kill()
        scene.drop(spare)
    else:
        chosen = {
            "all killed": scene.spares,
            "killed with another": (
                scene.rng.sample(scene.spares, 2) if len(scene.spares) > 1 else scene.spares
            ),
        }.get(kind) or [scene.pick()]
        for spare in [*chosen]:
            spare.kill()
        back = kind == "killed and back"
        for spare in [*chosen]:
            scene.drop(spare)
            if back:
                spare.end()
                scene.used(scene.add(address_of(spare.address)[1]))


def play(first: int, count: int, seed: int, say: Callable[[str], None]) -> list[Outcome]:
    """Run one scene with `count` faults, numbered from `first`, and return their outcomes."""
    out: list[Outcome] = []
    rng = random.Random(f"{seed}/{first}")
    workers = 2 + first // FAULTS_A_SCENE % 3
    kinds = [KINDS[(first + i) % len(KINDS)] for i in range(count)]
    rng.shuffle(kinds)
    with ExitStack() as stack:
        scene = Scene(workers, rng, stack)
        for i, kind in enumerate(kinds):
            begin, scene.paused_s, how, why = time.monotonic(), 0.0, "went on", ""
            try:
                while len(scene.spares) < 2 and kind != "added":
                    scene.used(scene.add())
                time.sleep(rng.uniform(0.0, 0.3))
                begin = time.monotonic()
                strike(scene, kind)
                scene.further(ROUNDS_ON, time.monotonic())
            except (RoadtrainError, TimeoutError) as error:
                how, why = "hung" if isinstance(error, TimeoutError) else "failed", str(error)
            gap = max(
                (
                    b - a
                    for done in scene.rounds()
                    for (_, a), (_, b) in pairwise(done)
                    if b > begin
                ),
                default=0.0,
            )
            if not why and gap > GAP_S + scene.paused_s:
                how, why = "failed", f"a round took {gap:.1f} s"
            out.append(Outcome(first + i, kind, workers, how, gap, time.monotonic() - begin, why))
            say(f"{first + i}: {kind}, {workers} workers: {how}, longest round {gap:.2f} s {why}")
            if how != "went on":
                return out
        scene.finish()
    return out


def soak(count: int, seed: int, say: Callable[[str], None] = print) -> list[Outcome]:
    return [
        end
        for first in range(0, count, FAULTS_A_SCENE)
        for end in play(first, min(FAULTS_A_SCENE, count - first), seed, say)
    ]


def command(count: int, seed: int, json: str | None) -> int:
    ends = soak(count, seed)
    gaps = sorted(end.gap_s for end in ends if end.kind not in ("slowed", "stopped"))
    print(
        f"{len(ends)} of {count} faults, {sum(end.how == 'went on' for end in ends)} went on,"
        f" {sum(end.how == 'hung' for end in ends)} hung; longest round, but for stopped hosts:"
        f" {gaps[-1]:.2f} s"
    )
    if json is not None:
        body: dict[str, Any] = {
            "soak": "sums",
            "seed": seed,
            "date": f"{date.today():%Y-%m-%d}",
            "machine": machine(),
            "faults": [asdict(end) for end in ends],
        }
        Path(json).write_text(dumps(body, indent=1) + "\n")
    return int(len(ends) < count or any(end.how != "went on" for end in ends))


def main(argv: Sequence[str]) -> None:
    try:
        worker(Path(argv[0]), int(argv[1]), int(argv[2]), *argv[3:])
    except RoadtrainError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # links may still be open


if __name__ == "__main__":
    main(sys.argv[1:])
