"""Assign the processes of a plan to the machines of a cluster, and extract the prediction from the
plan's simulation. The placement of the plan decides which processes run besides the workers:

    server, optimizer-node        servers on the machines of the first [[hosts]] without devices;
                                  one server per directory of their SSDs, or one server with its
                                  store in memory if the machine has no SSDs
    smartnic                      a server with its store in memory on each host that computes
    summation, parameter-server   a reducer on each host without devices that has a network card
    optimizer-node                besides the servers, the switches, each on its own machine
    zero1, files                  no other processes
    zero-offload                  no other processes; the state of the only worker is in files in
                                  memory

The simulator assigns processes to machines in the same way (simulator/scene.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from roadtrain.config.cluster import Cluster, Host
from roadtrain.config.machines import (
    PORT,
    Machines,
    PlanHost,
    Predicted,
    ServerPlace,
    SwitchPlace,
)
from roadtrain.config.plan_file import Plan
from roadtrain.errors import ConfigError
from roadtrain.planner import switches
from roadtrain.simulator.run import Result

MEMORY = "/dev/shm"
# the placements that roadtrain cannot run, with the reasons
NOT_RUN = {
    "ddp": "`train` splits the state over the ranks, use placement zero1",
    "zero3": "`train` does not split parameters over devices, use placement server or files",
    "zero-infinity": "gradients cannot be kept on SSDs, use placement files",
    "raid0": "gradients cannot be kept on SSDs, use placement files",
    "near-storage": "there are no updates in SSDs, use placement files",
    "switch-sum": "switches need a server, use placement optimizer-node",
}
REDUCED = ("summation", "parameter-server")
IN_STAGES = ("zero1", *REDUCED)  # placements whose jobs have [parallelism]
ON_ONE_HOST = ("files", "zero-offload")
# stages that `roadtrain calibrate` and status compare with a real run; other stages overlap
COMPARED = ("Forward", "Backward", "Read", "Update", "Write")


def why_not_run(plan: Plan, cluster: Cluster | None) -> str:
    """Return one sentence with the reason why `roadtrain launch` cannot run the plan, or "" if it
    can. `cluster`: the plan's cluster, or None if the plan's machines were written by hand."""
    name, ranks = plan.placement.name, plan.parallelism
    if plan.stage_placements:
        return "a plan with a placement for each stage can only be simulated"
    if name in NOT_RUN:
        return f"placement {name} cannot be run: {NOT_RUN[name]}"
    if ranks.cp * ranks.ep > 1:
        return f"{ranks} has context- or expert-parallel ranks, which `train` does not support"
    if name in IN_STAGES:
        if plan.activation_checkpointing:
            return "a job with [parallelism] does not support activation checkpointing"
        if plan.staleness or plan.keep is not None:
            return "a job with [parallelism] does not support staleness or compressed gradients"
    if name != "zero1" and (ranks.tp > 1 or ranks.pp > 1):
        return f"placement {name} only runs data-parallel workers, but the plan has {ranks}"
    if name in REDUCED and ranks.dp == 1:
        return f"placement {name} sums the gradients of several workers, but the plan has 1 worker"
    many = 0 if cluster is None else len(switches.hosts_of(plan, cluster))
    if name in ON_ONE_HOST and many > 1:
        return f"placement {name} runs on one host, but {ranks} is on {many} hosts"
    if name in ON_ONE_HOST and ranks.devices > 1:
        return f"placement {name} runs one worker, but {ranks} has {ranks.devices} workers"
    return ""


def _uneven(plan: Plan, cluster: Cluster) -> str:
    """Return the reason why a real run would differ from the simulation of the plan, or "" if there
    is none. The simulation assumes that all hosts run the same number of workers."""
    if not (plan.placement.served or plan.placement.name == "smartnic"):
        return ""
    *full, last = switches.hosts_of(plan, cluster)
    left = plan.parallelism.devices - sum(host.devices for host in full)
    counts = {*(host.devices for host in full), min(last.devices, left)}
    if len(counts) == 1:
        return ""
    return (
        f"placement {plan.placement.name} is simulated with equally many workers on each host, but"
        f" {plan.parallelism} has hosts with {' and '.join(map(str, sorted(counts)))}"
    )


def machines_of(plan: Plan, cluster: Cluster, run: str = "") -> Machines:
    """Assign the processes of a plan to machines. `run`: the run's name, which becomes a part of
    the names of the run's stores. Raises ConfigError if `roadtrain launch` cannot run the plan, or
    if SSDs that the plan uses have no directories in the cluster file."""
    if why := why_not_run(plan, cluster) or _uneven(plan, cluster):
        raise ConfigError(why, hint="`roadtrain plan --job` only tries plans that can be launched")
    workers, spares = _workers(plan, cluster)
    hosts = {host.name: host for host in workers}
    name, ports = plan.placement.name, Counter[str]()

    def add(machine: PlanHost) -> None:
        if machine.name in hosts:
            raise ConfigError(
                f"2 machines of the cluster are called {machine.name!r}",
                hint="rename one of the [[hosts]]; those with a count are called NAME0, NAME1, ...",
            )
        hosts[machine.name] = machine

    if plan.placement.served:
        for machine, about in machines_of_kind(_serving(name, cluster)):
            add(replace(machine, servers=_servers(machine, about, ports, run)))
    if name == "smartnic":
        kinds = {kind.name: kind for kind in cluster.hosts}
        for machine in workers:
            snapshot, store = _snapshot(machine, kinds[machine.kind], run), machine.name
            place = ServerPlace(store_in(MEMORY, store, run), _port(ports, machine), snapshot)
            hosts[machine.name] = replace(machine, servers=(place,))
    if name in REDUCED:
        for machine in _reducing(name, cluster):
            add(replace(machine, reducer=_port(ports, machine)))
    if plan.placement.fans_in:
        tree = switches.tree_of(plan, cluster)
        assert tree is not None
        for switch in tree.switches.values():
            found = hosts.get(switch.name, PlanHost(switch.name, "", switch.address))
            place_of = SwitchPlace(_port(ports, found), switch.name)
            hosts[found.name] = replace(found, switch=place_of)
    return Machines(tuple(hosts.values()), spares, stores_of=run)


def predicted_of(result: Result) -> Predicted:
    """Return the predicted seconds of a step, and of each kind of work of each pipeline stage.
    "Wait" is the time in which the stage does not compute."""
    stages: dict[str, dict[str, float]] = {}
    for (where, name), (seconds, _) in result.stages.items():
        if where.startswith("stage") and name in COMPARED and seconds:
            stages.setdefault(where, {})[name] = seconds
    for own in stages.values():
        computing = own.get("Forward", 0.0) + own.get("Backward", 0.0)
        own["Wait"] = max(0.0, result.seconds - computing)
    return Predicted(seconds=result.seconds, stages=stages)


def directories_of(host: Host, machine: str) -> list[str]:
    """Return the directories of all SSDs of one machine, or [] if the machine has none. Raises
    ConfigError if an SSD has no directory."""
    if lacking := sum(ssd.count for ssd in host.ssds if not ssd.directories):
        raise ConfigError(
            f"{lacking} SSD(s) of host {host.name!r} have no directory in which data can be stored",
            hint="set `directories` of these `ssds` in the cluster file",
        )
    return [d.replace("{host}", machine) for ssd in host.ssds for d in ssd.directories]


def store_in(directory: str, machine: str, run: str = "") -> str:
    """Return a subdirectory of `directory` for one machine's store. `run`: the run's name, which
    distinguishes stores on the same machine."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{run}-{machine}" if run else machine)
    return f"{directory.rstrip('/')}/roadtrain-{name}"


