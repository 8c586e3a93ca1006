"""Networks: which cards of several hosts reach each other, and by which a group of ranks talks.

A group that is on one host talks inside it (NVLink, shared memory, loopback). Else it takes the
fastest cards of one kind by which all its members reach each other from end to end; else Ethernet;
else it is refused. Yang et al. (Holmes), section 3.2, print a special case: RDMA for data groups
inside a cluster, Ethernet between stages.

Cards of one kind reach each other where they have one fabric: the name that the user gave it, else
the subnet of the address. Ethernet is routed between subnets, the others are not. That it is so is
proven by the preflight, not here. Arithmetic only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Protocol, Self, TypeVar

from pydantic import field_validator, model_validator

from roadtrain.errors import ConfigError
from roadtrain.options.schema import Flag, RateText, Section, Texts
from roadtrain.units import parse_rate, show_rate

# the fastest first, where rates are the same or not known
KINDS = ("infiniband", "roce", "ethernet")
INFINIBAND, ROCE, ETHERNET = KINDS
CONTROL = "control"  # the group of all ranks
INSIDE = "inside a host"  # NVLink, PCIe, shared memory or loopback
LOOPBACK = "127.0.0.1"


class HasKind(Protocol):
    @property
    def kind(self) -> str: ...


C = TypeVar("C", bound=HasKind)


def fastest_common(
    hosts: Sequence[Sequence[C]], fabric: Callable[[C], str], bytes_per_s: Callable[[C], float]
) -> tuple[C, ...] | None:
    """One card of each host, in order, all of one kind and one fabric, of which the slowest is as
    fast as can be; None where hosts have no such cards in common. Where a rate is not known (0),
    kinds decide before rates."""
    ways: list[tuple[float, int, tuple[C, ...]]] = []
    for first in hosts[0]:
        found = [
            [one for one in cards if one.kind == first.kind and fabric(one) == fabric(first)]
            for cards in hosts
        ]
        if all(found):
            way = tuple(max(cards, key=bytes_per_s) for cards in found)
            ways.append((min(map(bytes_per_s, way)), -KINDS.index(first.kind), way))
    if not ways:
        return None
    known = all(rate for rate, _, _ in ways)
    return max(ways, key=lambda way: way[:2] if known else (way[1], way[0]))[2]


class NetworkStatement(Section):
    """What the user knows of some cards. The first statement that matches a card counts."""

    hosts: Texts = ["*"]
    """names of hosts, as `a*`"""
    interface: str = "*"
    """name of the interface, as `eth0` or `ib*`"""
    subnet: str = ""
    """that its address is in, as `10.1.0.0/16`"""
    kind: Literal["infiniband", "roce", "ethernet"] | None = None
    """default: what the system says"""
    rate: RateText | None = None
    """default: what the system says"""
    fabric: str = ""
    """cards of one kind and fabric reach each other; default: those of one subnet"""
    use: Flag = True
    """whether training goes by it"""

    @field_validator("subnet")
    @classmethod
    def _is_subnet(cls, subnet: str) -> str:
        if subnet:
            ipaddress.ip_network(subnet)  # its ValueError says why
        return subnet

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if self.hosts == ["*"] and self.interface == "*" and not self.subnet:
            raise ValueError("give hosts, interface or subnet: this would be about every card")
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
    """An interface of a host, with one address."""

    interface: str
    address: str
    prefix: int  # bits of the address that are the subnet's
    kind: str = ETHERNET  # of KINDS
    bytes_per_s: float = 0.0  # 0: not known
    mtu: int = 0  # 0: not known
    fabric: str = ""  # as the user calls it; "": the subnet
    found: str = ""  # the kind that the system is sure of; "": it is not
    device: str = ""  # its name among RDMA devices, as mlx5_0; "": it is none

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
    """A host as its ranks see it. `identity`: the same for processes that share memory and
    network."""

    identity: str
    name: str
    cards: tuple[HostCard, ...]

    def __str__(self) -> str:
        return f"{self.name} has {', '.join(map(str, self.cards)) or 'no card'}"


@dataclass(frozen=True)
class GroupNetwork:
    """By what a group of ranks talks. `cards`: of each rank, in the order of `ranks`."""

    group: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]  # of each rank
    kind: str  # of KINDS, or INSIDE
    cards: tuple[HostCard, ...]
    passed_over: str = ""  # faster cards that do not reach each other, for people

    @property
    def bytes_per_s(self) -> float:
        """Of the slowest card; 0 where one is not known."""
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


class NamedRanks(Protocol):
    """A group of ranks, of whatever kind."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> Sequence[int]: ...


LOOPBACK_CARD = HostCard("lo", LOOPBACK, 8, kind=INSIDE)


