"""The mapping of ranks to hosts: check that a parallelism fits given hosts, and propose fitting
ones.

Ranks are numbered host by host. A tensor group is inside one host. By default, a data group is
inside one cluster, because the slow networks between clusters would delay every sum of gradients;
only pipelines cross clusters (Yang et al. (Holmes), sections 2.4 and 3.2). Does NOT consider
networks or the speed of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from roadtrain.errors import ConfigError
from roadtrain.stages.parallelism import Parallelism


class HostDevices(NamedTuple):
    """A host and its number of devices. The devices of a host are consecutive ranks."""

    host: str
    cluster: str
    devices: int


class DataGroups(StrEnum):
    """Rule for the places of a data group's ranks: in one cluster, or in any clusters."""

    IN_ONE_CLUSTER = "in one cluster"
    ANYWHERE = "anywhere"


Hosts = Sequence[tuple[str, str, int]]  # HostDevices, or tuples of the same fields


def hosts_of_ranks(hosts: Hosts) -> list[HostDevices]:
    """Return the host of each rank. Raises ConfigError if a host has no devices or is in two
    clusters."""
    clusters: dict[str, str] = {}
    out: list[HostDevices] = []
    for at in (HostDevices(*host) for host in hosts):
        if at.devices < 1:
            raise ConfigError(
                f"host {at.host!r} of cluster {at.cluster!r} has {at.devices} devices",
                hint="leave out hosts without devices",
            )
        if clusters.setdefault(at.host, at.cluster) != at.cluster:
            raise ConfigError(
                f"host {at.host!r} is in cluster {clusters[at.host]!r} and in {at.cluster!r}",
                hint="give each host a unique name",
            )
        out += [at] * at.devices
    return out


def check_ranks(
    parallelism: Parallelism,
    hosts: Hosts,
    *,
    blocks: int | None = None,
    data_groups: DataGroups = DataGroups.IN_ONE_CLUSTER,
) -> list[HostDevices]:
    """Return the host of each rank, or raise ConfigError if the parallelism does not fit the hosts.
    `blocks`: the number of blocks of the model; None: the sizes of stages are not checked."""
    host_of = hosts_of_ranks(hosts)
    _check_world(parallelism, len(host_of), len(hosts))
    _check_tensor_groups(parallelism, host_of)
    if data_groups is DataGroups.IN_ONE_CLUSTER:
        _check_data_groups(parallelism, host_of)
    if blocks is not None:
        parallelism.layers(blocks)
    return host_of


def _check_world(parallelism: Parallelism, world: int, hosts: int) -> None:
    available = f"{hosts} hosts have {world} devices"
    for stage, (first, following) in enumerate(itertools.pairwise(parallelism.first_ranks)):
        if first >= world:
            raise ConfigError(
                f"stage {stage} (ranks {first} to {following - 1}) has no devices: {available}",
                hint=f"start {parallelism.devices} ranks for {parallelism}, or lower pp or dp",
            )
    if parallelism.devices != world:
        raise ConfigError(
            f"{parallelism} needs {parallelism.devices} ranks, but {available}",
            hint="the widths of all stages, times tp, must add up to the number of devices",
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
                hint="tp must divide the number of devices of every host",
            )


def _check_data_groups(parallelism: Parallelism, host_of: Sequence[HostDevices]) -> None:
    clusters = [at.cluster for at in host_of]
    for group in parallelism.data_groups():
        names = list(dict.fromkeys(clusters[rank] for rank in group))
        if len(names) > 1:
            counts = [sum(clusters[rank] == name for rank in group) for name in names]
            stage = parallelism.position(group[0]).stage
            mixed = " and ".join(f"{n} of {name!r}" for n, name in zip(counts, names))
            raise ConfigError(
                f"the data group of stage {stage} (ranks {group[0]} to {group[-1]}) mixes clusters:"
                f" {mixed}",
                hint="keep each stage inside one cluster (`widths` sets the number of ranks of each"
                " stage), or allow data groups across clusters",
            )


def _replicas(hosts: Hosts, tp: int) -> list[int]:
    """Return the number of tensor groups of each cluster, in rank order. Raises ConfigError if tp
    does not divide a host's devices, or if the hosts of a cluster are not consecutive."""
    host_of = hosts_of_ranks(hosts)
    for at in host_of:
        if at.devices % tp:
            raise ConfigError(
                f"tp {tp} does not divide the {at.devices} devices of host {at.host!r}",
                hint="choose a tp that divides the devices of every host",
            )
    clusters = [at.cluster for at in host_of]
    if not clusters:
        raise ConfigError("no hosts are listed, but at least 1 is needed", hint="list the hosts")
    names = [name for name, _ in itertools.groupby(clusters)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"the ranks of cluster {twice!r} are split into {names.count(twice)} ranges",
            hint="list the hosts of each cluster one after another",
        )
    return [clusters.count(name) // tp for name in names]


def suited_parallelisms(hosts: Hosts, blocks: int, *, tp: int = 1) -> Iterator[Parallelism]:
    """Yield all pipelines in which each cluster has one or more stages of equal width (number of
    replicas).

    Pipelines with fewer stages come first, then those with more even widths. `blocks`: the number
    of blocks of the model, which limits the number of stages. Raises ConfigError if tp does not
    divide a host's devices, or if there are more clusters than blocks.
    """
    replicas = _replicas(hosts, tp)
    if len(replicas) > blocks:
        raise ConfigError(
            f"{len(replicas)} clusters need at least one block each, but the model has {blocks}",
            hint="use fewer clusters, or divide the model into smaller blocks",
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
