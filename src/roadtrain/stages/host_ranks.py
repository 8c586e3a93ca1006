"""On which hosts the ranks of a parallelism are, whether it can work there, and which parallelism
suits given clusters.

Ranks are numbered host by host. A tensor group lies inside one host. A data group lies inside one
cluster, as the slow networks between clusters would hold up every sum of gradients: only pipelines
cross (Yang et al. (Holmes), sections 2.4 and 3.2). Clusters may differ in hosts, and hosts in
devices. Arithmetic only. Does NOT know which network a group uses, nor how fast a device is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from roadtrain.errors import ConfigError
from roadtrain.stages.parallelism import Parallelism


class HostDevices(NamedTuple):
    """A host whose `devices` are the next ranks."""

    host: str
    cluster: str
    devices: int


class DataGroups(StrEnum):
    """Where the ranks of one data group may be."""

    IN_ONE_CLUSTER = "in one cluster"
    ANYWHERE = "anywhere"


Hosts = Sequence[tuple[str, str, int]]  # HostDevices, or such tuples


def hosts_of_ranks(hosts: Hosts) -> list[HostDevices]:
    """The host of each rank. Raises ConfigError for a host of no devices or of two clusters."""
    clusters: dict[str, str] = {}
    out: list[HostDevices] = []
    for one in (HostDevices(*host) for host in hosts):
        if one.devices < 1:
            raise ConfigError(
                f"host {one.host!r} of cluster {one.cluster!r} has {one.devices} devices",
                hint="leave a host out that computes nothing",
            )
        if clusters.setdefault(one.host, one.cluster) != one.cluster:
            raise ConfigError(
                f"host {one.host!r} is in cluster {clusters[one.host]!r} and in {one.cluster!r}",
                hint="give each host a name of its own",
            )
        out += [one] * one.devices
    return out


def check_ranks(
    parallelism: Parallelism,
    hosts: Hosts,
    *,
    blocks: int | None = None,
    data_groups: DataGroups = DataGroups.IN_ONE_CLUSTER,
) -> list[HostDevices]:
    """The host of each rank. `blocks`: of the model, to be divided into stages. Raises ConfigError
    where the parallelism cannot work on these hosts: the first reason, with both numbers."""
    host_of = hosts_of_ranks(hosts)
    _check_world(parallelism, len(host_of), len(hosts))
    _check_tensor_groups(parallelism, host_of)
    if data_groups is DataGroups.IN_ONE_CLUSTER:
        _check_data_groups(parallelism, host_of)
    if blocks is not None:
        parallelism.layers(blocks)
    return host_of


def _check_world(parallelism: Parallelism, world: int, hosts: int) -> None:
    there = f"{hosts} hosts have {world} devices"
    for stage, (first, following) in enumerate(itertools.pairwise(parallelism.first_ranks)):
        if first >= world:
            raise ConfigError(
                f"stage {stage} (ranks {first} to {following - 1}) has no host: {there}",
                hint=f"start {parallelism.devices} ranks for {parallelism}, or lower pp or dp",
            )
    if parallelism.devices != world:
        raise ConfigError(
            f"{parallelism} is {parallelism.devices} ranks, {there}",
            hint="the widths of all stages, times tp, add up to the number of devices",
        )


def _check_tensor_groups(parallelism: Parallelism, host_of: Sequence[HostDevices]) -> None:
    for number, group in enumerate(parallelism.tensor_groups()):
        names = dict.fromkeys(host_of[rank].host for rank in group)
        if len(names) > 1:
            first = host_of[group[0]]
            raise ConfigError(
                f"tensor group {number} (ranks {group[0]} to {group[-1]}) crosses hosts"
                f" {' and '.join(map(repr, names))}: tp is {parallelism.tp}, host {first.host!r}"
                f" has {first.devices} devices",
                hint="tp divides the devices of every host",
            )


def _check_data_groups(parallelism: Parallelism, host_of: Sequence[HostDevices]) -> None:
    clusters = [one.cluster for one in host_of]
    for group in parallelism.data_groups():
        names = list(dict.fromkeys(clusters[rank] for rank in group))
        if len(names) > 1:
            counts = [sum(clusters[rank] == name for rank in group) for name in names]
            stage = parallelism.position(group[0]).stage
            said = " and ".join(f"{n} of {name!r}" for n, name in zip(counts, names))
            raise ConfigError(
                f"the data group of stage {stage} (ranks {group[0]} to {group[-1]}) mixes clusters:"
                f" {said}",
                hint="let every border between clusters be one between stages (widths gives each"
                " stage its own number of ranks), or say that data groups may be anywhere",
            )


def _replicas(hosts: Hosts, tp: int) -> list[int]:
    """How many tensor groups each cluster's devices make, in rank order. Raises ConfigError where
    tp does not divide a host's devices, or a cluster's hosts do not follow each other."""
    host_of = hosts_of_ranks(hosts)
    for one in host_of:
        if one.devices % tp:
            raise ConfigError(
                f"tp {tp} does not divide the {one.devices} devices of host {one.host!r}",
                hint="a tensor group lies inside one host",
            )
    clusters = [one.cluster for one in host_of]
    if not clusters:
        raise ConfigError("there are 0 hosts with devices, 1 is needed", hint="give the hosts")
    names = [name for name, _ in itertools.groupby(clusters)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"the ranks of cluster {twice!r} are {names.count(twice)} runs with others between",
            hint="number the hosts of a cluster one after another",
        )
    return [clusters.count(name) // tp for name in names]


def suited_parallelisms(hosts: Hosts, blocks: int, *, tp: int = 1) -> Iterator[Parallelism]:
    """Every pipeline with one or several stages of one width in each cluster, so that all data
    groups are as `check_ranks` demands: the fewest stages first, of those the most even widths.
    `blocks`: of the model, which are at least as many as stages. Raises ConfigError where tp does
    not divide a host's devices, or clusters are more than blocks."""
    replicas = _replicas(hosts, tp)
    if len(replicas) > blocks:
        raise ConfigError(
            f"{len(replicas)} clusters need a stage each, the model has {blocks} blocks",
            hint="use fewer clusters, or smaller blocks",
        )
    divisors = [[n for n in range(1, own + 1) if own % n == 0] for own in replicas]
    found = [
        tuple(own // n for own, n in zip(replicas, stages) for _ in range(n))
        for stages in itertools.product(*divisors)
        if sum(stages) <= blocks
    ]
    found.sort(key=lambda widths: (len(widths), max(widths) - min(widths), widths))
    for widths in found:
        yield Parallelism(tp=tp, pp=len(widths), widths=widths)
