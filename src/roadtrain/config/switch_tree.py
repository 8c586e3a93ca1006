"""The tree of switches that sum, as a cluster's cards and links give it.

    workers' cards -> switch of the rack -> link -> root switch -> the server's card

The root is where the server is; without a server, the switch that the fewest links lead to from all
others. Every switch of the tree sums, since a sum of a part must not be added up elsewhere again.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roadtrain.config.cluster import Cluster, Host, LinkRate, Nic, Switch
from roadtrain.errors import ConfigError
from roadtrain.stages.networks import listed


@dataclass(frozen=True)
class SwitchTree:
    """`cards`: of each host, in order, the one that leads to its switch."""

    root: str
    switches: Mapping[str, Switch]  # of the tree, the root first, each after its parent
    parents: Mapping[str, str]  # of each of them but the root, the one above it
    cards: tuple[Nic, ...]
    at: tuple[str, ...]  # of each host the name of its switch
    node: Nic | None = None  # the server's card
    # of each switch but the root, the link to its parent
    links: Mapping[str, LinkRate] = field(default_factory=dict)

    def children(self, switch: str) -> int:
        """What sends to it: hosts and switches below."""
        below = sum(parent == switch for parent in self.parents.values())
        return self.at.count(switch) + below

    def path(self, switch: str) -> list[str]:
        """From it to the root, both included."""
        out = [switch]
        while out[-1] in self.parents:
            out.append(self.parents[out[-1]])
        return out

    @property
    def levels(self) -> int:
        """Switches that a packet of the host farthest away crosses."""
        return max(len(self.path(switch)) for switch in self.at)

    @property
    def latency(self) -> float:
        """Seconds of one way from the host farthest away, without what switches take."""
        ways = (
            card.latency + sum(self.links[one].latency for one in self.path(switch)[:-1])
            for card, switch in zip(self.cards, self.at, strict=True)
        )
        return max(ways)

    @property
    def multicasts(self) -> bool:
        """Whether the network copies a packet to all hosts."""
        return all(switch.multicasts for switch in self.switches.values())


def switch_tree(cluster: Cluster, hosts: Sequence[Host], node: Host | None = None) -> SwitchTree:
    """`hosts`: that compute; `node`: the server's. Raises ConfigError where no tree of switches
    that sum leads from all of them to one, with what is lacking."""
    known = {switch.name: switch for switch in cluster.switches if switch.sums}
    if not known:
        raise ConfigError(
            f"no switch of {cluster.name} sums",
            hint="give one `sums = true`: a switch of the network that can, or a host that runs"
            " `roadtrain serve HOST:PORT --switch`",
        )
    cards = tuple(_card(cluster, host, known) for host in hosts)
    at = tuple(cluster.switch_of(card) for card in cards)
    above = None if node is None else _card(cluster, node, known)
    wanted = list(dict.fromkeys(at))
    roots = [cluster.switch_of(above)] if above is not None else list(known)
    found = [(root, _from(cluster, known, root, wanted)) for root in roots]
    ways = [(root, parents) for root, parents in found if parents is not None]
    if not ways:
        raise ConfigError(
            f"switches {listed(wanted)} of {cluster.name} do not reach"
            f" {roots[0] if above is not None else 'one another'} over switches that sum",
            hint="give [[links]] between them, and `sums = true` to those on the way",
        )
    root, parents = min(ways, key=lambda way: len(way[1]))
    used = [root, *parents]
    return SwitchTree(
        root,
        {name: known[name] for name in used},
        parents,
        cards,
        at,
        above,
        {name: _link(cluster, name, parent) for name, parent in parents.items()},
    )


def _card(cluster: Cluster, host: Host, known: Mapping[str, Switch]) -> Nic:
    found = [nic for nic in host.nics if cluster.switch_of(nic) in known]
    if not found:
        have = listed([cluster.switch_of(nic) for nic in host.nics]) or "none"
        raise ConfigError(
            f"host {host.name} is at no switch that sums (its cards lead to {have}; those that sum"
            f" are {listed(list(known))})",
            hint="give its switch `sums = true`, or its card a `switch` that does",
        )
    return max(found, key=lambda nic: nic.total)


def _from(
    cluster: Cluster, known: Mapping[str, Switch], root: str, wanted: Sequence[str]
) -> dict[str, str] | None:
    """Parents of the switches that lead from `wanted` to `root` by the fewest links, each after
    its own parent; None where one is not reached."""
    parents: dict[str, str] = {}
    front = [root]
    for here in front:  # grows meanwhile
        for link in cluster.links:
            there = link.between[link.between[0] == here]
            new = there in known and there != root and there not in parents
            if new and here in link.between:
                parents[there] = here
                front.append(there)
    if any(one != root and one not in parents for one in wanted):
        return None
    used: dict[str, None] = {}
    for one in wanted:
        while one != root:
            used[one] = None
            one = parents[one]
    return {one: parents[one] for one in front if one in used}


def _link(cluster: Cluster, one: str, other: str) -> LinkRate:
    found = [link for link in cluster.links if {*link.between} == {one, other}]
    return min(found, key=lambda link: link.rate)
