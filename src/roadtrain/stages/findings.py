"""Evaluate a preflight (the tests of all links before training). Does NOT communicate.

If there are several problems, only the first in this order is reported: a host that did not report,
a link that does not connect, a link that does not answer, a link that loses large payloads, a wrong
clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

import msgspec

from roadtrain.errors import ConfigError, DeadlineError, PeerError, RoadtrainError
from roadtrain.stages.networks import INSIDE, KINDS, GroupNetwork, HostCard
from roadtrain.units import show_rate, show_seconds

CLOCK_S = 2.0  # allowed difference of clocks; with a time server, clocks differ by milliseconds
GROUPS = 24  # with more groups than this, all groups of one kind and rate share a line
MATRIX = 12  # with more hosts than this, the matrix is replaced by a line for each kind of link


class LinkFault(StrEnum):
    """The way in which the test of a link failed."""

    CANNOT_CONNECT = "cannot connect"
    NO_ANSWER = "no answer"
    LARGE_LOST = "large payload lost"
    LARGE_LOST_BACK = "large payload lost on its way back"


@dataclass(frozen=True, order=True)
class CardLink:
    """A link between hosts, over one network card of each. `source`, `target`: the names of the
    hosts."""

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


class Finding(msgspec.Struct, frozen=True):
    """The result of the test of one link by the link's source host."""

    link: CardLink
    fault: LinkFault | None = msgspec.field(name="trouble")
    why: str  # cause of the fault
    latency_s: float = 0.0  # one-way latency
    ahead_s: float = 0.0  # the target's clock minus the source's clock
    bytes_per_s: float = 0.0  # 0 if not measured


class Report(msgspec.Struct, frozen=True):
    """The report of one host. `unanswered`: addresses that sent packets to this host but could not
    complete a connection."""

    host: str
    findings: tuple[Finding, ...]
    unanswered: tuple[str, ...] = msgspec.field(default=(), name="heard")
    failed: str = ""  # the reason if the host could not test anything, else ""


def links_of(networks: Sequence[GroupNetwork]) -> dict[CardLink, tuple[HostCard, HostCard]]:
    """Return the links in both directions between all hosts of each group, over the group's
    network. The result maps each link to (card of the source host, card of the target host)."""
    out: dict[CardLink, tuple[HostCard, HostCard]] = {}
    for network in networks:
        cards = dict(zip(network.hosts, network.cards))
        if network.kind == INSIDE:
            continue
        for (source, own), (target, other) in itertools.permutations(cards.items(), 2):
            link = CardLink(source, target, network.kind, own.address, other.address)
            out.setdefault(link, (own, other))
    return dict(sorted(out.items()))


def problem(
    reports: Mapping[str, Report],
    links: Mapping[CardLink, tuple[HostCard, HostCard]],
) -> RoadtrainError | None:
    """Return the main problem as an error, or None. reports: the report of each host that sent one,
    by the host's name."""
    hosts = dict.fromkeys(link.source for link in links)
    if absent := [host for host in hosts if host not in reports]:
        return DeadlineError(
            f"host {absent[0]} came to the rendezvous, but did not report its network tests",
            hint=f"read the output of host {absent[0]} to find out why",
        )
    for host in hosts:
        if reports[host].failed:
            return PeerError(f"host {host}: {reports[host].failed}")
    found = {finding.link: finding for report in reports.values() for finding in report.findings}
    for fault in LinkFault:
        failed = [finding for finding in found.values() if finding.fault is fault]
        if failed:
            ends = [end for f in failed for end in (f.link.source, f.link.target)]
            worst = max(sorted(set(ends)), key=ends.count)  # the host with the most failed links
            first = min(failed, key=lambda finding: (finding.link.source != worst, finding.link))
            return _fault_error(first, found, reports, links, len(failed))
    return _clocks([*found.values()])


