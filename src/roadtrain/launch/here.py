"""The LaunchEngine for `--on here`: for each host of the plan, an agent on this machine starts the
processes of the host. Does NOT create networks (lab_engine.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from roadtrain.config.machines import Machines
from roadtrain.config.plan_file import PlanFile
from roadtrain.launch.agent import device_count
from roadtrain.launch.agent_link import AgentHost
from roadtrain.launch.agents import HostAgents
from roadtrain.launch.engines import machines_of
from roadtrain.launch.home import LaunchRecord

HERE = "127.0.0.1"


def here_engine(plan_file: PlanFile, record: LaunchRecord) -> HostAgents:
    """Start the agents of a launch, and return their engine. Raises LaunchError if an agent does
    not start."""
    return agents_here(machines_of(plan_file), record.mark)


def agents_here(machines: Machines, mark: str) -> HostAgents:
    """Start an agent for each host and spare host of the plan, and return their engine. Raises
    LaunchError if an agent does not start."""
    devices = device_names(machines)
    threads = worker_threads(machines)
    hosts = [
        AgentHost(
            host.name,
            host.address or HERE,
            workers=host.workers,
            environment=(
                {"CUDA_VISIBLE_DEVICES": devices[host.name]} if host.name in devices else {}
            ),
            threads=threads,
        )
        for host in (*machines.hosts, *machines.spares)
    ]
    return HostAgents(hosts, mark)


def device_names(machines: Machines) -> Mapping[str, str]:
    """Divide this machine's devices among the plan's hosts with workers, spare hosts last. Return
    the value of CUDA_VISIBLE_DEVICES by host, or an empty mapping if nothing must be divided."""
    sharing = [host for host in (*machines.hosts, *machines.spares) if host.workers]
    if len(sharing) < 2 or not device_count():
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    left = visible.split(",") if visible else [str(n) for n in range(device_count())]
    names: dict[str, str] = {}
    for host in sharing:
        names[host.name], left = ",".join(left[: host.workers]), left[host.workers :]
    return names


def worker_threads(machines: Machines) -> int:
    """Return the number of threads per worker, an equal share of the processors of this process."""
    all_workers = sum(host.workers for host in machines.hosts)
    return max(1, len(os.sched_getaffinity(0)) // max(1, all_workers))
