"""Item `start` of `launch`: from nothing to the first step on two Ray nodes, by part; beside it how
long torchrun's own start takes for two processes that only meet."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.launch_bench import Bench, row
from benchmarks.launch_ray import on_ray, ray_scene
from benchmarks.report import Row
from roadtrain.launch.home import PHASES

MOST_S = 60.0
MEET = (
    "import torch.distributed as dist; dist.init_process_group('gloo');"
    "dist.barrier(); dist.destroy_process_group()"
)


def rows(bench: Bench) -> Iterator[Row]:
    case = "from nothing to the first step on two Ray nodes"
    then = time.perf_counter()
    with on_ray(bench.home / "nodes") as address:
        yield row(case, "the Ray cluster itself", "s", time.perf_counter() - then)
        more = ("--ray-address", address)
        with bench.launched(ray_scene(), "start", 3, "ray", *more) as run:
            run.wait(lambda: "stepped" in run.state().stamps, "its first step told", MOST_S)
            stamps = run.state().stamps
    for before, after in itertools.pairwise(phase for phase in PHASES if phase in stamps):
        yield row(case, f"{before} to {after}", "s", stamps[after] - stamps[before])
    whole = stamps[PHASES[-1]] - stamps[PHASES[0]]
    beside = ("torchrun, two processes that meet", torchrun_s())
    yield row(case, "whole", "s", whole, f"< {MOST_S:.0f} s", whole < MOST_S, beside=beside)


def torchrun_s() -> float:
    """Of two processes on this host, which import torch, meet and end."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    then = time.perf_counter()
    subprocess.run(
        [*words, "--no-python", sys.executable, "-c", MEET],
        check=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return time.perf_counter() - then