def _serving(placement: str, cluster: Cluster) -> Host:
    if not cluster.spares:
        raise ConfigError(
            f"placement {placement} needs a host without devices, but the cluster has none"
        )
    return cluster.spares[0]


def _reducing(placement: str, cluster: Cluster) -> list[PlanHost]:
    found = [m for kind in cluster.spares if kind.nics for m, _ in machines_of_kind(kind)]
    if not found:
        raise ConfigError(
            f"placement {placement} needs a host without devices and with a network card, but the"
            " cluster has none"
        )
    return found


def machines_of_kind(host: Host) -> Iterator[tuple[PlanHost, Host]]:
    """Yield each machine of a kind of host, with its name in plans, and the kind itself."""
    for number in range(host.count):
        name = f"{host.name}{number}" if host.count > 1 else host.name
        address = host.addresses[number] if host.addresses else ""
        yield PlanHost(name, host.name, address), host


def _workers(plan: Plan, cluster: Cluster) -> tuple[list[PlanHost], tuple[PlanHost, ...]]:
    """Return the machines that compute, in the order of their ranks, and the machines with unused
    devices."""
    left, used, spares = plan.parallelism.devices, [], []
    for machine, kind in (pair for host in cluster.workers for pair in machines_of_kind(host)):
        many = min(kind.devices, left)
        left -= many
        if many:
            used.append(replace(machine, workers=many))
        else:
            spares.append(replace(machine, workers=kind.devices))
    if left:
        raise ConfigError(
            f"{plan.parallelism} needs {plan.parallelism.devices} devices, but the cluster has"
            f" {cluster.device_count}"
        )
    return used, tuple(spares)


def _servers(host: PlanHost, kind: Host, ports: Counter[str], run: str) -> tuple[ServerPlace, ...]:
    found = directories_of(kind, host.name) or [MEMORY]
    return tuple(ServerPlace(store_in(at, host.name, run), _port(ports, host)) for at in found)


def _snapshot(machine: PlanHost, kind: Host, run: str) -> str:
    """Return a directory on an SSD for snapshots of a store in memory, or "" if there is none."""
    found = [d.replace("{host}", machine.name) for ssd in kind.ssds for d in ssd.directories]
    return f"{store_in(found[0], machine.name, run)}.snapshot" if found else ""


def _port(ports: Counter[str], machine: PlanHost) -> int:
    """Return the next unused port at the machine's address."""
    key = machine.address or machine.name
    ports[key] += 1
    return PORT + ports[key] - 1
