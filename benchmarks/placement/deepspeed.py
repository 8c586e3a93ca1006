"""Train a Llama of 420 M parameters with its state on disk, and compare roadtrain with DeepSpeed's
NVMe offload. Both run on this machine's disk and on an emulated disk of 500 MB/s. Plain torch gives
the reference losses.

The step time of a run is the mean over all steps after the first two. The measured time begins when
the store is idle, and ends when every write of the last step is durable. Peak memory is the peak of
the resident memory of the process and its children, including pinned and shared pages. Needs the
extras `bench` and `hf`, a C++ compiler and libaio's headers. The emulated disk needs root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import psutil

from benchmarks.common.model420 import WARM_UP
from benchmarks.common.report import Report, Row
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab import LoopDevice, Throttle, lab_available

RATE = 500e6  # of the emulated device, bytes/s in each direction
IMAGE_BYTES = 14 * 10**9  # two slots of 14 bytes a parameter, and the file system's own
FLOOR_BYTES = 12 * 419.5e6  # bytes read, and bytes written, a step: fp32 master and two moments
SAME_LOSS = 1e-3  # nats; rounding alone moves a loss by about 1e-5
OURS, PEER, PLAIN = ("model420", "--ours"), ("deepspeed_peer",), ("model420", "--plain")


@dataclass(frozen=True)
class Run:
    """Result of training in one process. `read_bytes` and `written_bytes`: bytes of one step.
    `losses`: the loss of every step.
    """

    step_s: float
    read_bytes: float
    written_bytes: float
    peak_bytes: int
    losses: tuple[float, ...]
    system: str


def run(quick: bool = False) -> Report:
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "DeepSpeed is not installed",
            hint='pip install -e ".[bench,hf]"; apt-get install libaio-dev',
        )
    steps, reps = (4, 1) if quick else (8, 3)
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        train(("deepspeed_peer", "--build"), folder, steps)
        plain = train(PLAIN, folder, steps)
        here = alternate(folder / "this", steps, reps, folder)
        rows = compare("this disk", here, goal=1.7, floor_s=None)
        if quick:
            why: str | None = "left out by --quick"
        elif (why := lab_available()) is None:
            with (
                LoopDevice(folder / "disk.img", IMAGE_BYTES) as disk,
                Throttle([disk], RATE, RATE) as limit,
            ):
                there = alternate(disk.mount / "run", steps, reps - 1, folder, limit)
            rows += compare("emulated 500/500 MB/s", there, goal=1.9, floor_s=FLOOR_BYTES / RATE)
    if why is not None:
        rows.append(
            Row(f"emulated 500/500 MB/s: {why}", "step time", "s", None, goal="ratio >= 1.9")
        )
    ours, peer = (max(distance(result, plain) for result in here[who]) for who in ("ours", "peer"))
    rows.append(
        Row(
            "losses",
            "largest difference from plain training",
            "nats",
            ours,
            peer=peer,
            peer_name=here["peer"][0].system,
            goal=f"ours <= {SAME_LOSS:g}",
            met=ours <= SAME_LOSS,
        )
    )
    return Report("deepspeed", rows)


def alternate(
    store: Path, steps: int, reps: int, folder: Path, limit: Throttle | None = None
) -> dict[str, list[Run]]:
    """Run roadtrain ("ours") and DeepSpeed ("peer") in turn, `reps` times each, and return the
    results of both. `store`: directory that is empty before each run and removed afterwards.
    `limit`: throttle of the disk, or None.
    """
    runs: dict[str, list[Run]] = {"peer": [], "ours": []}
    for rep in range(reps):
        for who, what in list({"peer": PEER, "ours": OURS}.items())[:: -1 if rep % 2 else 1]:
            with _emptied(store):
                runs[who].append(train((*what, "--dir", str(store)), folder, steps, limit))
    return runs


@contextlib.contextmanager
def _emptied(store: Path) -> Iterator[None]:
    store.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(store)


def compare(
    case: str, runs: dict[str, list[Run]], *, goal: float, floor_s: float | None
) -> list[Row]:
    ours, peer, name = runs["ours"], runs["peer"], runs["peer"][0].system
    step = median(r.step_s for r in ours), median(r.step_s for r in peer)
    peak = max(r.peak_bytes for r in ours), min(r.peak_bytes for r in peer)
    rows = [
        Row(
            case,
            "step time",
            "s",
            *step,
            name,
            step[1] / step[0],
            floor_s and floor_s / step[0],
            f"ratio >= {goal:g}",
            step[1] / step[0] >= goal,
        ),
        Row(
            case,
            "peak memory",
            "MB",
            peak[0] / 1e6,
            peer=peak[1] / 1e6,
            peer_name=name,
            ratio=peak[1] / peak[0],
            goal="ratio >= 3",
            met=peak[1] / peak[0] >= 3,
        ),
    ]
    for way in ("read", "written"):
        moved = [median(getattr(r, f"{way}_bytes") for r in runs_) for runs_ in (ours, peer)]
        rows.append(
            Row(
                case,
                f"{way} a step",
                "MB",
                moved[0] / 1e6,
                peer=moved[1] / 1e6,
                peer_name=name,
                ratio=moved[1] / moved[0],
            )
        )
    return rows


def distance(result: Run, plain: Run) -> float:
    return max(abs(a - b) for a, b in zip(result.losses, plain.losses, strict=True))


def train(what: tuple[str, ...], folder: Path, steps: int, limit: Throttle | None = None) -> Run:
    """Train in a child process, and return its result.

    Args:
        what: name of a module of this package, and its arguments
        folder: directory for the result and the log of the process
        limit: throttle of the disk, or None

    Raises:
        RoadtrainError: the process failed; the message ends with its last output
    """
    out, log = folder / "result.json", folder / "log.txt"
    out.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        f"benchmarks.{what[0]}",
        *what[1:],
        "--steps",
        str(steps),
        "--json",
        str(out),
    ]
    with (
        log.open("wb") as sink,
        subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT) as process,
    ):
        try:
            if limit is not None:
                limit.enter_process(process.pid)  # before the process opens its first file
            watch = _Watch(process.pid)
            process.wait()
        finally:
            process.kill()
    if process.returncode:
        raise RoadtrainError(
            f"{what[0]} ended with exit code {process.returncode}: "
            f"{log.read_text(errors='replace')[-2000:]}"
        )
    if not out.exists():  # `--build` only compiles
        return Run(0.0, 0.0, 0.0, 0, (), "")
    result = json.loads(out.read_text())
    kept = result["steps"][WARM_UP:] or [{}]
    each = {
        name: mean(step.get(name, 0.0) for step in kept)
        for name in ("step_s", "read_bytes", "written_bytes")
    }
    return Run(
        **each,
        peak_bytes=max(watch.ended(), result["peak_bytes"]),
        losses=tuple(result["losses"]),
        system=result["system"],
    )


class _Watch:
    """Samples the resident memory of a process and its children, and keeps the peak of the sum."""

    def __init__(self, pid: int) -> None:
        self._root, self._peak = psutil.Process(pid), 0
        self._thread = threading.Thread(target=self._sample, name="watch", daemon=True)
        self._over = threading.Event()
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(0.1):
            with contextlib.suppress(psutil.Error):
                family = [self._root, *self._root.children(recursive=True)]
                self._peak = max(self._peak, sum(process.memory_info().rss for process in family))

    def ended(self) -> int:
        self._over.set()
        self._thread.join()
        return self._peak
