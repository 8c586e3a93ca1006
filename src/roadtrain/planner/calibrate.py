"""`roadtrain calibrate CLUSTER.toml JOB.toml`: a few real steps of a job beside what is simulated
for it.

Here: one worker, state in RAM or on files of this host; the rates that the steps showed (computing,
updates) go into the cluster file as measured. With `--lab`: on the file's cluster, emulated
(calibrate_lab.py). What its workers showed is then this machine's, not the file's devices', so it
goes to a file of its own, NAME.lab.toml or `--out`: neither a user's figures of a GPU nor those of
larger processors are ever replaced unasked.

The job is placed and trained in directories that do not stay; the medians of its steps' stages are
printed beside those of the simulated plan.
"""

from __future__ import annotations

import tempfile
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
from roadtrain.storage.direct import check_file, replace_file
from roadtrain.units import show_seconds

EXACT = Constants(efficiency=1.0, network=1.0, source="measured on this host")
SHOWN = ("Forward", "Backward", "Wait", "Read", "Update", "Write")
ROUNDS, CLOSE = 12, 1e-3  # of learning


def apart(job: Job, steps: int, stack: ExitStack) -> Job:
    """The job on directories of its own beside the job's, so on the same devices; they go when
    `stack` ends. What the job has trained so far is not touched."""

    def beside(path: str) -> str:
        home = Path(path).absolute()
        home = home if home.is_mount() else home.parent
        while not home.is_dir():
            home = home.parent
        made = tempfile.TemporaryDirectory(prefix="roadtrain-calibrate-", dir=home)
        return stack.enter_context(made)

    run = {"run.dir": beside(job.run.dir), "run.steps": WARM + steps, "run.minutes": None}
    return job.changed(run | {"store.files": [beside(one) for one in job.store.files]})


def learnt(cluster: Cluster, found: Measured, of: Constants = EXACT) -> Cluster:
    """The cluster with the rates of computing and updating that make the simulated steps compute
    and update as long as the real ones did. Where both run on the same processors each holds the
    other up, in both; so a quotient of work and measured seconds would count that twice."""
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
    """Seconds a step of each of SHOWN. What is no computing of the worker is its waiting."""
    sims = {name: result.stages.get(("stage 0", name), (0.0, 0.0))[0] for name in SHOWN}
    return sims | {"Wait": max(0.0, result.seconds - sims["Forward"] - sims["Backward"])}


def told(found: Measured, before: Result, after: Result) -> str:
    def row(name: str, real: float, first: float, then: float) -> str:
        off = f"{then / real - 1:+.0%}" if real else ""
        cells = f"{show_seconds(real):>12}{show_seconds(first):>14}{show_seconds(then):>14}"
        return f"  {name:10}{cells}{off:>8}"

    lines = [
        (
            f"{found.shape.name}: {found.shape.params / 1e6:.1f} M parameters, placement"
            f" {found.plan.placement.name}, {found.plan.parallelism.dp} worker(s)"
        ),
        f"  {'':10}{'measured':>12}{'by the file':>14}{'calibrated':>14}{'error':>8}",
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
    """Run a few real steps of a job here, print them beside the simulated ones, write the measured
    rates back.

    Raises RoadtrainError.

    Args:
        steps: how many are measured (3)
        out: the file to write (CLUSTER.toml itself)
        lab: on the cluster of the file, emulated on this machine (root); writes NAME.lab.toml
    """
    cluster, of = load_cluster(cluster_file), EMULATED if lab else EXACT
    target = out or (f"{Path(cluster_file).stem}.lab.toml" if lab else cluster_file)
    if not out and not lab and not Path(cluster_file).exists():
        raise ConfigError(
            f"{cluster_file} is a template, its rates cannot be written back", hint="--out FILE"
        )
    check_file(Path(target))
    if steps < 1 or not cluster.workers:
        raise ConfigError(
            f"{steps} step(s) to be measured, {cluster.name} has {len(cluster.workers)} kind(s) of"
            " hosts with a device",
            hint="--steps 1 or more; roadtrain probe writes devices",
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
            "calibrate runs one worker with its state on this host, nothing compressed",
            hint=(
                "without servers.addresses (but with --lab), servers.relay, servers.replicas,"
                " compress.keep, compress.downcast; optimizer.delay 0 or 1"
            ),
        )
    with ExitStack() as stack:
        job = apart(job, steps, stack)
        real, found = steps_in_lab(cluster, job, steps) if lab else (cluster, measure(job, steps))
    better = learnt(real, found, of)
    before, after = (
        simulate(found.plan, one, found.shape, of, checked=False) for one in (cluster, better)
    )
    print(told(found, before, after))
    replace_file(Path(target), better.to_toml().encode(), "writing")
    if lab:
        print(
            "links and SSDs were emulated at the file's rates, so these are not measured; latency"
            " was not emulated"
        )
    print(f"wrote the measured rates to {target}")
    return 0