def override(
    hosts: Sequence[HostCards], statements: Sequence[NetworkStatement]
) -> tuple[HostCards, ...]:
    """`hosts` with what the user stated, without the cards that are not to be used, and without
    addresses that several hosts have (each host's own bridge for containers). Raises ConfigError
    for a statement about an interface that is not there, or that the system contradicts."""
    for statement in statements:
        _check_exists(statement, hosts)
    every = {host.identity: host for host in hosts}.values()
    addresses = [card.address for host in every for card in host.cards]
    out = []
    for host in hosts:
        cards = []
        for card in host.cards:
            said = next((one for one in statements if one.matches(host.name, card)), None)
            if addresses.count(card.address) == 1 and (said is None or said.use):
                cards.append(card if said is None else _apply(host.name, card, said))
        out.append(replace(host, cards=tuple(cards)))
    return tuple(out)


def _check_exists(statement: NetworkStatement, hosts: Sequence[HostCards]) -> None:
    """Every host that is meant has it, where it is named without a pattern; else one has."""
    meant = [host for host in hosts if statement.matches_host(host.name)]
    named = not set(statement.interface) & set("*?[")
    for host in meant:
        if named and not any(card.interface == statement.interface for card in host.cards):
            raise ConfigError(
                f"host {host.name} has no interface {statement.interface} with an address that is"
                f" up; `networks` calls it {statement.kind or 'a network'}: {host}",
                hint="name the interface that it has, or say in `hosts` which hosts have this one",
            )
    if not any(statement.matches(host.name, card) for host in meant for card in host.cards):
        raise ConfigError(
            f"`networks` speaks of {statement}, and no host has it:"
            f" {'; '.join(map(str, meant or hosts))}",
            hint="name interfaces and subnets as `ip addr` shows them",
        )


def _apply(host: str, card: HostCard, said: NetworkStatement) -> HostCard:
    kind = said.kind or card.kind
    if card.found and kind != card.found and ETHERNET not in (kind, card.found):
        raise ConfigError(
            f"`networks` calls {card.interface} of host {host} {kind}, and its link layer is"
            f" {card.found}",
            hint="InfiniBand and RoCE cards cannot talk to each other",
        )
    rate = parse_rate(said.rate) if said.rate else card.bytes_per_s
    return replace(card, kind=kind, bytes_per_s=rate, fabric=said.fabric)


def pick(group: NamedRanks, host_of: Mapping[int, HostCards]) -> GroupNetwork:
    """By what the group talks. host_of: of each rank. Raises ConfigError where its hosts do not
    reach each other, with the reason."""
    ranks = tuple(group.ranks)
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


@dataclass(frozen=True)
class _AllRanks:
    ranks: tuple[int, ...]
    name: str = CONTROL


def choose_networks(
    groups: Sequence[NamedRanks], hosts: Sequence[HostCards]
) -> dict[str, GroupNetwork]:
    """The network of each group by its name, and of CONTROL, the group of all ranks. hosts: of
    each rank. Raises ConfigError (`pick`)."""
    host_of = dict(enumerate(hosts))
    every = (*groups, _AllRanks(tuple(host_of)))
    return {group.name: pick(group, host_of) for group in every}


def _common_cards(hosts: Sequence[HostCards]) -> tuple[HostCard, ...] | None:
    def fastest(
        of: Sequence[Sequence[HostCard]], fabric: Callable[[HostCard], str]
    ) -> tuple[HostCard, ...] | None:
        return fastest_common(of, fabric, lambda card: card.bytes_per_s)

    # a RoCE card is an Ethernet card too, for what is in its subnet
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
    """One fabric is of InfiniBand or of RoCE."""
    fabrics = {card.fabric for host in hosts for card in host.cards if card.fabric}
    for fabric in sorted(fabrics):
        found = {
            card.kind: (host.name, card)
            for host in hosts
            for card in host.cards
            if card.fabric == fabric
        }
        if INFINIBAND in found and ROCE in found:
            (one, card), (other, its) = found[INFINIBAND], found[ROCE]
            raise ConfigError(
                f"{group}: fabric {fabric} has {card.interface} of host {one}, which is"
                f" infiniband, and {its.interface} of host {other}, which is roce: they cannot talk"
                " to each other, and NCCL would hang there",
                hint="give each kind a fabric of its own",
            )


def _unreachable(group: str, hosts: Sequence[HostCards]) -> ConfigError:
    said = "; ".join(map(str, hosts))
    kinds = [{card.kind for card in host.cards} for host in hosts]
    mixed = {INFINIBAND} in kinds and {ROCE} in kinds
    why = (
        "InfiniBand and RoCE cards cannot talk to each other (NCCL would hang there), and they"
        " have no Ethernet in common"
        if mixed
        else "they have no network in common"
    )
    names = ", ".join(host.name for host in hosts)
    return ConfigError(f"{group}: hosts {names} cannot reach each other, {why}: {said}")


def _passed_over(hosts: Sequence[HostCards], way: Sequence[HostCard]) -> str:
    """What is said where every member has a faster kind of card than the group can use."""
    best = [min((card.kind for card in host.cards), key=KINDS.index) for host in hosts]
    if way[0].kind != ETHERNET or ETHERNET in best:
        return ""
    have = (
        f"{kind} of {listed([host.name for host, its in zip(hosts, best) if its == kind])}"
        for kind in dict.fromkeys(best)
    )
    return f"; faster cards do not reach each other: {', '.join(have)}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """For people."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return " ".join(names[:most]) + more
