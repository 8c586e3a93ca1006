"""Derive the keys of a job file that make the job train as a plan says, on the plan's machines.
Keys that the plan does not decide (clipping, dtype, learning rate) stay unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.config.job import Job
from roadtrain.config.job_model import shape_of
from roadtrain.config.machines import FILES, Machines, host_port
from roadtrain.config.models import BlockShape
from roadtrain.config.plan_file import Plan, PlanFile
from roadtrain.errors import ConfigError
from roadtrain.planner import switches
from roadtrain.planner.candidates import EVERY
from roadtrain.planner.machines_of import (
    IN_STAGES,
    MEMORY,
    ON_ONE_HOST,
    REDUCED,
    directories_of,
    store_in,
    why_not_run,
)
from roadtrain.relay.route import least_relay
from roadtrain.stages.job_parallelism import DEGREES
from roadtrain.units import GIB, parse_bytes

RELAY_SLACK = 1.25  # factor on a relay's memory, for copies and for padding of cut parameters


def run_name(job: Job) -> str:
    """Return the name of the job's run, which is a part of the names of the run's stores."""
    return Path(job.run.dir).name


def stated_degrees(job: Job) -> dict[str, Any]:
    """Return the degrees of parallelism, such as `dp`, `tp` and `pp`, that the job sets in
    [parallelism], by key. The mapping is empty for `parallelism = "auto"`."""
    section = job.parallelism
    stated = {name: getattr(section, name) for name in DEGREES if name in section.model_fields_set}
    filled = {name for name, value in section if value is not None}
    # a job file that roadtrain has written has all keys, also those that the user has not set
    if filled <= section.model_fields_set:
        stated = {name: own for name, own in stated.items() if own != DEGREES[name]}
    return {} if section.auto else stated


def contradicted(plan: Plan, job: Job) -> str:
    """Return a sentence with the first key of [parallelism] for which the job contradicts the plan,
    or "" if there is no such key."""
    ranks = plan.parallelism
    for name, stated in stated_degrees(job).items():
        if stated in (None, []) or isinstance(stated, str):
            continue
        planned: Any = getattr(ranks, name)
        if name == "widths":
            planned = list(ranks.replicas_of)
        elif name == "stages":
            planned = list(ranks.stages)
            if planned == stated and len(stated) == ranks.pp * ranks.virtual_stages:
                continue
            planned = planned if planned != stated else f"for {ranks.pp} stages"
        elif name == "dp" and ranks.widths:
            planned = f"widths {list(ranks.widths)}"
        if stated != planned:
            return f"the job has parallelism.{name} = {stated}, the plan is {planned or 'even'}"
    return ""


def unused_files(plan: Plan, job: Job) -> str:
    """Return a sentence if the job's store.files are not the place of the plan's state, else ""."""
    place, files = plan.placement, job.store.files
    if not files or place.state == "ssd":
        return ""
    where = "on servers" if place.served else "in memory"
    where += ", with snapshots in the run's directory" * (place.name in IN_STAGES)
    return (
        f"store.files of the job ({', '.join(files)}) is not used: placement {place.name} keeps"
        f" the state {where}; `roadtrain plan --placements files` keeps it on SSDs"
    )


def job_keys(plan_file: PlanFile, job: Job, addresses: Mapping[str, str]) -> dict[str, Any]:
    """Return the job keys that a plan with machines decides.

    A job with `parallelism = "auto"` gets the degrees of the plan.

    Args:
        plan_file: The plan, which must have machines.
        job: The job. The name of its run.dir becomes part of the names of directories. If the job
            sets servers.relay, the result has the same value.
        addresses: The address of each host, by the host's name in the plan.

    Raises:
        ConfigError: The plan cannot be run, or the plan needs a cluster but has none.
    """
    plan, machines, cluster = plan_file.plan, plan_file.machines, plan_file.cluster
    assert machines is not None
    if cluster is None and (plan.placement.fans_in or plan.placement.name in ON_ONE_HOST):
        raise ConfigError(
            "the plan has no [cluster], so it can only be simulated",
            hint="`roadtrain plan CLUSTER.toml --job JOB.toml` writes a plan that can be launched",
        )
    if why := why_not_run(plan, cluster):
        raise ConfigError(why)
    out: dict[str, Any] = {"data": {"batch_size": plan.micro_batch}}
    if plan_file.predicted is not None:
        out["predicted"] = plan_file.predicted.model_dump()
    if plan.placement.name in IN_STAGES:
        return out | {"parallelism": {"auto": False, **_parallelism(plan)}}
    out |= step_keys(plan)
    if any(host.servers for host in machines.hosts):
        own = out["servers"] = _servers(plan_file, machines, addresses)
        own["token_file"] = f"{job.run.dir}/{FILES}/token"
        if "relay" in own:
            own["relay"] = job.servers.relay or relay_of(job, machines)
    else:
        out |= _store(plan_file, machines, run_name(job))
    return out | {"parallelism": {"auto": False}}


def step_keys(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the job keys that define a training step (micro-batches, delay, compression), for a
    job without pipeline stages."""
    late = {"delay": plan.staleness} if plan.staleness else {}
    kept = {} if plan.keep is None else {"compress": {"keep": plan.keep}}
    return {"optimizer": {"accumulate": plan.num_microbatches, **late}, **kept}


