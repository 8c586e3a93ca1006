"""Which machines of a cluster run which processes of a plan, and what its simulation promises.

    server, optimizer-node        servers on the machines of the first [[hosts]] without devices,
                                  one for each of their SSDs' directories; without SSDs in memory
    smartnic                      a server in the memory of each host that computes
    summation, parameter-server   a reducer on each host without devices that has a card
    optimizer-node                also its switches, each a machine of its own
    zero1, files                  workers alone
    zero-offload                  a worker alone, its state in files in memory

So the simulator lays them out (simulator/scene.py). Does NOT know a job, nor what starts processes.
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
# placements that no command of ours runs, and why
NOT_RUN = {
    "ddp": "`train` cuts the state over the ranks, as placement zero1",
    "zero3": "`train` cuts no parameters over devices; placement server or files streams them",
    "zero-infinity": "gradients rest on no SSD; placement files does the rest",
    "raid0": "gradients rest on no SSD; placement files does the rest",
    "near-storage": "nothing here updates beside an SSD; placement files updates on the host",
    "switch-sum": "switches are served by a node, as in placement optimizer-node",
}
REDUCED = ("summation", "parameter-server")
IN_STAGES = ("zero1", *REDUCED)  # a job of theirs has [parallelism]
ON_ONE_HOST = ("files", "zero-offload")
# what is compared with a real run, as `roadtrain calibrate` does; the rest overlaps
TOLD = ("Forward", "Backward", "Read", "Update", "Write")


def why_not_run(plan: Plan, cluster: Cluster | None) -> str:
    """Why `roadtrain launch` cannot run this, in one sentence; "" where it can. cluster: None for
    a plan whose machines were written by hand."""
    name, ranks = plan.placement.name, plan.parallelism
    if plan.stage_placements:
        return "stages with a placement each are not launched, only simulated"
    if name in NOT_RUN:
        return f"placement {name} is not run: {NOT_RUN[name]}"
    if ranks.cp * ranks.ep > 1:
        return f"{ranks} has context- or expert-parallel ranks, which `train` has not"
    if name in IN_STAGES:
        if plan.activation_checkpointing:
            return "a job with [parallelism] checkpoints no activations"
        if plan.staleness or plan.keep is not None:
            return "a job with [parallelism] has neither late updates nor compressed gradients"
    if name != "zero1" and (ranks.tp > 1 or ranks.pp > 1):
        return f"placement {name} runs data-parallel workers alone, {ranks} is more"
    if name in REDUCED and ranks.dp == 1:
        return f"placement {name} sums what several workers send, there is 1"
    many = 0 if cluster is None else len(switches.hosts_of(plan, cluster))
    if name in ON_ONE_HOST and many > 1:
        return f"placement {name} is of one host's workers, {ranks} is on {many} hosts"
    if name in ON_ONE_HOST and ranks.devices > 1:
        return f"placement {name} is of one worker, {ranks} is {ranks.devices}"
    return ""


def _unlike(plan: Plan, cluster: Cluster) -> str:
    """Why a plan is not simulated as it would run on hosts of different numbers of devices. Who
    wrote machines by hand knows it."""
    if not (plan.placement.served or plan.placement.name == "smartnic"):
        return ""
    *full, last = switches.hosts_of(plan, cluster)
    left = plan.parallelism.devices - sum(host.devices for host in full)
    counts = {*(host.devices for host in full), min(last.devices, left)}
    if len(counts) == 1:
        return ""
    return (
        f"placement {plan.placement.name} is simulated with as many workers on each host,"
        f" {plan.parallelism} is {' and '.join(map(str, sorted(counts)))}"
    )


def machines_of(plan: Plan, cluster: Cluster, run: str = "") -> Machines:
    """run: whose stores are its own, by its name in theirs. Raises ConfigError for what `roadtrain
    launch` cannot run, and for SSDs without directories."""
    if why := why_not_run(plan, cluster) or _unlike(plan, cluster):
        raise ConfigError(why, hint="roadtrain plan --job tries what can be launched")
    workers, spares = _workers(plan, cluster)
    hosts = {host.name: host for host in workers}
    name, ports = plan.placement.name, Counter[str]()

    def added(one: PlanHost) -> None:
        if one.name in hosts:
            raise ConfigError(
                f"2 machines of the cluster are called {one.name!r}",
                hint="machines of several are called NAME0, NAME1, ...: another name",
            )
        hosts[one.name] = one

    if plan.placement.served:
        for one, about in machines_of_kind(_serving(name, cluster)):
            added(replace(one, servers=_servers(one, about, ports, run)))
    if name == "smartnic":
        kinds = {kind.name: kind for kind in cluster.hosts}
        for one in workers:
            copied = _snapshot(one, kinds[one.kind], run)
            place = ServerPlace(store_in(MEMORY, one.name, run), _port(ports, one), copied)
            hosts[one.name] = replace(one, servers=(place,))
    if name in REDUCED:
        for one in _reducing(name, cluster):
            added(replace(one, reducer=_port(ports, one)))
    if plan.placement.fans_in:
        tree = switches.tree_of(plan, cluster)
        assert tree is not None
        for switch in tree.switches.values():
            found = hosts.get(switch.name, PlanHost(switch.name, "", switch.address))
            place_of = SwitchPlace(_port(ports, found), switch.name)
            hosts[found.name] = replace(found, switch=place_of)
    return Machines(tuple(hosts.values()), spares, stores_of=run)


def predicted_of(result: Result) -> Predicted:
    """Of a simulated plan. What of a step is no computing of a stage is its waiting."""
    stages: dict[str, dict[str, float]] = {}
    for (where, name), (seconds, _) in result.stages.items():
        if where.startswith("stage") and name in TOLD and seconds:
            stages.setdefault(where, {})[name] = seconds
    for own in stages.values():
        computing = own.get("Forward", 0.0) + own.get("Backward", 0.0)
        own["Wait"] = max(0.0, result.seconds - computing)
    return Predicted(seconds=result.seconds, stages=stages)


def directories_of(host: Host, machine: str) -> list[str]:
    """Of all SSDs of one machine; [] where it has none. Raises ConfigError where they have no
    directories."""
    if lacking := sum(ssd.count for ssd in host.ssds if not ssd.directories):
        raise ConfigError(
            f"{lacking} SSDs of host {host.name!r} have 0 directories, what rests on them needs"
            f" {lacking}",
            hint="ssds = [{ directories = [...], ... }] in the cluster file",
        )
    return [one.replace("{host}", machine) for ssd in host.ssds for one in ssd.directories]


def store_in(directory: str, machine: str, run: str = "") -> str:
    """A directory of its own for a run, in one that others may use too. run: its name, where it is
    not to find the store of another run of this machine."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{run}-{machine}" if run else machine)
    return f"{directory.rstrip('/')}/roadtrain-{name}"


