"""Measure how fast this machine's processors compute a job of `launch` while several hosts compute
at once. The results are the seconds of a micro-batch's forward and backward, and the rates of
optimizer updates and of sums.

    python -m benchmarks.launch.speed JOB.toml SECONDS SAMPLES    (one host: prints a line of JSON)

Each process has one thread, as the workers have. Does NOT communicate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from roadtrain.config.job import load_job
from roadtrain.planner.model_config import shape_of_config
from roadtrain.planner.probe import processors
from roadtrain.stages.stage_model import MicroBatch
from roadtrain.training.build import build_config, build_model
from roadtrain.training.staged_job import loss_of

SECONDS = 4.0
LIMIT_S = 240.0
BEGIN = "begin"


@dataclass(frozen=True)
class Speed:
    """Speed of one host while several hosts compute at once. `flops`: FLOPs of the model in a
    second.
    """

    hosts: int
    flops: float
    pass_s: float  # forward and backward of a micro-batch
    updates: float  # bytes/s, as in the cluster file
    sums: float
    memory_rate: float


def speed(job: Path, hosts: int, samples: int) -> Speed:
    """Measure the speed of a host while `hosts` processes compute at once. `samples`: samples in a
    micro-batch. Raises RuntimeError if a process fails.
    """
    words = [sys.executable, "-m", "benchmarks.launch.speed", str(job), str(SECONDS), str(samples)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(hosts)
    ]
    try:
        for process in processes:  # until all have imported torch and built the model
            assert process.stdout is not None
            if process.stdout.readline().strip() != BEGIN:
                raise RuntimeError(
                    f"a process that measures the speed of {job} ended before the measurement"
                )
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    pass_s = median(result["pass_s"] for result in found)
    tree = load_job(job)
    config: Any = build_config(tree)
    if "vocab_size" not in tree.model.config:
        config.vocab_size = 256
    shape = shape_of_config(config.to_dict(), seq_len=tree.data.seq_len)
    flops = shape.step_flops(False) * samples / pass_s
    rates = {name: rate / hosts for name, rate in together().items()}
    return Speed(hosts, flops, pass_s, rates["updates"], rates["sums"], rates["memory_rate"])


@cache
def together() -> dict[str, float]:
    """Measure the rates of updates, sums and memory accesses (bytes/s) when all processors of this
    machine work at once.
    """
    return processors(len(os.sched_getaffinity(0)))


def main(job_file: str, seconds: str, samples: str) -> None:
    torch.set_num_threads(1)
    job = load_job(job_file)
    if "vocab_size" not in job.model.config:
        job = job.changed({"model.config.vocab_size": 256})
    model = build_model(job, "cpu")
    tokens = torch.randint(256, (int(samples), job.data.seq_len + 1))
    inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
    batch = MicroBatch((), inputs, tokens[:, 1:])

    def compute() -> float:
        then = time.perf_counter()
        loss_of(model(**inputs), batch).backward()
        return time.perf_counter() - then

    compute()
    print(BEGIN, flush=True)
    sys.stdin.readline()
    until = time.perf_counter() + float(seconds)
    took = [compute()]
    while time.perf_counter() < until:
        took.append(compute())
    print(json.dumps({"pass_s": median(took)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
