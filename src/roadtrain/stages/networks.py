"""Networks: choose the network of each group of ranks. Does NOT communicate.

A group on one host communicates inside the host. Any other group uses the fastest cards of one kind
that connect all of its hosts, or else Ethernet. The rule of Yang et al. (Holmes), section 3.2, is a
special case: RDMA for data groups inside a cluster, and Ethernet between stages.

Cards of one kind are assumed to reach each other if they are on the same fabric: the name that the
user stated or, by default, the subnet. Ethernet is assumed to be routed between subnets; InfiniBand
and RoCE are not. The preflight tests these assumptions.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import Literal, Protocol, Self, TypeVar

from pydantic import field_validator, model_validator

from roadtrain.errors import ConfigError
from roadtrain.options.schema import Flag, RateText, Section, Texts
from roadtrain.stages.rank_groups import GroupKind, RankGroup
from roadtrain.units import parse_rate, show_rate

# the kinds of cards, in order of preference if rates are equal or unknown
KINDS = ("infiniband", "roce", "ethernet")
INFINIBAND, ROCE, ETHERNET = KINDS
CONTROL = "control"  # the name of the group of all ranks
INSIDE = "inside a host"  # NVLink, PCIe, shared memory or loopback
LOOPBACK = "127.0.0.1"


class HasKind(Protocol):
    @property
    def kind(self) -> str: ...


C = TypeVar("C", bound=HasKind)


def fastest_common(
    hosts: Sequence[Sequence[C]], fabric: Callable[[C], str], bytes_per_s: Callable[[C], float]
) -> tuple[C, ...] | None:
    """Choose one card of each host, all of the same kind and fabric, so that the slowest is as fast
    as possible. Return None if the hosts have no kind and fabric in common. If any rate is unknown
    (0), the kind counts before the rate."""
    ways: list[tuple[float, int, tuple[C, ...]]] = []
    for first in hosts[0]:
        found = [
            [c for c in cards if c.kind == first.kind and fabric(c) == fabric(first)]
            for cards in hosts
        ]
        if all(found):
            way = tuple(max(cards, key=bytes_per_s) for cards in found)
            ways.append((min(map(bytes_per_s, way)), -KINDS.index(first.kind), way))
    if not ways:
        return None
    rated = all(rate for rate, _, _ in ways)
    return max(ways, key=lambda way: way[:2] if rated else (way[1], way[0]))[2]


class NetworkStatement(Section):
    """The user's statement about some network cards. The first statement that matches a card
    applies."""

    hosts: Texts = ["*"]
    """names or patterns of hosts, such as `a*`"""
    interface: str = "*"
    """name or pattern of interfaces, such as `eth0` or `ib*`"""
    subnet: str = ""
    """subnet of the card's address, such as `10.1.0.0/16`"""
    kind: Literal["infiniband", "roce", "ethernet"] | None = None
    """default: as detected"""
    rate: RateText | None = None
    """default: as detected"""
    fabric: str = ""
    """cards of the same kind and fabric reach each other; default: the subnet"""
    use: Flag = True
    """whether training uses the card"""

    @field_validator("subnet")
    @classmethod
    def _is_subnet(cls, subnet: str) -> str:
        if subnet:
            ipaddress.ip_network(subnet)  # raises ValueError with the reason
        return subnet

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if self.hosts == ["*"] and self.interface == "*" and not self.subnet:
            raise ValueError("hosts, interface or subnet must be set, but all are missing")
        return self

    def __str__(self) -> str:
        where = [f"interface {self.interface}"] if self.interface != "*" else []
        where += [f"subnet {self.subnet}"] if self.subnet else []
        where += [f"hosts {', '.join(self.hosts)}"] if self.hosts != ["*"] else []
        return " of ".join(where)

    def matches_host(self, host: str) -> bool:
        return any(fnmatchcase(host, pattern) for pattern in self.hosts)

    def matches(self, host: str, card: HostCard) -> bool:
        inside = not self.subnet or ipaddress.ip_address(card.address) in ipaddress.ip_network(
            self.subnet
        )
        return self.matches_host(host) and fnmatchcase(card.interface, self.interface) and inside


