"""`roadtrain calibrate CLUSTER.toml JOB.toml`: run a few real steps of a job and compare the steps
with the simulation.

Without options, one worker runs on this host, and the rates at which this host computes and updates
are written to the cluster file. With `--lab`, the cluster of the file is emulated
(calibrate_lab.py). The emulated workers have the speed of this machine and not the speed of the
devices in the file. Therefore the rates are written to a new file, so that they do not replace the
rates of a user's GPUs.

The job runs in temporary directories.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from roadtrain.config.cluster import Cluster, load_cluster
from roadtrain.config.job import Job, load_job
from roadtrain.errors import ConfigError
from roadtrain.planner.calibrate_lab import EMULATED, steps_in_lab
from roadtrain.planner.calibrate_steps import WARM, Measured, measure
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.fabric import UPDATE_BYTES
from roadtrain.simulator.run import Result, simulate
from roadtrain.storage.direct import beside, check_file, replace_file
from roadtrain.units import show_seconds

EXACT = Constants(efficiency=1.0, network=1.0, source="measured on this host")
SHOWN = ("Forward", "Backward", "Wait", "Read", "Update", "Write")
ROUNDS, CLOSE = 12, 1e-3  # most iterations of fit_rates, and its relative tolerance


def in_temporary_dirs(job: Job, steps: int, stack: ExitStack) -> Job:
    """Return the job with temporary directories in place of its own directories, so that the run
    does not change the job's files. Each is on the same file system as the directory that it
    replaces. The temporary directories are removed when `stack` exits."""

    made = (beside(Path(path), "roadtrain-calibrate-") for path in (job.run.dir, *job.store.files))
    directory, *files = map(stack.enter_context, made)
    run = {"run.dir": directory, "run.steps": WARM + steps, "run.minutes": None}
    return job.changed(run | {"store.files": files})


def fit_rates(cluster: Cluster, found: Measured, of: Constants = EXACT) -> Cluster:
    """Return the cluster with new rates for computing and for updating. The rates are fitted by
    iteration, until a simulated step takes as long as the measured steps. Measured work divided by
    measured seconds would be too low: computing and updating slow each other down on the same CPUs,
    and the simulation adds this effect again."""
    worker, plan, seconds = cluster.workers[0], found.plan, found.stages.get("Update", 0.0)
    assert worker.device is not None
    updater = cluster.spares[0] if plan.placement.served else worker
    flops = found.shape.step_flops(True) * plan.micro_batch * plan.num_microbatches
    flops /= found.compute_s
    updates = updater.updates
    if seconds:
        updates = UPDATE_BYTES * found.shape.params / seconds / updater.count
    most = max(updates, updater.memory_rate)
    for _ in range(ROUNDS):
        rates: dict[str, dict[str, Any]] = {host.name: {} for host in cluster.hosts}
        rates[worker.name]["device"] = worker.device.model_copy(update={"flops": flops})
        rates[updater.name] |= {"updates": updates} if seconds else {}
        hosts = tuple(host.model_copy(update=rates[host.name]) for host in cluster.hosts)
        better = cluster.model_copy(update={"hosts": hosts})
        sims = stages_of(simulate(plan, better, found.shape, of, checked=False))
        computing = (sims["Forward"] + sims["Backward"]) / found.compute_s
        updating = sims["Update"] / (seconds or 1.0)
        if max(abs(computing - 1), abs(updating - 1)) < CLOSE:
            break
        flops, updates = flops * computing, min(updates * updating, most)
    names = [f"hosts.{name}.{key}" for name, changes in rates.items() for key in changes]
    return better.model_copy(
        update={
            "measured": tuple(dict.fromkeys([*cluster.measured, *names])),
            "assumed": tuple(name for name in cluster.assumed if name not in names),
        }
    )


def stages_of(result: Result) -> dict[str, float]:
    """Return the simulated seconds per step for each kind of work that `roadtrain calibrate` shows,
    such as "Forward". "Wait" is the time in which the worker does not compute."""
    sims = {name: result.stages.get(("stage 0", name), (0.0, 0.0))[0] for name in SHOWN}
    return sims | {"Wait": max(0.0, result.seconds - sims["Forward"] - sims["Backward"])}


def comparison(found: Measured, before: Result, after: Result) -> str:
    def row(name: str, real: float, first: float, then: float) -> str:
        off = f"{then / real - 1:+.0%}" if real else ""
        cells = f"{show_seconds(real):>12}{show_seconds(first):>14}{show_seconds(then):>14}"
        return f"  {name:10}{cells}{off:>8}"

    lines = [
        (
            f"{found.shape.name}: {found.shape.params / 1e6:.1f} M parameters, placement"
            f" {found.plan.placement.name}, {found.plan.parallelism.dp} worker(s)"
        ),
        f"  {'':10}{'measured':>12}{'simulated':>14}{'calibrated':>14}{'error':>8}",
        row("a step", found.step_s, before.seconds, after.seconds),
    ]
    for name in SHOWN:
        sims = [stages_of(result)[name] for result in (before, after)]
        if found.stages.get(name) or any(sims):
            lines.append(row(name, found.stages.get(name, 0.0), *sims))
    return "\n".join(lines)


def command(
    cluster_file: str, job_file: str, *, steps: int = 3, out: str = "", lab: bool = False
) -> int:
    """Run a few real steps of a job, print their times beside the simulated times, and write the
    measured rates to the cluster file.

    Raises RoadtrainError.

    Args:
        steps: number of steps to measure (3)
        out: the file to write (CLUSTER.toml itself)
        lab: run on the cluster of the file, emulated on this machine (root); writes NAME.lab.toml
    """
    cluster, of = load_cluster(cluster_file), EMULATED if lab else EXACT
    target = out or (f"{Path(cluster_file).stem}.lab.toml" if lab else cluster_file)
    if not out and not lab and not Path(cluster_file).exists():
        raise ConfigError(
            f"{cluster_file} is a template, which cannot be written", hint="give --out FILE"
        )
    check_file(Path(target))
    if steps < 1 or not cluster.workers:
        raise ConfigError(
            "calibrate needs at least 1 step and an entry of `hosts` with a device, but --steps is"
            f" {steps} and {cluster.name} has {len(cluster.workers)} entries with a device",
            hint="give --steps 1 or more; `roadtrain probe` writes a cluster file with devices",
        )
    job = load_job(job_file)
    if (
        job.servers.relay
        or job.servers.replicas > 1
        or job.compress.keep is not None
        or job.compress.downcast
        or (job.optimizer.delay not in (0, 1))
        or (job.servers.addresses and not lab)
    ):
        raise ConfigError(
            "calibrate runs one worker, with its state on this host and without compression",
            hint="remove servers.addresses (or add --lab), servers.relay, servers.replicas,"
            " compress.keep and compress.downcast, and set optimizer.delay to 0 or 1",
        )
    with ExitStack() as stack:
        job = in_temporary_dirs(job, steps, stack)
        real, found = steps_in_lab(cluster, job, steps) if lab else (cluster, measure(job, steps))
    better = fit_rates(real, found, of)
    before, after = (
        simulate(found.plan, c, found.shape, of, checked=False) for c in (cluster, better)
    )
    print(comparison(found, before, after))
    replace_file(Path(target), better.to_toml().encode(), "writing")
    if lab:
        print(
            "links and SSDs were emulated with the rates of the cluster file, so their rates were"
            " not measured; latency was not emulated"
        )
    print(f"wrote the measured rates to {target}")
    return 0
