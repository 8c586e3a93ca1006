"""The tree of summing switches in a cluster, found from the cluster's network cards and links.

    workers' cards -> switch of the rack -> link -> root switch -> the server's card

The root is the server's switch. Without a server, it is the switch that gives the smallest tree.
Every switch of the tree must sum, because a switch that only forwards would pass on several partial
sums instead of their total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roadtrain.config.cluster import Cluster, Host, LinkRate, Nic, Switch
from roadtrain.errors import ConfigError
from roadtrain.stages.networks import listed


@dataclass(frozen=True)
class SwitchTree:
    """A tree of summing switches from the workers' hosts to a root switch."""

    root: str
    switches: Mapping[str, Switch]  # by name; the root is first, each switch is after its parent
    parents: Mapping[str, str]  # for each switch except the root, the name of its parent
    cards: tuple[Nic, ...]  # for each host, the card that leads to its switch
    at: tuple[str, ...]  # for each host, the name of its switch
    node: Nic | None = None  # the network card of the server's host; None without a server
    # for each switch except the root, the link to its parent
    links: Mapping[str, LinkRate] = field(default_factory=dict)

    def children(self, switch: str) -> int:
        """Return the number of hosts and switches that send directly to a switch."""
        below = sum(parent == switch for parent in self.parents.values())
        return self.at.count(switch) + below

    def path(self, switch: str) -> list[str]:
        """Return the switches from `switch` to the root, both included."""
        out = [switch]
        while out[-1] in self.parents:
            out.append(self.parents[out[-1]])
        return out

    @property
    def levels(self) -> int:
        """Number of switches that a packet from the most distant host crosses."""
        return max(len(self.path(switch)) for switch in self.at)

    @property
    def latency(self) -> float:
        """One-way latency in seconds from the most distant host to the root, without the delays
        inside switches."""
        routes = (
            card.latency + sum(self.links[name].latency for name in self.path(switch)[:-1])
            for card, switch in zip(self.cards, self.at, strict=True)
        )
        return max(routes)

    @property
    def multicasts(self) -> bool:
        """Whether every switch of the tree can deliver one packet to many hosts."""
        return all(switch.multicasts for switch in self.switches.values())


def switch_tree(cluster: Cluster, hosts: Sequence[Host], node: Host | None = None) -> SwitchTree:
    """Find the tree of summing switches from `hosts` (the compute hosts) to `node` (the server's
    host; None without a server). Raises a ConfigError that says what is missing if there is no
    tree."""
    summing = {switch.name: switch for switch in cluster.switches if switch.sums}
    if not summing:
        raise ConfigError(
            f"no switch of cluster {cluster.name!r} sums gradients",
            hint="set `sums = true` for a switch of the network that can sum, or for a host that"
            " runs `roadtrain serve HOST:PORT --switch`",
        )
    cards = tuple(_card(cluster, host, summing) for host in hosts)
    at = tuple(cluster.switch_of(card) for card in cards)
    above = None if node is None else _card(cluster, node, summing)
    needed = list(dict.fromkeys(at))
    roots = [cluster.switch_of(above)] if above is not None else list(summing)
    found = [(root, _from(cluster, summing, root, needed)) for root in roots]
    trees = [(root, parents) for root, parents in found if parents is not None]
    if not trees:
        raise ConfigError(
            f"switches {listed(needed)} of cluster {cluster.name!r} are not connected to"
            f" {roots[0] if above is not None else 'each other'} by switches that sum",
            hint="add [[links]] between these switches, and `sums = true` to switches in between",
        )
    root, parents = min(trees, key=lambda tree: len(tree[1]))
    used = [root, *parents]
    return SwitchTree(
        root,
        {name: summing[name] for name in used},
        parents,
        cards,
        at,
        above,
        {name: _link(cluster, name, parent) for name, parent in parents.items()},
    )


def _card(cluster: Cluster, host: Host, summing: Mapping[str, Switch]) -> Nic:
    found = [nic for nic in host.nics if cluster.switch_of(nic) in summing]
    if not found:
        have = listed([cluster.switch_of(nic) for nic in host.nics]) or "none"
        raise ConfigError(
            f"host {host.name} is connected to no switch that sums (its cards lead to {have};"
            f" switches that sum are {listed(list(summing))})",
            hint="set `sums = true` for the host's switch, or connect a card to a switch that sums",
        )
    return max(found, key=lambda nic: nic.total)


def _from(
    cluster: Cluster, summing: Mapping[str, Switch], root: str, needed: Sequence[str]
) -> dict[str, str] | None:
    """Return each summing switch between the switches `needed` and the `root`, except the root,
    with its parent. The switches nearest to the root come first. Returns None if some are not
    connected."""
    parents: dict[str, str] = {}
    front = [root]
    for here in front:  # breadth first: `front` grows while it is iterated
        for link in cluster.links:
            there = link.between[link.between[0] == here]
            new = there in summing and there != root and there not in parents
            if new and here in link.between:
                parents[there] = here
                front.append(there)
    if any(switch != root and switch not in parents for switch in needed):
        return None
    used: dict[str, None] = {}
    for switch in needed:
        while switch != root:
            used[switch] = None
            switch = parents[switch]
    return {switch: parents[switch] for switch in front if switch in used}


def _link(cluster: Cluster, a: str, b: str) -> LinkRate:
    found = [link for link in cluster.links if {*link.between} == {a, b}]
    return min(found, key=lambda link: link.rate)
