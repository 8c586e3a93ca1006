"""Update a plan's cluster with the rates measured on a run's hosts, for `launch --replan`. Does no
I/O.

A measured value that differs from the stated value by more than 15 percent replaces it. If the
hosts of a kind differ afterwards, the kind is split into one kind per host.

Rates are measured between pairs of hosts. A pair is too slow if its rate is more than 15 percent
below the stated rates of both cards. A card counts as slower than stated if all pairs in which its
host sends, or all pairs in which its host receives, are too slow. So one slow host does not make
its peers look slow, unless there are only two hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from roadtrain.config.cluster import Cluster, Host, LinkRate, Nic
from roadtrain.config.machines import Machines, PlanHost
from roadtrain.units import show_flops, show_rate

WITHIN = 0.15  # largest relative difference at which a stated value is kept


class MeasuredLink(msgspec.Struct, frozen=True, array_like=True):
    """The measured rate and latency from one host of the run to another host."""

    sender: str
    receiver: str
    rate: float  # bytes of payload per second
    latency: float  # seconds


def measured_cluster(
    cluster: Cluster,
    machines: Machines,
    seen: Sequence[MeasuredLink],
    slower: Mapping[str, float],
    network: float,
) -> tuple[Cluster, dict[str, str]]:
    """Return the cluster with the measured values, and a dict from the name of each changed value
    to a text on the change. `slower`: for a host name, the factor by which the host's workers
    compute slower than predicted. `network`: the share of a card's rate that is payload, to which
    measured rates are converted."""
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
    """Return the fastest NIC of a kind of host, by which hosts reach each other; None without a
    NIC."""
    return max(kind.nics, key=lambda nic: nic.total, default=None)


def _nics(cluster: Cluster, every: Sequence[PlanHost]) -> dict[str, Nic]:
    """Return the fastest NIC of each host that has one, by the host's name."""
    kinds = {host.name: host for host in cluster.hosts}
    nics = {host.name: _nic(kinds[host.kind]) for host in every if host.kind in kinds}
    return {name: nic for name, nic in nics.items() if nic is not None}


def _switches(cluster: Cluster, every: Sequence[PlanHost]) -> dict[str, str]:
    return {name: cluster.switch_of(nic) for name, nic in _nics(cluster, every).items()}


def _card_rates(
    cluster: Cluster, every: Sequence[PlanHost], links: Sequence[MeasuredLink], network: float
) -> dict[str, float]:
    """Return the measured rate of each host's network card in bytes per second, if it differs from
    the stated rate."""
    at = _switches(cluster, every)
    stated = {name: nic.total for name, nic in _nics(cluster, every).items()}
    near = [link for link in links if at.get(link.sender) == at.get(link.receiver)]
    rates: dict[str, float] = {}
    for name in at:
        # For sending and for receiving, a pair for each link: the measured rate of a card and the
        # lower stated rate of the cards at both ends.
        directions = [
            [
                (link.rate / network, min(stated[link.sender], stated[link.receiver]))
                for link in near
                if name == (link.sender, link.receiver)[end]
            ]
            for end in (0, 1)
        ]
        if not all(directions):
            continue
        best = min(max(rate for rate, _ in pairs) for pairs in directions)
        slow = any(all(rate < (1 - WITHIN) * most for rate, most in pairs) for pairs in directions)
        if slow or best > (1 + WITHIN) * stated[name]:
            rates[name] = best
    return rates


def _differing(now: str, before: str) -> str:
    return f"measured {now}, the plan has {before}"


def _changed(
    kind: Host,
    name: str,
    rate: float | None,
    slower: Mapping[str, float],
    changes: dict[str, str],
) -> Host:
    """Return `kind` with the values that were measured for the host `name`: `rate` of its card
    (None: as stated) and `slower` computing. Add a text to `changes` for each changed value."""
    update: dict[str, object] = {}
    nic = _nic(kind)
    if rate is not None and nic is not None:
        changes[f"hosts.{name}.nics"] = _differing(show_rate(rate), show_rate(nic.total))
        own = nic.model_copy(update={"rate": rate / nic.count})
        update["nics"] = tuple(own if other is nic else other for other in kind.nics)
    times = slower.get(name, 1.0)
    if kind.device is not None and abs(times - 1) > WITHIN:
        flops = kind.device.flops / times
        text = _differing(show_flops(flops), show_flops(kind.device.flops))
        changes[f"hosts.{name}.device"] = text
        update["device"] = kind.device.model_copy(update={"flops": flops})
    return kind.model_copy(update=update) if update else kind


def _kinds(kind: Host, mine: Sequence[PlanHost], new: Sequence[Host]) -> Iterable[Host]:
    """Return the kinds that replace a kind of host after the measurement: one kind if its hosts are
    still alike or have servers, else one kind per host. `mine`: the plan's hosts of the kind.
    `new`: the measured kind of each."""
    if all(host is kind for host in new):
        return [kind]
    if len(new) == kind.count and all(host == new[0] for host in new):
        return [new[0]]
    if any(host.servers for host in mine):
        # Servers hold equal shares, so the slowest host sets the pace of all.
        return [min(new, key=lambda host: max((nic.total for nic in host.nics), default=0.0))]
    addresses = kind.addresses or tuple(host.address for host in mine)
    own = [
        host.model_copy(
            update={
                "name": old.name,
                "count": 1,
                "addresses": (old.address,) if old.address else (),
            }
        )
        for old, host in zip(mine, new, strict=True)
    ]
    if left := kind.count - len(new):
        used = {host.address for host in mine}
        rest = tuple(address for address in addresses if address not in used)
        own.append(kind.model_copy(update={"count": left, "addresses": rest}))
    return own


def _links(
    cluster: Cluster,
    every: Sequence[PlanHost],
    seen: Sequence[MeasuredLink],
    network: float,
    changes: dict[str, str],
) -> Iterator[LinkRate]:
    """Yield the links between switches with their measured rates, and add a text to `changes` for
    each changed rate. A measured rate is the lower of the two directions."""
    at = _switches(cluster, every)
    for link in cluster.links:
        across = [
            pair for pair in seen if {at.get(pair.sender), at.get(pair.receiver)} == {*link.between}
        ]
        rates = [
            max((pair.rate for pair in across if at[pair.sender] == end), default=0.0)
            for end in link.between
        ]
        rate, most = min(rates) / network, _most_across(cluster, link)
        stated = min(link.rate, most)
        if not rate or abs(rate - stated) <= WITHIN * stated:
            yield link
            continue
        text = _differing(show_rate(rate), show_rate(link.rate))
        changes[f"links.{'-'.join(link.between)}"] = text
        yield link.model_copy(update={"rate": rate})


def _most_across(cluster: Cluster, link: LinkRate) -> float:
    """Return the highest rate in bytes per second that the cards at the two switches of a link
    allow."""
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