def _fault_error(
    finding: Finding,
    found: Mapping[CardLink, Finding],
    reports: Mapping[str, Report],
    links: Mapping[CardLink, tuple[HostCard, HostCard]],
    failures: int,
) -> PeerError:
    link, (own, other) = finding.link, links[finding.link]
    more = f" (and {failures - 1} more such links)" if failures > 1 else ""
    start = f"host {link.source}: {own.interface} ({link.kind}, {own.address})"
    end = f"{other.address} ({other.interface}) of host {link.target}"
    if finding.fault is LinkFault.CANNOT_CONNECT:
        detail, hint = _unreachable(finding, found, reports, own, other)
        return PeerError(f"{start} cannot reach {end}: {finding.why}{detail}{more}", hint=hint)
    if finding.fault is LinkFault.NO_ANSWER:
        return PeerError(
            f"{start} connects to {end} and gets no answer: {finding.why}{more}",
            hint="a device on the way intercepts the connection, or drops packets after it is made",
        )
    way = "to" if finding.fault is LinkFault.LARGE_LOST else "from"
    mtus = f"MTU {own.mtu} here, {other.mtu} there"
    return PeerError(
        f"{start} exchanges small messages with {end}, but a large payload {way} it is lost"
        f" ({mtus}): a device on the way carries smaller frames only{more}",
        hint="set the same MTU on all cards and switches of this network, or a smaller one on"
        f" {own.interface}",
    )


def _unreachable(
    finding: Finding,
    found: Mapping[CardLink, Finding],
    reports: Mapping[str, Report],
    own: HostCard,
    other: HostCard,
) -> tuple[str, str]:
    """Explain why a link does not connect. Return (end of the error's message, hint). own, other:
    the cards of the link's source and target."""
    link, back = finding.link, found.get(finding.link.back)
    firewall = "check the firewalls of both hosts, and any between them"
    arrived_there = link.source_address in reports[link.target].unanswered
    arrived_here = link.target_address in reports[link.source].unanswered
    if back is not None and back.fault is not LinkFault.CANNOT_CONNECT:
        return f", although {link.target} reaches {link.source}: one direction is closed", firewall
    if arrived_there != arrived_here:
        deaf, loud = (link.source, link.target) if arrived_there else (link.target, link.source)
        return (
            f"; packets from {deaf} arrive at {loud}, but packets from {loud} do not arrive at"
            f" {deaf}: a firewall passes only one direction",
            firewall,
        )
    if own.subnet != other.subnet:
        return (
            f"; the addresses are in different subnets, {own.subnet} and {other.subnet}",
            f"if {own.interface} of {link.source} or {other.interface} of {link.target} is the"
            " wrong interface, state the kind and fabric of each card in `networks`",
        )
    return "", f"check that this network is up on both hosts, and {firewall}"


def _clocks(found: Sequence[Finding]) -> RoadtrainError | None:
    if not found:
        return None
    first = min(finding.link.source for finding in found)
    ahead = {f.link.target: f.ahead_s for f in found if f.link.source == first}
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
        hint="synchronize the clocks with a time server (chrony, ntpd)",
    )


def matrix(
    reports: Mapping[str, Report], hosts: Sequence[str], networks: Sequence[GroupNetwork]
) -> list[str]:
    """Return the results as lines of text: a table of all pairs of hosts, and the network of each
    group."""
    found = [finding for report in reports.values() for finding in report.findings]
    shown = _table(found, hosts) if len(hosts) <= MATRIX else _summary(found)
    # without findings, all ranks are on one host
    return [*(shown if found else ()), *_of_groups(networks)]


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
    for finding in sorted(found, key=lambda finding: KINDS.index(finding.link.kind)):
        rate = f" {show_rate(finding.bytes_per_s)}" if finding.bytes_per_s else ""
        result = finding.fault or f"{show_seconds(finding.latency_s)}{rate}"
        cell = cells.setdefault((finding.link.source, finding.link.target), [])
        cell.append(f"{finding.link.kind} {result}")
    rows = [["from \\ to", *hosts]]
    for source in hosts:
        row = [", ".join(cells.get((source, target), ["-"])) for target in hosts]
        rows.append([source, *row])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def _summary(found: Sequence[Finding]) -> Iterator[str]:
    for kind in KINDS:
        own = [finding for finding in found if finding.link.kind == kind]
        if not own:
            continue
        latency = median(finding.latency_s for finding in own)
        rates = sorted(finding.bytes_per_s for finding in own if finding.bytes_per_s)
        slowest = f", the slowest {show_rate(rates[0])}" if rates else ""
        rate = f", {show_rate(median(rates))}{slowest}" if rates else ""
        yield f"  {kind}: {len(own)} links, {show_seconds(latency)}{rate}"
