"""What a preflight found, and what that means: the first thing that is wrong, in one sentence, and
the matrix of hosts. Arithmetic only.

Of several troubles the one that explains the others comes first: a host that did not report, a link
that does not connect, one that does not answer, one that loses large payloads, a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from roadtrain.errors import ConfigError, DeadlineError, PeerError, RoadtrainError
from roadtrain.stages.networks import INSIDE, KINDS, GroupNetwork, HostCard
from roadtrain.units import show_rate, show_seconds

CLOCK_S = 2.0  # by which clocks may differ: hosts that ask a time server differ by milliseconds
GROUPS = 24  # that have a line each; above, those of one kind and rate are one line
MATRIX = 12  # hosts of a matrix that people can read; above, links of one kind are one line


class LinkFault(StrEnum):
    """The step at which a link failed."""

    CANNOT_CONNECT = "cannot connect"
    NO_ANSWER = "no answer"
    LARGE_LOST = "large payload lost"
    LARGE_LOST_BACK = "large payload lost on its way back"


@dataclass(frozen=True, order=True)
class CardLink:
    """From a host to another, by name, over cards of theirs."""

    source: str
    target: str
    kind: str
    source_address: str
    target_address: str

    @property
    def back(self) -> CardLink:
        return CardLink(
            self.target, self.source, self.kind, self.target_address, self.source_address
        )


@dataclass(frozen=True)
class Finding:
    """Of a link, by its source."""

    link: CardLink
    fault: LinkFault | None
    why: str  # of the trouble
    latency_s: float = 0.0  # one way
    ahead_s: float = 0.0  # of the target's clock before the source's
    bytes_per_s: float = 0.0  # 0: not measured


@dataclass(frozen=True)
class Report:
    """Of one host. `heard`: addresses whose connections came and could not be answered."""

    host: str
    findings: tuple[Finding, ...]
    unanswered: tuple[str, ...] = ()
    failed: str = ""  # why it could not test at all


def links_of(networks: Sequence[GroupNetwork]) -> dict[CardLink, tuple[HostCard, HostCard]]:
    """Every pair of hosts of every group over the network chosen for it, both directions, each
    once, with the cards."""
    out: dict[CardLink, tuple[HostCard, HostCard]] = {}
    for network in networks:
        cards = dict(zip(network.hosts, network.cards))
        if network.kind == INSIDE:
            continue
        for source, own in cards.items():
            for target, other in cards.items():
                if source != target:
                    link = CardLink(source, target, network.kind, own.address, other.address)
                    out.setdefault(link, (own, other))
    return dict(sorted(out.items()))


def problem(
    reports: Mapping[str, Report],
    links: Mapping[CardLink, tuple[HostCard, HostCard]],
) -> RoadtrainError | None:
    """The first thing that is wrong. reports: by host; one that is absent has not reported."""
    hosts = dict.fromkeys(link.source for link in links)
    if absent := [host for host in hosts if host not in reports]:
        return DeadlineError(
            f"host {absent[0]} came to the rendezvous and has not reported what its network does",
            hint="its own output says why",
        )
    for host in hosts:
        if reports[host].failed:
            return PeerError(f"host {host}: {reports[host].failed}")
    found = {one.link: one for report in reports.values() for one in report.findings}
    for trouble in LinkFault:
        failed = [one for one in found.values() if one.fault is trouble]
        if failed:
            ends = [end for one in failed for end in (one.link.source, one.link.target)]
            worst = max(sorted(set(ends)), key=ends.count)  # an end of most of the links
            first = min(failed, key=lambda one: (one.link.source != worst, one.link))
            return _troubled(first, found, reports, links, len(failed))
    return _clocks([*found.values()])


def _troubled(
    one: Finding,
    found: Mapping[CardLink, Finding],
    reports: Mapping[str, Report],
    links: Mapping[CardLink, tuple[HostCard, HostCard]],
    failures: int,
) -> PeerError:
    link, (own, other) = one.link, links[one.link]
    more = f" (and {failures - 1} more such links)" if failures > 1 else ""
    start = f"host {link.source}: {own.interface} ({link.kind}, {own.address})"
    end = f"{other.address} ({other.interface}) of host {link.target}"
    if one.fault is LinkFault.CANNOT_CONNECT:
        said, hint = _unreachable(one, found, reports, own, other)
        return PeerError(f"{start} cannot reach {end}: {one.why}{said}{more}", hint=hint)
    if one.fault is LinkFault.NO_ANSWER:
        return PeerError(
            f"{start} connects to {end} and gets no answer: {one.why}{more}",
            hint="something on the way takes connections not meant for it, or drops what follows",
        )
    way = "to" if one.fault is LinkFault.LARGE_LOST else "from"
    mtus = f"MTU {own.mtu} here, {other.mtu} there"
    return PeerError(
        f"{start} exchanges small messages with {end}, but a large payload {way} it is lost"
        f" ({mtus}): something on the way carries smaller frames only{more}",
        hint=f"give all cards and switches of this network one MTU, or {own.interface} a smaller"
        " one",
    )


def _unreachable(
    one: Finding,
    found: Mapping[CardLink, Finding],
    reports: Mapping[str, Report],
    own: HostCard,
    other: HostCard,
) -> tuple[str, str]:
    """What else is known of a link that does not connect, and the hint."""
    link, back = one.link, found.get(one.link.back)
    firewall = "look at the firewalls of both hosts, and of what is between them"
    heard_there = link.source_address in reports[link.target].unanswered
    heard_here = link.target_address in reports[link.source].unanswered
    if back is not None and back.fault is not LinkFault.CANNOT_CONNECT:
        return f", although {link.target} reaches {link.source}: one direction is closed", firewall
    if heard_there != heard_here:
        deaf, loud = (link.source, link.target) if heard_there else (link.target, link.source)
        return (
            f"; packets of {deaf} arrive at {loud}, those of {loud} do not arrive at {deaf}: a"
            " firewall lets one direction through only",
            firewall,
        )
    if own.subnet != other.subnet:
        return (
            f"; the addresses are of different subnets, {own.subnet} and {other.subnet}",
            f"is {own.interface} the right interface of {link.source}, and {other.interface} of"
            f" {link.target}? `networks` says which cards are of one kind and fabric",
        )
    return "", f"is this network up on both hosts? {firewall}"


def _clocks(found: Sequence[Finding]) -> RoadtrainError | None:
    if not found:
        return None
    first = min(one.link.source for one in found)
    ahead = {one.link.target: one.ahead_s for one in found if one.link.source == first}
    ahead[first] = 0.0
    middle = median(ahead.values())
    host = max(ahead, key=lambda name: abs(ahead[name] - middle))
    off = ahead[host] - middle
    if len(ahead) == 2:
        host, off = max(ahead.items(), key=lambda item: abs(item[1]))
    if abs(off) <= CLOCK_S:
        return None
    other = first if len(ahead) == 2 else "the others"
    return ConfigError(
        f"the clock of host {host} is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} that"
        f" of {other}; {CLOCK_S:g} s are allowed",
        hint="let a time server set the clocks (chrony, ntpd)",
    )


def matrix(
    reports: Mapping[str, Report], hosts: Sequence[str], networks: Sequence[GroupNetwork]
) -> list[str]:
    """For people: hosts by hosts, then each group's network."""
    found = [one for report in reports.values() for one in report.findings]
    if not found:  # all are on one host
        lines = []
    else:
        lines = [*_table(found, hosts)] if len(hosts) <= MATRIX else [*_summary(found)]
    return [*lines, *_of_groups(networks)]