def _serving(placement: str, cluster: Cluster) -> Host:
    if not cluster.spares:
        raise ConfigError(
            f"placement {placement} needs a host without devices, the cluster has none"
        )
    return cluster.spares[0]


def _reducing(placement: str, cluster: Cluster) -> list[PlanHost]:
    found = [one for kind in cluster.spares if kind.nics for one, _ in machines_of_kind(kind)]
    if not found:
        raise ConfigError(
            f"placement {placement} needs a host without devices that has a card, the cluster has"
            " none"
        )
    return found


def machines_of_kind(host: Host) -> Iterator[tuple[PlanHost, Host]]:
    """Each machine of a kind, by the name that a plan gives it, with its kind."""
    for number in range(host.count):
        name = f"{host.name}{number}" if host.count > 1 else host.name
        address = host.addresses[number] if host.addresses else ""
        yield PlanHost(name, host.name, address), host


def _workers(plan: Plan, cluster: Cluster) -> tuple[list[PlanHost], tuple[PlanHost, ...]]:
    """The machines that compute, in the order of ranks, and those with devices that are left."""
    left, used, spares = plan.parallelism.devices, [], []
    for one, kind in (pair for host in cluster.workers for pair in machines_of_kind(host)):
        many = min(kind.devices, left)
        left -= many
        if many:
            used.append(replace(one, workers=many))
        else:
            spares.append(replace(one, workers=kind.devices))
    if left:
        raise ConfigError(
            f"{plan.parallelism} is {plan.parallelism.devices} devices, the cluster has"
            f" {cluster.device_count}"
        )
    return used, tuple(spares)


def _servers(one: PlanHost, kind: Host, ports: Counter[str], run: str) -> tuple[ServerPlace, ...]:
    found = directories_of(kind, one.name) or [MEMORY]
    return tuple(ServerPlace(store_in(at, one.name, run), _port(ports, one)) for at in found)


def _snapshot(one: PlanHost, kind: Host, run: str) -> str:
    """Where a store in memory is copied to; "": nowhere, the host has no directory."""
    known = [name.replace("{host}", one.name) for ssd in kind.ssds for name in ssd.directories]
    return f"{store_in(known[0], one.name, run)}.snapshot" if known else ""


def _port(ports: Counter[str], one: PlanHost) -> int:
    """The next one at the machine's address."""
    key = one.address or one.name
    ports[key] += 1
    return PORT + ports[key] - 1
