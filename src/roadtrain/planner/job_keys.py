"""job_keys(): what a job must say so that it trains as a plan says, on the plan's machines.

A nested table of a job's keys. Only what the plan needs: what a job states besides (clipping,
dtype, learning rate) stays the job's. Does NOT say which of two contradicting values wins.
"""

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

RELAY_SLACK = 1.25  # parameters are cut at their ends too, and copies want room


def run_name(job: Job) -> str:
    """By which the stores of a run are told from those of others beside them."""
    return Path(job.run.dir).name


def stated_degrees(job: Job) -> dict[str, Any]:
    """What its [parallelism] says of DEGREES, all of it where the file says it; nothing with
    `parallelism = "auto"`."""
    asked = job.parallelism
    stated = {name: getattr(asked, name) for name in DEGREES if name in asked.model_fields_set}
    named = {name for name, given in asked if given is not None}
    if named <= asked.model_fields_set:  # a file of ours names all, stated or not
        stated = {name: own for name, own in stated.items() if own != DEGREES[name]}
    return {} if asked.auto else stated


def contradicted(plan: Plan, job: Job) -> str:
    """Which degree the job says otherwise than the plan; "" where it says none."""
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
            return f"the job says parallelism.{name} = {stated}, the plan is {planned or 'even'}"
    return ""


def job_keys(plan_file: PlanFile, job: Job, addresses: Mapping[str, str]) -> dict[str, Any]:
    """Return what a plan with machines decides of a job.

    `parallelism.auto` is always false, which contradicts no job: "auto" is what the plan says now.

    Args:
        job: Whose directories are named after its run, and which keeps its own relay.
        addresses: Of each host, by its name in the plan.

    Raises:
        ConfigError: A plan with switches or SSDs has no cluster, or nothing runs it.
    """
    plan, machines, cluster = plan_file.plan, plan_file.machines, plan_file.cluster
    assert machines is not None
    if cluster is None and (plan.placement.fans_in or plan.placement.name in ON_ONE_HOST):
        raise ConfigError(
            "the plan has no [cluster], it is simulated only",
            hint="roadtrain plan CLUSTER.toml --job JOB.toml writes one that is launched",
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
    """What a step is, of a job without stages."""
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
    """[parallelism] of a job in stages."""
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
    together = any(host.workers > 1 for host in machines.hosts)  # as they are simulated
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
            there, named = (", ".join(sorted(one)) or "none" for one in (ports, tree.switches))
            raise ConfigError(
                f"the plan's machines are the switches {there}, its cluster sums in {named}",
                hint="machines.hosts.switch names a switch of the cluster file",
            )
        out |= switches.job_keys(plan, cluster, ports.__getitem__)
    return out


def relay_of(job: Job, machines: Machines) -> str:
    """Host bytes of a relay: what is enough for most, more where a formula says that the job's
    model needs more. Where none knows the model, a relay that is too small says what it needs."""
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
    """Where the only host keeps its state: what is to rest in memory is in files there, which a
    worker that is started again finds. Directories that the cluster does not name are the job's.
    """
    cluster, [host] = plan_file.cluster, machines.worker_hosts
    run = machines.stores_of or run
    if plan_file.plan.placement.state == "host":
        return {"store": {"files": [store_in(MEMORY, host.name, run)]}}
    assert cluster is not None
    kind = next((one for one in cluster.hosts if one.name == host.kind), None)
    if kind is None:
        raise ConfigError(
            f"host {host.name} is of kind {host.kind!r}, and the plan's cluster has none of it",
            hint=f"it has {', '.join(one.name for one in cluster.hosts)}",
        )
    if not any(ssd.directories for ssd in kind.ssds):
        return {}
    found = directories_of(kind, host.name)
    return {"store": {"files": [store_in(one, host.name, run) for one in found]}}


def batch_of_job(job: Job) -> int | None:
    """Samples of a step, as one process alone would train them; None where the job leaves it
    open."""
    stated = {"batch_size"} & job.data.model_fields_set | (
        {"accumulate"} & job.optimizer.model_fields_set
    )
    passes = job.parallelism.num_microbatches
    if passes is None and not stated:
        return None
    return job.data.batch_size * (passes or job.optimizer.accumulate)