def _of_groups(networks: Sequence[GroupNetwork]) -> Iterator[str]:
    if len(networks) <= GROUPS:
        yield from (f"network: {network}" for network in networks)
        return
    alike: dict[str, list[str]] = {}
    for network in networks:
        rate = f" at {show_rate(network.bytes_per_s)}" if network.bytes_per_s else ""
        alike.setdefault(f"{network.kind}{rate}", []).append(network.group)
    for by, groups in alike.items():
        yield f"network: {by}: {len(groups)} groups ({groups[0]} to {groups[-1]})"


def _table(found: Sequence[Finding], hosts: Sequence[str]) -> Iterator[str]:
    cells: dict[tuple[str, str], list[str]] = {}
    for one in sorted(found, key=lambda one: KINDS.index(one.link.kind)):
        rate = f" {show_rate(one.bytes_per_s)}" if one.bytes_per_s else ""
        said = one.fault or f"{show_seconds(one.latency_s)}{rate}"
        cell = cells.setdefault((one.link.source, one.link.target), [])
        cell.append(f"{one.link.kind} {said}")
    rows = [["from \\ to", *hosts]]
    for source in hosts:
        row = [", ".join(cells.get((source, target), ["-"])) for target in hosts]
        rows.append([source, *row])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def _summary(found: Sequence[Finding]) -> Iterator[str]:
    for kind in KINDS:
        own = [one for one in found if one.link.kind == kind]
        if not own:
            continue
        latency = median(one.latency_s for one in own)
        rates = sorted(one.bytes_per_s for one in own if one.bytes_per_s)
        slowest = f", the slowest {show_rate(rates[0])}" if rates else ""
        rate = f", {show_rate(median(rates))}{slowest}" if rates else ""
        yield f"  {kind}: {len(own)} links, {show_seconds(latency)}{rate}"