@dataclass(frozen=True)
class HostCard:
    """A network interface of a host, with one of its addresses."""

    interface: str
    address: str
    prefix: int  # length of the subnet's prefix in bits
    kind: str = ETHERNET  # one of KINDS
    bytes_per_s: float = 0.0  # 0 if unknown
    mtu: int = 0  # 0 if unknown
    fabric: str = ""  # the name that the user stated; if "", the subnet is the fabric
    found: str = ""  # the kind if the system knows it for certain, else ""
    device: str = ""  # name of the RDMA device, such as mlx5_0; "" if the card is no RDMA device

    @property
    def subnet(self) -> str:
        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)

    @property
    def fabric_id(self) -> str:
        return self.fabric or self.subnet

    def __str__(self) -> str:
        fabric = f", fabric {self.fabric}" if self.fabric else ""
        return f"{self.interface} ({self.kind}, {self.address}/{self.prefix}{fabric})"


@dataclass(frozen=True)
class HostCards:
    """A host and its network cards. `identity`: a text that is the same in all processes that share
    the host's memory and network, and differs elsewhere."""

    identity: str
    name: str
    cards: tuple[HostCard, ...]

    def __str__(self) -> str:
        return f"{self.name} has {', '.join(map(str, self.cards)) or 'no card'}"


@dataclass(frozen=True)
class GroupNetwork:
    """The network of a group of ranks. `hosts`: the name of each rank's host. `cards`: the card
    that each rank uses. Both are in the order of `ranks`."""

    group: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]  # host names
    kind: str  # one of KINDS, or INSIDE
    cards: tuple[HostCard, ...]
    passed_over: str = ""  # for the log: a note about faster cards that do not reach each other

    @property
    def bytes_per_s(self) -> float:
        """The rate of the slowest card in bytes/s; 0 if any rate is unknown."""
        return min(card.bytes_per_s for card in self.cards)

    def card_of(self, rank: int) -> HostCard:
        return self.cards[self.ranks.index(rank)]

    def __str__(self) -> str:
        if self.kind == INSIDE:
            return f"{self.group}: inside host {self.hosts[0]}"
        by_host = dict(zip(self.hosts, self.cards))
        by_interface: dict[str, list[str]] = {}
        for host, card in by_host.items():
            by_interface.setdefault(card.interface, []).append(host)
        where = ", ".join(f"{name} of {listed(hosts)}" for name, hosts in by_interface.items())
        rate = f" at {show_rate(self.bytes_per_s)}" if self.bytes_per_s else ""
        return f"{self.group}: {self.kind}{rate} ({where}){self.passed_over}"


LOOPBACK_CARD = HostCard("lo", LOOPBACK, 8, kind=INSIDE)


def override(
    hosts: Sequence[HostCards], statements: Sequence[NetworkStatement]
) -> tuple[HostCards, ...]:
    """Return `hosts` with the user's statements applied to their cards. Cards with `use = false`,
    and cards with an address that several hosts have (container bridges), are removed.

    Raises ConfigError for a statement about a missing interface, and for one that contradicts the
    detected kind.
    """
    for statement in statements:
        _check_exists(statement, hosts)
    every = {host.identity: host for host in hosts}.values()
    addresses = [card.address for host in every for card in host.cards]
    out = []
    for host in hosts:
        cards = []
        for card in host.cards:
            found = next((s for s in statements if s.matches(host.name, card)), None)
            if addresses.count(card.address) == 1 and (found is None or found.use):
                cards.append(card if found is None else _apply(host.name, card, found))
        out.append(replace(host, cards=tuple(cards)))
    return tuple(out)


def _check_exists(statement: NetworkStatement, hosts: Sequence[HostCards]) -> None:
    """Raise ConfigError if the statement matches no card, or names an interface that a stated host
    lacks."""
    meant = [host for host in hosts if statement.matches_host(host.name)]
    named = not set(statement.interface) & set("*?[")
    for host in meant:
        if named and not any(card.interface == statement.interface for card in host.cards):
            raise ConfigError(
                f"`networks` names {statement.interface}, but host {host.name} has no interface"
                f" {statement.interface} that is up and has an address; host {host}",
                hint="name an interface of that host, or list in `hosts` the hosts that have it",
            )
    if not any(statement.matches(host.name, card) for host in meant for card in host.cards):
        raise ConfigError(
            f"`networks` names {statement}, but no card matches; detected cards:"
            f" {'; '.join(f'host {host}' for host in meant or hosts)}",
            hint="name interfaces and subnets as shown by `ip addr`",
        )


def _apply(host: str, card: HostCard, statement: NetworkStatement) -> HostCard:
    kind = statement.kind or card.kind
    if card.found and kind != card.found and ETHERNET not in (kind, card.found):
        raise ConfigError(
            f"`networks` calls {card.interface} of host {host} {kind}, but its link layer is"
            f" {card.found}",
            hint=f"state the kind {card.found}, or leave kind out",
        )
    rate = parse_rate(statement.rate) if statement.rate else card.bytes_per_s
    return replace(card, kind=kind, bytes_per_s=rate, fabric=statement.fabric)


