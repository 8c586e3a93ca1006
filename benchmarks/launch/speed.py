"""Measure how fast this machine's processors compute a job of `launch` while several hosts compute
at once. The results are the seconds of a micro-batch's forward and backward, and the rates of
optimizer updates and of sums.

Each process has one thread, as the workers have. Does NOT communicate.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from threading import Barrier
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
    micro-batch.
    """
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, ProcessPoolExecutor(hosts, spawn) as pool:
        barrier = manager.Barrier(hosts, timeout=LIMIT_S)
        tasks = [pool.submit(seconds_of_a_pass, job, samples, barrier) for _ in range(hosts)]
        pass_s = median(task.result() for task in tasks)
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


def seconds_of_a_pass(job_file: Path, samples: int, barrier: Barrier) -> float:
    """Compute for some seconds, beginning together with the other processes at the barrier."""
    torch.set_num_threads(1)
    job = load_job(job_file)
    if "vocab_size" not in job.model.config:
        job = job.changed({"model.config.vocab_size": 256})
    model = build_model(job, "cpu")
    tokens = torch.randint(256, (samples, job.data.seq_len + 1))
    inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
    batch = MicroBatch((), inputs, tokens[:, 1:])

    def compute() -> float:
        then = time.perf_counter()
        loss_of(model(**inputs), batch).backward()
        return time.perf_counter() - then

    compute()
    barrier.wait()
    until = time.perf_counter() + SECONDS
    took = [compute()]
    while time.perf_counter() < until:
        took.append(compute())
    return median(took)
