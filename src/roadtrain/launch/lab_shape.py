"""LabShape: which lab the cluster of a plan is: hosts by the plan's names, with their cards, links
and SSDs, as far as a lab can be them. Does NOT make anything (lab_engine.py).

A card's rate, a link's rate and an SSD's two rates are emulated. Latency, an SSD's one rate of
reads and writes together, its host's uplink and devices are not: `left_out` says what the cluster
has of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roadtrain.config.cluster import Cluster, Host, Ssd
from roadtrain.config.machines import Machines
from roadtrain.errors import ConfigError
from roadtrain.lab import CARD_MOST, LabNic
from roadtrain.units import show_rate


@dataclass(frozen=True)
class LabShape:
    """Every mapping is by the name of a host. `cards`: which NIC the others reach it by."""

    hosts: Mapping[str, Host]
    workers: Mapping[str, int]  # the run begins with these, its spares too; others may come
    cards: Mapping[str, int]
    cluster: Cluster

    def nics(self, host: str) -> list[LabNic]:
        return [LabNic(nic.total, self.cluster.switch_of(nic)) for nic in self.hosts[host].nics]

    def links(self) -> dict[tuple[str, str], float]:
        return {link.between: link.rate for link in self.cluster.links}

    def ssds(self, host: str) -> list[tuple[str, Ssd]]:
        """SSDs that say where they are mounted for the host's processes, each with that
        directory."""
        return [
            (directory.replace("{host}", host), ssd)
            for ssd in self.hosts[host].ssds
            for directory in ssd.directories
        ]

    def left_out(self) -> list[str]:
        """What the cluster has and the lab does not, in words."""
        nics = [nic for host in self.hosts.values() for nic in host.nics]
        ssds = [ssd for host in self.hosts.values() for ssd in host.ssds if ssd.directories]
        late = any(nic.latency for nic in nics) or any(link.latency for link in self.cluster.links)
        mixed = any(ssd.mixed < 2 for ssd in ssds)
        uplink = any(host.uplink for host in self.hosts.values() if host.ssds)
        return [
            *(["the latency of cards and links"] if late else []),
            *(["the one rate that reads and writes of an SSD share"] if mixed else []),
            *(["the uplink of a host's SSDs"] if uplink else []),
        ]


def lab_shape(cluster: Cluster, machines: Machines) -> LabShape:
    """Raises ConfigError for what no lab can be."""
    kinds = {host.name: host for host in cluster.hosts}
    planned = (*machines.hosts, *machines.spares)
    hosts: dict[str, Host] = {}
    for one in planned:
        if one.kind not in kinds:
            raise ConfigError(
                f"host {one.name} of the plan is of kind {one.kind!r}, its cluster has"
                f" {', '.join(kinds)}"
            )
        hosts[one.name] = kinds[one.kind]
    for kind in cluster.hosts:
        hosts |= dict.fromkeys(_further(kind, list(hosts.values()).count(kind), hosts), kind)
    for name, host in hosts.items():
        if not host.nics:
            raise ConfigError(f"host {name} has 0 cards, in a lab it needs at least 1")
        if fast := next((nic for nic in host.nics if nic.total > CARD_MOST), None):
            raise ConfigError(
                f"a card of {show_rate(fast.total)} of host {name} cannot be emulated here, at most"
                f" {show_rate(CARD_MOST)}",
                hint="slower cards in the cluster file, and plan again",
            )
    workers = {one.name: one.workers for one in planned}
    return LabShape(hosts, workers, _cards(cluster, hosts), cluster)


def _further(kind: Host, planned: int, taken: Mapping[str, Host]) -> list[str]:
    """Names of the hosts of this kind that the plan does not use."""
    names = [f"{kind.name}{n}" for n in range(kind.count)] if kind.count > 1 else [kind.name]
    return [name for name in names if name not in taken][: kind.count - planned]


def _cards(cluster: Cluster, hosts: Mapping[str, Host]) -> dict[str, int]:
    """By which NIC each is reached: one of those by which all reach each other fastest."""
    kinds = list({host.name: host for host in hosts.values()}.values())
    try:
        common = cluster.common(kinds)
    except ConfigError:  # not all of them talk to each other
        return dict.fromkeys(hosts, 0)
    found = {}
    for kind, way in zip(kinds, common):
        at = (way.kind, cluster.switch_of(way))
        same = [k for k, nic in enumerate(kind.nics) if (nic.kind, cluster.switch_of(nic)) == at]
        found[kind.name] = max(same, key=lambda k: kind.nics[k].total)
    return {name: found[host.name] for name, host in hosts.items()}


def check_rates(ssds: Sequence[Ssd], read: float, write: float) -> None:
    """Raises ConfigError where all of these at once are faster than what they are emulated on."""
    for what, asked, real in (
        ("read", sum(ssd.read for ssd in ssds), read),
        ("write", sum(ssd.write for ssd in ssds), write),
    ):
        if asked > real:
            raise ConfigError(
                f"{len(ssds)} SSDs that {what} {show_rate(asked)} together cannot be emulated here,"
                f" at most {show_rate(real)}",
                hint="slower SSDs in the cluster file, and plan again",
            )
