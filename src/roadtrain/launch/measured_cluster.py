"""A cluster with the rates that a run's hosts showed: what `launch --replan` plans for. Pure.

Where a card's rate, a link between switches or a device's speed is further than WITHIN from what
the plan's cluster says, it gets what was measured, and is listed in `measured`. A kind whose hosts
are no longer alike becomes a kind for each host, named as the plan names the host. A card is slower
than stated where all its pairs are, by the slower card of each pair; its rate is that of its best
pair in its worse direction. So one slow host does not make its peers slow, unless there are only
two. Does NOT measure, nor know a placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from roadtrain.config.cluster import Cluster, Host, LinkRate, Nic
from roadtrain.config.machines import Machines, PlanHost
from roadtrain.units import show_flops, show_rate

WITHIN = 0.15


class LinkSeen(msgspec.Struct, frozen=True, array_like=True):
    """A link from one host of the run to another, as measured."""

    sender: str
    receiver: str
    rate: float  # bytes of data a second
    latency: float  # seconds


def measured_cluster(
    cluster: Cluster,
    machines: Machines,
    seen: Sequence[LinkSeen],
    slower: Mapping[str, float],
    network: float,
) -> tuple[Cluster, dict[str, str]]:
    """slower: host -> how many times as long as predicted its workers compute. network: the share
    of a card's rate that data has, by which a measured rate becomes a card's. Also returns what
    differs, as `Cluster.measured` names it, in words; the same cluster where nothing does."""
    every = (*machines.hosts, *machines.spares)
    rates = _card_rates(cluster, every, seen, network)
    changes: dict[str, str] = {}
    hosts: list[Host] = []
    for kind in cluster.hosts:
        mine = [host for host in every if host.kind == kind.name]
        new = [_changed(kind, host.name, rates.get(host.name), slower, changes) for host in mine]
        hosts += _kinds(kind, mine, new)
    links = tuple(_links(cluster, every, seen, network, changes))
    measured = dict.fromkeys((*cluster.measured, *changes))
    update = {"hosts": tuple(hosts), "links": links, "measured": tuple(measured)}
    return (cluster.model_copy(update=update) if changes else cluster), changes


def _nic(kind: Host) -> Nic | None:
    """By which the run's hosts reach each other: the fastest."""
    return max(kind.nics, key=lambda nic: nic.total, default=None)


def _nics(cluster: Cluster, every: Sequence[PlanHost]) -> dict[str, Nic]:
    """That of each host which has one."""
    kinds = {host.name: host for host in cluster.hosts}
    nics = {host.name: _nic(kinds[host.kind]) for host in every if host.kind in kinds}
    return {name: nic for name, nic in nics.items() if nic is not None}


def _switches(cluster: Cluster, every: Sequence[PlanHost]) -> dict[str, str]:
    return {name: cluster.switch_of(nic) for name, nic in _nics(cluster, every).items()}


def _card_rates(
    cluster: Cluster, every: Sequence[PlanHost], links: Sequence[LinkSeen], network: float
) -> dict[str, float]:
    """Of the hosts whose card is not as the cluster says: bytes a second."""
    at = _switches(cluster, every)
    stated = {name: nic.total for name, nic in _nics(cluster, every).items()}
    near = [one for one in links if at.get(one.sender) == at.get(one.receiver)]
    rates: dict[str, float] = {}
    for name in at:
        ways = [
            [
                (one.rate / network, min(stated[one.sender], stated[one.receiver]))
                for one in near
                if name == (one.sender, one.receiver)[end]
            ]
            for end in (0, 1)
        ]
        if not all(ways):
            continue
        best = min(max(rate for rate, _ in way) for way in ways)
        slow = any(all(rate < (1 - WITHIN) * most for rate, most in way) for way in ways)
        if slow or best > (1 + WITHIN) * stated[name]:
            rates[name] = best
    return rates


def _differing(now: str, before: str) -> str:
    return f"{now} measured, the plan has {before}"


def _changed(
    kind: Host,
    name: str,
    rate: float | None,
    slower: Mapping[str, float],
    changes: dict[str, str],
) -> Host:
    """One host of the kind, as it showed itself."""
    update: dict[str, object] = {}
    nic = _nic(kind)
    if rate is not None and nic is not None:
        changes[f"hosts.{name}.nics"] = _differing(show_rate(rate), show_rate(nic.total))
        own = nic.model_copy(update={"rate": rate / nic.count})
        update["nics"] = tuple(own if one is nic else one for one in kind.nics)
    times = slower.get(name, 1.0)
    if kind.device is not None and abs(times - 1) > WITHIN:
        flops = kind.device.flops / times
        said = _differing(show_flops(flops), show_flops(kind.device.flops))
        changes[f"hosts.{name}.device"] = said
        update["device"] = kind.device.model_copy(update={"flops": flops})
    return kind.model_copy(update=update) if update else kind


def _kinds(kind: Host, mine: Sequence[PlanHost], new: Sequence[Host]) -> Iterable[Host]:
    """The kind as it is where its hosts are alike, else one for each; hosts that the plan does not
    use stay of their kind. Hosts that serve stay a kind, as a plan has servers on one."""
    if all(host is kind for host in new):
        return [kind]
    if len(new) == kind.count and all(host == new[0] for host in new):
        return [new[0]]
    if any(one.servers for one in mine):
        # servers that serve alike shares can rely on the slowest
        return [min(new, key=lambda host: max((nic.total for nic in host.nics), default=0.0))]
    addresses = kind.addresses or tuple(host.address for host in mine)
    own = [
        host.model_copy(
            update={
                "name": one.name,
                "count": 1,
                "addresses": (one.address,) if one.address else (),
            }
        )
        for one, host in zip(mine, new, strict=True)
    ]
    if left := kind.count - len(new):
        used = {one.address for one in mine}
        rest = tuple(each for each in addresses if each not in used)
        own.append(kind.model_copy(update={"count": left, "addresses": rest}))
    return own


def _links(
    cluster: Cluster,
    every: Sequence[PlanHost],
    seen: Sequence[LinkSeen],
    network: float,
    changes: dict[str, str],
) -> Iterator[LinkRate]:
    """Between switches: what the best pair of hosts across it has, where that is not what the link
    and both cards say."""
    at = _switches(cluster, every)
    for link in cluster.links:
        across = [
            one for one in seen if {at.get(one.sender), at.get(one.receiver)} == {*link.between}
        ]
        ways = [
            max((one.rate for one in across if at[one.sender] == end), default=0.0)
            for end in link.between
        ]
        rate, most = min(ways) / network, _most_across(cluster, link)
        stated = min(link.rate, most)
        if not rate or abs(rate - stated) <= WITHIN * stated:
            yield link
            continue
        said = _differing(show_rate(rate), show_rate(link.rate))
        changes[f"links.{'-'.join(link.between)}"] = said
        yield link.model_copy(update={"rate": rate})


def _most_across(cluster: Cluster, link: LinkRate) -> float:
    """What the best pair of cards at both its ends has."""
    best = {
        end: max(
            (
                nic.total
                for host in cluster.hosts
                for nic in host.nics
                if cluster.switch_of(nic) == end
            ),
            default=float("inf"),
        )
        for end in link.between
    }
    return min(best.values())
