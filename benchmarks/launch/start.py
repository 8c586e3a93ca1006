"""Item `start` of `launch`: the time from the launch command to the first step on two Ray nodes,
and the time of each phase of the start. The whole time is compared with that of torchrun for the
same job on this host.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from benchmarks.common.report import Row
from benchmarks.launch.bench import START_S, Bench, row
from benchmarks.launch.ray import on_nodes
from benchmarks.launch.run import RUN, FoundProcess, LaunchedRun
from benchmarks.launch.scene import RAY_NODES
from roadtrain.errors import DeadlineError
from roadtrain.launch.home import StartPhase
from roadtrain.training.metrics import read_metrics

MOST_S = 60.0
STEPS = 1000  # the run is stopped after the first few
SUPERVISOR, WORKER = "supervisor's process", "worker's process"
RAY, PYTHON, OURS = "Ray's", "Python's", "ours"
# end of each part -> (responsible software, description)
PARTS: Mapping[str, tuple[str, str]] = {
    SUPERVISOR: (RAY, "the command's connection and the supervisor's actor"),
    StartPhase.READY: (RAY, "the supervisor's imports and connection"),
    StartPhase.CHECKED: (OURS, "checks on both hosts"),
    StartPhase.WORKERS: (OURS, "files and words of the workers"),
    StartPhase.PLACED: (RAY, "its trainer: places, two processes and their imports"),
    WORKER: (OURS, "the agent that holds worker 0"),
    StartPhase.IMPORTED: (PYTHON, "worker 0 and its imports"),
    StartPhase.JOINED: (OURS, "text, model, the workers meet"),
    StartPhase.STEPPED: (OURS, "the first step"),
}


def rows(bench: Bench) -> Iterator[Row]:
    case = "from nothing to the first step on two Ray nodes"
    home = bench.home / "start"
    RAY_NODES.write(home, STEPS, "files")
    then = time.time()
    with on_nodes("", "") as nodes:
        cluster_s = time.time() - then
        with LaunchedRun("bench-start", "ray", home, "--ray-address", nodes.address) as run:
            run.plan("--placements", RAY_NODES.placements, "--constants", "measured")
            began = run.start()
            run.wait(
                lambda: StartPhase.STEPPED in run.state().stamps,
                "the report of its first step",
                START_S,
            )
            ends: dict[str, float] = {**run.state().stamps}
            ends[SUPERVISOR] = min(map(_began, run.supervisors()))
            ends[WORKER] = _began(run.workers()[0])
            # the supervisor is notified later
            ends[StartPhase.PLACED] = min(ends[StartPhase.PLACED], ends[WORKER])
            run.stop()
            job = (home / RUN / "launch" / "job.toml").read_text()
    yield row(case, f"{RAY}: the cluster of two nodes", "s", cluster_s)
    of, last = {RAY: cluster_s, PYTHON: 0.0, OURS: 0.0}, began
    for end, (whose, what) in PARTS.items():
        yield row(case, f"{whose}: {what}", "s", ends[end] - last)
        of[whose] += ends[end] - last
        last = ends[end]
    for whose, seconds in of.items():
        yield row(case, f"all that is {whose}", "s", seconds)
    whole = cluster_s + last - began
    beside = ("torchrun", torchrun_s(job, home))
    yield row(case, "whole", "s", whole, f"< {MOST_S:.0f} s", whole < MOST_S, beside=beside)


def _began(process: FoundProcess) -> float:
    return psutil.Process(process.pid).create_time()


def torchrun_s(job: str, home: Path) -> float:
    """Measure the seconds from the torchrun command to the first step of a job with two workers.

    Args:
        job: content of the job file for a run in `home`/bench-launch

    Raises:
        DeadlineError: no step was done within 240 seconds
    """
    directory = home / "torchrun"
    directory.mkdir()
    (home / "torchrun.toml").write_text(job.replace(f'"{home / RUN}"', f'"{directory}"'))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    then = time.monotonic()
    process = subprocess.Popen(
        [*words, "-m", "roadtrain.cli", "train", str(home / "torchrun.toml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        while not read_metrics(directory / "metrics.jsonl"):
            if process.poll() is not None or time.monotonic() > then + START_S:
                raise DeadlineError(
                    f"the job of torchrun did no step within {START_S:.0f} s, or it has ended"
                )
            time.sleep(0.05)
        return time.monotonic() - then
    finally:
        process.terminate()  # which ends its workers
        process.wait(START_S)
