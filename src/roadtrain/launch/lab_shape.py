"""LabShape: a description of the lab that emulates a plan's cluster: hosts with network cards and
SSDs, and links between switches. Does NOT create anything (lab_engine.py).

A lab emulates the rates of cards and links and the read and write rates of SSDs. It does not
emulate latency, the combined read-write rate of an SSD, the uplink of a host's SSDs, or devices.
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
    """The hosts of a lab and their hardware. The keys of all mappings are host names."""

    hosts: Mapping[str, Host]  # the kind of each host
    workers: Mapping[str, int]  # number of workers of each host of the plan, spare hosts included
    cards: Mapping[str, int]  # index of the NIC by which other hosts reach the host
    cluster: Cluster

    def nics(self, host: str) -> list[LabNic]:
        return [LabNic(nic.total, self.cluster.switch_of(nic)) for nic in self.hosts[host].nics]

    def links(self) -> dict[tuple[str, str], float]:
        return {link.between: link.rate for link in self.cluster.links}

    def ssds(self, host: str) -> list[tuple[str, Ssd]]:
        """Return a pair (directory, SSD) for each directory at which an SSD of the host is
        mounted."""
        return [
            (directory.replace("{host}", host), ssd)
            for ssd in self.hosts[host].ssds
            for directory in ssd.directories
        ]

    def left_out(self) -> list[str]:
        """Describe what the lab does not emulate of the cluster, except devices."""
        nics = [nic for host in self.hosts.values() for nic in host.nics]
        ssds = [ssd for host in self.hosts.values() for ssd in host.ssds if ssd.directories]
        late = any(nic.latency for nic in nics) or any(link.latency for link in self.cluster.links)
        mixed = any(ssd.mixed < 2 for ssd in ssds)
        uplink = any(host.uplink for host in self.hosts.values() if host.ssds)
        return [
            *(["the latency of cards and links"] if late else []),
            *(["the combined rate of an SSD's reads and writes"] if mixed else []),
            *(["the uplink of a host's SSDs"] if uplink else []),
        ]


def lab_shape(cluster: Cluster, machines: Machines) -> LabShape:
    """Return the lab for a plan. Raises ConfigError if a lab cannot emulate the plan's cluster."""
    kinds = {host.name: host for host in cluster.hosts}
    planned = (*machines.hosts, *machines.spares)
    hosts: dict[str, Host] = {}
    for host in planned:
        if host.kind not in kinds:
            raise ConfigError(
                f"host {host.name} of the plan has kind {host.kind!r}, but the kinds of the plan's"
                f" cluster are {', '.join(kinds)}"
            )
        hosts[host.name] = kinds[host.kind]
    for kind in cluster.hosts:
        hosts |= dict.fromkeys(_unplanned(kind, list(hosts.values()).count(kind), hosts), kind)
    for name, kind in hosts.items():
        if not kind.nics:
            raise ConfigError(f"host {name} has 0 network cards, but a lab needs at least 1")
        if fast := next((nic for nic in kind.nics if nic.total > CARD_MOST), None):
            raise ConfigError(
                f"host {name} has a card of {show_rate(fast.total)}, but a lab can emulate at most"
                f" {show_rate(CARD_MOST)}",
                hint="put slower cards into the cluster file, and plan again",
            )
    workers = {host.name: host.workers for host in planned}
    return LabShape(hosts, workers, _cards(cluster, hosts), cluster)


def _unplanned(kind: Host, planned: int, used: Mapping[str, Host]) -> list[str]:
    """Return a name for each host of the kind `kind` that the plan does not use. `planned`: the
    number of hosts of this kind that it uses. `used`: the named hosts."""
    names = [f"{kind.name}{n}" for n in range(kind.count)] if kind.count > 1 else [kind.name]
    return [name for name in names if name not in used][: kind.count - planned]


def _cards(cluster: Cluster, hosts: Mapping[str, Host]) -> dict[str, int]:
    """Return the index of each host's NIC in the fastest network that connects all hosts, or 0
    without such a network."""
    kinds = list({host.name: host for host in hosts.values()}.values())
    try:
        common = cluster.common(kinds)
    except ConfigError:  # no network connects all hosts
        return dict.fromkeys(hosts, 0)
    found = {}
    for kind, way in zip(kinds, common):
        at = (way.kind, cluster.switch_of(way))
        same = [k for k, nic in enumerate(kind.nics) if (nic.kind, cluster.switch_of(nic)) == at]
        found[kind.name] = max(same, key=lambda k: kind.nics[k].total)
    return {name: found[host.name] for name, host in hosts.items()}


def check_rates(ssds: Sequence[Ssd], read: float, write: float) -> None:
    """Raise ConfigError if all emulated SSDs together are faster than this machine's disk. `read`
    and `write`: the rates of the disk in bytes per second."""
    for verb, total, real in (
        ("read", sum(ssd.read for ssd in ssds), read),
        ("write", sum(ssd.write for ssd in ssds), write),
    ):
        if total > real:
            raise ConfigError(
                f"{len(ssds)} SSDs {verb} {show_rate(total)} together, but this machine's disk can"
                f" {verb} at most {show_rate(real)}",
                hint="put slower SSDs into the cluster file, and plan again",
            )
