"""`roadtrain calibrate CLUSTER.toml JOB.toml`: a few real steps of a job on this host beside what is simulated for it.

The job is placed and trained in directories that do not stay, on the devices of its own; the medians of its steps'
stages are printed beside those of the simulated plan, and the rates that the steps showed (computing, updates) go into
the cluster file as measured. One worker, state in RAM or on files of this host. Steps before the first measured one are
not counted.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from roadtrain.errors import ConfigError
from roadtrain.sim.compute import Constants
from roadtrain.sim.fabric import UPDATE_BYTES
from roadtrain.sim.run import Result, simulate
from roadtrain.spec.chunks import ITEMSIZE
from roadtrain.spec.cluster import Cluster, load_cluster
from roadtrain.spec.job import Job, load_job
from roadtrain.spec.placement import Plan, placement
from roadtrain.spec.shapes import ModelShape, from_config
from roadtrain.store.direct import replace_file
from roadtrain.train import Training, place_job, step
from roadtrain.units import show_seconds

WARM = 8  # steps before: kernels are compiled, files are grown, reads and writes tried mixed and in bursts
EXACT = Constants(efficiency=1.0, network=1.0, source="measured on this host")
SHOWN = ("Forward", "Backward", "Read", "Update", "Write")


@dataclass(frozen=True)
class Measured:
    """Medians over steps. `compute_s`: of forward and backward, without waiting. `plan`, `shape`: what was run."""

    step_s: float
    compute_s: float
    stages: dict[str, float]
    plan: Plan
    shape: ModelShape


def plan_of(training: Training) -> Plan:
    """The simulator's words for a job on this host."""
    job, optimizer = training.job, training.optimizer
    size = ITEMSIZE[job.model.dtype]
    servers = [] if job.store.servers else optimizer._engine.servers
    chunks = [(server.chunks[number], state) for server in servers for number, state in server.decider.chunks.items()]
    total = sum(chunk.numel for chunk, _ in chunks)
    kept, public = (sum(chunk.numel for chunk, state in chunks if which(state)) / max(1, total) for which in (
        lambda state: state.resident, lambda state: state.in_memory))
    own = 8 + (4 if job.model.dtype != "fp32" or job.optimizer.staleness else 0)  # moments, and masters apart
    return Plan(
        placement("server" if job.store.servers else "files" if job.store.dirs else "zero-offload"),
        micro_batch=job.data.batch_size, micros=job.optimizer.accumulate, recompute=True,
        slots=len(optimizer._worker._slots), buffers=max(1, sum(server.decider.n_buffers for server in servers)),
        staleness=int(job.optimizer.staleness or 0), topk=job.compress.topk,  # type: ignore[call-overload]
        update_at="step" if job.optimizer.clip_norm is not None else "gradient", parameter_bytes=size,
        gradient_bytes=size, held_bytes=size, state_bytes=own + size, resident=kept, public=public if chunks else 1,
        chunk=job.store.chunk_elements, pushes=len(optimizer._worker._push_all), context_bytes=0)


def apart(job: Job, steps: int, stack: ExitStack) -> Job:
    """The job on directories of its own beside the job's, so on the same devices; they go when `stack` ends. What the
    job has trained so far is not touched."""
    def beside(path: str) -> str:
        home = Path(path).absolute()
        home = home if home.is_mount() else home.parent
        while not home.is_dir():
            home = home.parent
        return stack.enter_context(tempfile.TemporaryDirectory(prefix="roadtrain-calibrate-", dir=home))

    return job.changed({"run.dir": beside(job.run.dir), "run.steps": WARM + steps, "run.minutes": None,
                        "store.dirs": [beside(one) for one in job.store.dirs]})


def measure(job: Job, steps: int) -> Measured:
    """Trains `job` for WARM + `steps` steps. Raises RoadtrainError."""
    if job.store.servers or job.store.relay or job.compress.topk is not None or job.optimizer.staleness not in (0, 1):
        raise ConfigError("calibrate runs one worker with its state on this host, nothing compressed",
                          hint="without store.servers, store.relay, compress.topk; staleness 0 or 1")
    training = place_job(job, report=lambda _: None)
    lines: list[tuple[float, dict[str, Any]]] = []
    with training.optimizer:
        training.tokens.begun = True
        then = time.perf_counter()
        for number in range(WARM + steps):
            step(training, number)
            now = time.perf_counter()
            lines.append((now - then, training.stages.take() | training.optimizer.stages()))
            then = now
        plan = plan_of(training)
    lines = lines[WARM:]
    names = {name for _, stages in lines for name in stages}
    stages = {name: median(own[name].seconds if name in own else 0.0 for _, own in lines) for name in names}
    compute = median(own["Forward"].seconds + own["Backward"].seconds - own["Wait"].seconds for _, own in lines)
    config: Any = training.model.config
    shape = from_config(config.to_dict(), seq_len=training.job.data.seq_len)
    return Measured(median(seconds for seconds, _ in lines), compute, stages, plan, shape)


def learnt(cluster: Cluster, found: Measured) -> Cluster:
    """The cluster with the rates that the steps showed."""
    host = cluster.hosts[0]
    if host.device is None:
        raise ConfigError(f"host {host.name} has no device to compare", hint="roadtrain probe writes one")
    flops = found.shape.step_flops(True) * found.plan.samples / found.compute_s
    changes: dict[str, Any] = {"device": host.device.model_copy(update={"flops": flops})}
    if (seconds := found.stages.get("Update", 0.0)) > 0:
        changes["updates"] = UPDATE_BYTES * found.shape.params / seconds
    measured = dict.fromkeys([*cluster.measured, *(f"hosts.{host.name}.{name}" for name in changes)])
    return cluster.model_copy(update={
        "hosts": (host.model_copy(update=changes), *cluster.hosts[1:]), "measured": tuple(measured),
        "assumed": tuple(name for name in cluster.assumed if name not in measured)})


def told(found: Measured, before: Result, after: Result) -> str:
    def row(name: str, real: float, first: float, then: float) -> str:
        off = f"{then / real - 1:+.0%}" if real else ""
        return f"  {name:10}{show_seconds(real):>12}{show_seconds(first):>14}{show_seconds(then):>14}{off:>8}"

    lines = [f"{found.shape.name}: {found.shape.params / 1e6:.1f} M parameters, placement {found.plan.placement.name}",
             f"  {'':10}{'measured':>12}{'by the file':>14}{'calibrated':>14}{'error':>8}",
             row("a step", found.step_s, before.seconds, after.seconds)]
    for name in SHOWN:
        sims = [result.stages.get(("stage 0", name), (0.0, 0.0))[0] for result in (before, after)]
        if found.stages.get(name) or any(sims):
            lines.append(row(name, found.stages.get(name, 0.0), *sims))
    return "\n".join(lines)


def command(cluster_file: str, job_file: str, *, steps: int = 3, out: str = "") -> int:
    """Raises RoadtrainError."""
    cluster = load_cluster(cluster_file)
    if not out and not Path(cluster_file).exists():
        raise ConfigError(f"{cluster_file} is a template, its rates cannot be written back", hint="--out FILE")
    with ExitStack() as stack:
        found = measure(apart(load_job(job_file), steps, stack), steps)
    better = learnt(cluster, found)
    before, after = (simulate(found.plan, one, found.shape, EXACT, checked=False) for one in (cluster, better))
    print(told(found, before, after))
    target = out or cluster_file
    replace_file(Path(target), better.to_toml().encode(), "writing")
    print(f"wrote the measured rates to {target}")
    return 0