def pick(group: RankGroup, host_of: Mapping[int, HostCards]) -> GroupNetwork:
    """Choose the network of a group. host_of: the host of each rank. Raises ConfigError with the
    reason if the group's hosts cannot reach each other."""
    ranks = group.ranks
    members = [host_of[rank] for rank in ranks]
    hosts = {host.identity: host for host in members}
    names = tuple(host.name for host in members)
    if len(hosts) == 1:
        return GroupNetwork(group.name, ranks, names, INSIDE, (LOOPBACK_CARD,) * len(ranks))
    _refuse_mixed_fabric(group.name, [*hosts.values()])
    way = _common_cards([*hosts.values()])
    if way is None:
        raise _unreachable(group.name, [*hosts.values()])
    by_host = dict(zip(hosts, way))
    cards = tuple(by_host[host.identity] for host in members)
    passed = _passed_over([*hosts.values()], way)
    return GroupNetwork(group.name, ranks, names, way[0].kind, cards, passed)


def choose_networks(
    groups: Sequence[RankGroup], hosts: Sequence[HostCards]
) -> dict[str, GroupNetwork]:
    """Choose a network for each group and for the group of all ranks, and return them by the
    groups' names. hosts: the host of each rank. Raises ConfigError with the reason if the hosts of
    a group cannot reach each other."""
    host_of = dict(enumerate(hosts))
    every = (*groups, RankGroup(GroupKind.CONTROL, CONTROL, tuple(host_of)))
    return {group.name: pick(group, host_of) for group in every}


def _common_cards(hosts: Sequence[HostCards]) -> tuple[HostCard, ...] | None:
    fastest = partial(fastest_common, bytes_per_s=attrgetter("bytes_per_s"))
    # a RoCE card can also be used as an Ethernet card in its subnet
    plain = [
        [replace(card, kind=ETHERNET) for card in host.cards if card.kind != INFINIBAND]
        for host in hosts
    ]
    routed = [
        [card for card in host.cards if card.kind == ETHERNET and not card.fabric] for host in hosts
    ]
    return (
        fastest([host.cards for host in hosts], lambda card: card.fabric_id)
        or fastest(plain, lambda card: card.fabric_id)
        or fastest(routed, lambda card: "")
    )


def _refuse_mixed_fabric(group: str, hosts: Sequence[HostCards]) -> None:
    fabrics = {card.fabric for host in hosts for card in host.cards if card.fabric}
    for fabric in sorted(fabrics):
        found = {
            card.kind: (host.name, card)
            for host in hosts
            for card in host.cards
            if card.fabric == fabric
        }
        if INFINIBAND in found and ROCE in found:
            (host, card), (other, its) = found[INFINIBAND], found[ROCE]
            raise ConfigError(
                f"{group}: fabric {fabric} has {card.interface} of host {host}, which is"
                f" infiniband, and {its.interface} of host {other}, which is roce: cards of these"
                " two kinds cannot talk to each other, and NCCL would hang there",
                hint="give InfiniBand and RoCE cards different fabric names",
            )


def _unreachable(group: str, hosts: Sequence[HostCards]) -> ConfigError:
    cards = "; ".join(map(str, hosts))
    kinds = [{card.kind for card in host.cards} for host in hosts]
    mixed = {INFINIBAND} in kinds and {ROCE} in kinds
    why = (
        "InfiniBand and RoCE cards cannot talk to each other (NCCL would hang there), and they"
        " have no Ethernet in common"
        if mixed
        else "they have no network in common"
    )
    names = ", ".join(host.name for host in hosts)
    return ConfigError(f"{group}: hosts {names} cannot reach each other: {why} ({cards})")


def _passed_over(hosts: Sequence[HostCards], way: Sequence[HostCard]) -> str:
    """Return a note for the log if the group uses Ethernet although every host has a faster kind of
    card, otherwise "". way: the card that each host uses."""
    best = [min((card.kind for card in host.cards), key=KINDS.index) for host in hosts]
    if way[0].kind != ETHERNET or ETHERNET in best:
        return ""
    have = (
        f"{kind} of {listed([host.name for host, its in zip(hosts, best) if its == kind])}"
        for kind in dict.fromkeys(best)
    )
    return f"; faster cards do not reach each other: {', '.join(have)}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return a list for messages: the first `most` names, and the number of the other names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return " ".join(names[:most]) + more