def _parallelism(plan: Plan) -> dict[str, Any]:
    ranks = plan.parallelism
    if plan.placement.name not in REDUCED:
        return degrees(plan)
    alone = {"reducers_alone": True} if plan.placement.sum == "separate" else {}
    return {
        "dp": ranks.dp,
        "num_microbatches": plan.step_microbatches,
        "reducers": f"{{run}}/{FILES}/reducers.txt",
        "reducers_token_file": f"{{run}}/{FILES}/token",
        **alone,
    }


def degrees(plan: Plan) -> dict[str, Any]:
    """Return the [parallelism] keys of a job that is split into pipeline stages."""
    ranks = plan.parallelism
    width = {"widths": list(ranks.widths)} if ranks.widths else {"dp": ranks.dp}
    stages = {"stages": list(ranks.stages)} if ranks.stages else {}
    names = ("tp", "pp", "virtual_stages")
    several = {name: getattr(ranks, name) for name in names if getattr(ranks, name) > 1}
    return {**several, **width, **stages, "num_microbatches": plan.step_microbatches}


def _servers(
    plan_file: PlanFile, machines: Machines, addresses: Mapping[str, str]
) -> dict[str, Any]:
    plan, cluster = plan_file.plan, plan_file.cluster
    at = {host.name: addresses.get(host.name) or host.address for host in machines.hosts}
    listening = [
        host_port(at[host.name], server.port) for host in machines.hosts for server in host.servers
    ]
    out: dict[str, Any] = {"addresses": listening}
    if plan.memory.slots >= EVERY or plan.memory.kept:
        out["buffering"] = "all"
    together = any(host.workers > 1 for host in machines.hosts)  # as in the simulation
    if together or plan.placement.sum == "relay":
        out["relay"] = switches.RELAY
    if plan.placement.fans_in and cluster is not None:
        ports = {
            host.switch.switch: host_port(at[host.name], host.switch.port)
            for host in machines.hosts
            if host.switch is not None
        }
        tree = switches.tree_of(plan, cluster)
        assert tree is not None
        if ports.keys() != tree.switches.keys():
            ours, planned = (", ".join(sorted(names)) or "none" for names in (ports, tree.switches))
            raise ConfigError(
                f"the machines run the switches {ours}, but the plan's cluster has {planned}",
                hint="set machines.hosts.switch to the name of a switch of the cluster file",
            )
        out |= switches.job_keys(plan, cluster, ports.__getitem__)
    return out


def relay_of(job: Job, machines: Machines) -> str:
    """Return the amount of host memory for a relay, as a text such as "4GiB". The result exceeds
    the default if the job's model is known to need more."""
    shape = shape_of(job)
    if shape is None:
        return switches.RELAY

    def spec(block: BlockShape) -> ParamSpec:
        return ParamSpec(block.name, (block.params,), job.model.dtype, True, 0)

    root = [spec(block) for block in shape.blocks if "." not in block.name]
    layers = [(block.name, [spec(block)]) for block in shape.blocks if "." in block.name]
    least, _ = least_relay(
        ChunkTable.build([("", root), *layers], job.store.chunk_elements),
        servers=sum(len(host.servers) for host in machines.hosts),
        local=max(host.workers for host in machines.hosts),
        holds_gradients=job.optimizer.clip_norm is not None or job.model.dtype == "fp16",
    )
    enough = -(-int(least * RELAY_SLACK) // GIB)
    return f"{max(enough, parse_bytes(switches.RELAY) // GIB)}GiB"


def _store(plan_file: PlanFile, machines: Machines, run: str) -> dict[str, Any]:
    """Return the [store] keys of a job for a plan on one host, or no keys if the cluster names no
    directories. State in memory is kept in /dev/shm, where a restarted worker finds it."""
    cluster, [host] = plan_file.cluster, machines.worker_hosts
    run = machines.stores_of or run
    if plan_file.plan.placement.state == "host":
        return {"store": {"files": [store_in(MEMORY, host.name, run)]}}
    assert cluster is not None
    kind = next((h for h in cluster.hosts if h.name == host.kind), None)
    if kind is None:
        raise ConfigError(
            f"host {host.name} has kind {host.kind!r}, which is not in the plan's cluster",
            hint=f"the kinds of the cluster are {', '.join(h.name for h in cluster.hosts)}",
        )
    if not any(ssd.directories for ssd in kind.ssds):
        return {}
    found = directories_of(kind, host.name)
    return {"store": {"files": [store_in(directory, host.name, run) for directory in found]}}


def batch_of_job(job: Job) -> int | None:
    """Return the number of samples of a step of a job that a single process trains, or None if the
    job file does not set it."""
    stated = {"batch_size"} & job.data.model_fields_set | (
        {"accumulate"} & job.optimizer.model_fields_set
    )
    passes = job.parallelism.num_microbatches
    if passes is None and not stated:
        return None
    return job.data.batch_size * (passes or job.optimizer.accumulate)
