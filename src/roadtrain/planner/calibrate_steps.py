"""Run a few real steps of a job in this process and time them, for `roadtrain calibrate`.

The first 8 steps are not measured, because kernels are compiled and files grow in these steps. The
job's servers must be running. They report how much time they have spent on updates, reads and
writes.

    python -m roadtrain.planner.calibrate_steps JOB.toml THREADS STEPS OUT

This command writes the measurements of one worker (class Measured) to OUT as JSON.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import torch

from roadtrain.chunks import ITEMSIZE
from roadtrain.config.job import Job, load_job
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import ElementBytes, Framework, Plan, PlanMemory, placement
from roadtrain.errors import PeerError, RoadtrainError
from roadtrain.planner.model_config import shape_of_config
from roadtrain.servers import health
from roadtrain.servers.trace import Stages
from roadtrain.stages.parallelism import Parallelism
from roadtrain.training.job_options import RETRY_S, servers_of
from roadtrain.training.placed_job import PlacedJob, place_job, step

# number of steps that are not measured, in which kernels are compiled, files grow, and the store
# tries mixed and separate reads
WARM = 8


@dataclass(frozen=True)
class Measured:
    """The measurements of one worker. All times are in seconds, as medians over the measured
    steps."""

    step_s: float  # a step
    compute_s: float  # a step without waiting
    # Forward and Backward without waiting, and Wait; for stages of the servers, the mean over
    # servers and steps
    stages: dict[str, float]
    memory: int  # bytes of buffers
    plan: Plan  # the plan that ran
    shape: ModelShape  # the model that ran


def plan_of(training: PlacedJob) -> Plan:
    """Return a plan that describes the placed job, for a simulation."""
    job, optimizer = training.job, training.optimizer
    size = ITEMSIZE[job.model.dtype]
    servers = [] if job.servers.addresses else optimizer.session.servers.running
    chunks = [
        (server.chunks[number], state)
        for server in servers
        for number, state in server.machine.chunks.items()
    ]
    total = sum(chunk.numel for chunk, _ in chunks)
    kept = sum(chunk.numel for chunk, state in chunks if state.resident) / max(1, total)
    public = sum(chunk.numel for chunk, state in chunks if state.in_memory) / max(1, total)
    # bytes per parameter: moments, and masters if they are separate
    own = 8 + (4 if job.model.dtype != "fp32" or job.optimizer.delay else 0)
    name = "server" if job.servers.addresses else "files" if job.store.files else "zero-offload"
    return Plan(
        placement(name),
        Parallelism(dp=training.group.workers),
        micro_batch=job.data.batch_size,
        num_microbatches=job.optimizer.accumulate,
        activation_checkpointing=True,
        staleness=int(job.optimizer.delay or 0),
        keep=job.compress.keep,
        update_at="step" if job.optimizer.clip_norm is not None else "gradient",
        memory=PlanMemory(
            slots=len(optimizer.session.worker.buffers.slots),
            buffers=max(1, sum(server.machine.spec.buffers for server in servers)),
            resident=kept,
            public=public if chunks else 1,
            chunk=job.store.chunk_elements,
            pushes=len(optimizer.session.worker.buffers.gradients),
        ),
        sizes=ElementBytes(
            parameter_bytes=size, gradient_bytes=size, held_bytes=size, state_bytes=own + size
        ),
        framework=Framework(context_bytes=0),
    )


def measure(job: Job, steps: int) -> Measured:
    """Train a job for 8 steps without measuring, then measure `steps` steps. Raises
    RoadtrainError."""
    training = place_job(job, report=lambda _: None)
    waits: Stages = training.optimizer.session.stages
    lines: list[tuple[float, dict[str, Any]]] = []
    before: dict[str, float] = {}
    with training.optimizer:
        training.tokens.begun = True
        for number in range(WARM + steps):
            if number == WARM:
                before = served(job)
            then = time.perf_counter()
            step(training, number)
            lines.append((time.perf_counter() - then, training.stages.take() | waits.take()))
        after, plan = served(job), plan_of(training)
        memory = training.optimizer.memory()["resident"]
    lines = lines[WARM:]
    names = {name for _, stages in lines for name in stages}
    stages = {
        name: median(own[name].seconds if name in own else 0.0 for _, own in lines)
        for name in names
    }
    stages |= {name: (seconds - before.get(name, 0.0)) / steps for name, seconds in after.items()}
    compute = median(
        seconds - (own["Wait"].seconds if "Wait" in own else 0.0) for seconds, own in lines
    )
    config: Any = training.model.config
    shape = shape_of_config(config.to_dict(), seq_len=training.job.data.seq_len)
    return Measured(median(seconds for seconds, _ in lines), compute, stages, memory, plan, shape)


def served(job: Job) -> dict[str, float]:
    """Ask the job's servers how long they have worked since they started. Return the mean seconds
    per server for each kind of work, such as "Read". Raises PeerError."""
    if not job.servers.addresses:
        return {}
    servers = servers_of(job)
    reports = health.ask_all(servers.resolved, servers.options(RETRY_S))
    if lost := next((report for report in reports if isinstance(report, PeerError)), None):
        raise lost
    return {name: fmean(r[2].get(name, 0.0) for r in reports) for name in reports[0][2]}  # type: ignore[index]


def main(job: str, threads: str, steps: str, out: str) -> None:
    torch.set_num_threads(int(threads))
    try:
        Path(out).write_bytes(msgspec.json.encode(measure(load_job(job), int(steps))))
    except RoadtrainError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
