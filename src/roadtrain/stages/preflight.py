"""preflight(): before process groups are made, every pair of hosts of every group proves that it
reaches each other over the network that was chosen; or every rank ends with the same sentence,
within 30 s, naming host, card and reason (Rule 5).

One rank of each host tests, the others wait. Control goes through the store of the rendezvous, the
tests over plain sockets that are bound to the cards (probes.py). `roadtrain preflight` runs it
alone.

What it cannot prove: RDMA itself. An InfiniBand or RoCE card is tested by the address it has.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roadtrain.config.job import load_job
from roadtrain.errors import ConfigError, DeadlineError
from roadtrain.stages.findings import CLOCK_S, CardLink, Finding, Report, links_of, matrix, problem
from roadtrain.stages.groups import Groups
from roadtrain.stages.host_cards import this_host
from roadtrain.stages.host_ranks import DataGroups, check_ranks
from roadtrain.stages.job_parallelism import ParallelismSection
from roadtrain.stages.networks import (
    GroupNetwork,
    HostCard,
    HostCards,
    NamedRanks,
    choose_networks,
    stated,
)
from roadtrain.stages.probes import Doors, Listeners, Target, probe
from roadtrain.stages.rank_meeting import (
    MEET_S,
    Launch,
    MeetingAnswer,
    RankMeeting,
    get,
    late,
    launch_of,
    meet,
    publish,
    put,
    read,
    refusal,
)

DOORS_S = 10.0  # from the meeting on, until all hosts listen
PROBE_S = 11.0  # from then on, until all have reported
PORT = 29500  # torchrun's own


@dataclass(frozen=True)
class Preflight:
    """What every rank knows after a preflight that found nothing wrong."""

    meeting: RankMeeting
    hosts: tuple[HostCards, ...]  # of each rank, with what the user states
    networks: dict[str, GroupNetwork]  # by group, and CONTROL
    lines: tuple[str, ...]  # the matrix, on rank 0


def preflight(
    meeting: RankMeeting,
    groups: Sequence[NamedRanks],
    hosts: Sequence[HostCards],
    *,
    say: Callable[[str], None] = print,
    clock_s: float = CLOCK_S,
) -> Preflight:
    """Chooses the network of each group, and tests it. Collective.

    groups: of all ranks; on every rank the same, as all that follows from them. hosts: of each
    rank of the job, with what the user states (`stated`). say: gets the matrix, on rank 0.
    clock_s: by how much clocks may differ. Raises ConfigError or PeerError, on every rank the same.
    """
    networks = choose_networks(groups, hosts)
    chosen = [*networks.values()]
    if links := links_of(chosen):
        lines = _tested(meeting, chosen, links, clock_s)
    else:
        lines = tuple(matrix({}, [], chosen)) if meeting.rank == 0 else ()
    for line in lines:
        say(line)
    return Preflight(meeting, tuple(hosts), networks, lines)


def _tested(
    meeting: RankMeeting,
    networks: Sequence[GroupNetwork],
    links: Mapping[CardLink, tuple[HostCard, HostCard]],
    clock_s: float,
) -> tuple[str, ...]:
    """Raises what rank 0 says; returns its matrix."""
    names = list(dict.fromkeys(host.name for host in meeting.hosts))
    me = meeting.hosts[meeting.rank].name
    first = next(rank for rank, host in enumerate(meeting.hosts) if host.name == me)
    lines: tuple[str, ...] = ()
    if meeting.rank == first:
        lines = _Tester(meeting, names, me, networks, links, clock_s).run()
    else:
        _verdict(meeting, me).check()
    return lines


def _verdict(meeting: RankMeeting, me: str) -> MeetingAnswer:
    who = f"rank {meeting.rank} of host {me}"
    return read(meeting.store, "verdict", MeetingAnswer, DOORS_S + PROBE_S + 5.0, who)


class _Tester:
    """The rank that tests for its host; on rank 0 also the one that judges."""

    def __init__(
        self,
        meeting: RankMeeting,
        hosts: Sequence[str],
        me: str,
        networks: Sequence[GroupNetwork],
        links: Mapping[CardLink, tuple[HostCard, HostCard]],
        clock_s: float,
    ) -> None:
        self.meeting, self.store, self.hosts, self.me = meeting, meeting.store, hosts, me
        self.networks, self.links, self.clock_s = networks, links, clock_s
        self.own = [(link, cards) for link, cards in links.items() if link.source == me]
        self.lines: tuple[str, ...] = ()
        self.answer = MeetingAnswer()
        self.said = False  # what this host found

    def run(self) -> tuple[str, ...]:
        """Raises the verdict; on rank 0 the matrix, else nothing."""
        listeners = Listeners()
        try:
            self._listen(listeners)
            until = time.monotonic() + DOORS_S
            targets = [Target(link, cards[0], *self._door(link, until)) for link, cards in self.own]
            asyncio.run(probe(listeners, targets, self._report))
        except (OSError, DeadlineError) as error:
            if self.said:  # it has waited for the verdict
                raise
            self._say(Report(self.me, (), failed=str(error)))
        finally:
            listeners.close()
        self.answer.check()
        return self.lines

    def _listen(self, listeners: Listeners) -> None:
        doors = listeners.listen([link.source_address for link, _ in self.own])
        put(self.store, f"doors/{self.me}", doors)

    def _door(self, link: CardLink, until: float) -> tuple[tuple[str, int], bytes]:
        waiting = f"host {self.me} waited for host {link.target} to listen"
        doors = get(self.store, f"doors/{link.target}", Doors, until - time.monotonic(), waiting)
        port = doors.ports[link.target_address]
        return (link.target_address, port), bytes.fromhex(doors.token)

    async def _report(self, findings: list[Finding], heard: set[str]) -> None:
        report = Report(self.me, tuple(findings), tuple(sorted(heard)))
        await asyncio.to_thread(self._say, report)

    def _say(self, report: Report) -> None:
        """What this host found; returns when the verdict is there."""
        self.said = True
        put(self.store, f"report/{self.me}", report)
        if self.meeting.rank:
            self.answer = _verdict(self.meeting, self.me)
            return
        self.answer = self._judged()
        publish(self.store, "verdict", self.answer, self.meeting.world_size - 1)

    def _judged(self) -> MeetingAnswer:
        reports: dict[str, Report] = {}
        until = time.monotonic() + PROBE_S
        for host in self.hosts:
            try:
                reports[host] = get(
                    self.store, f"report/{host}", Report, until - time.monotonic(), host
                )
            except DeadlineError:
                continue  # `problem` names it
        error = late(self.meeting) or problem(reports, self.links, self.clock_s)
        lines = tuple(matrix(reports, self.hosts, self.networks))
        self.lines = () if error else lines
        return refusal(error) if error else MeetingAnswer(hosts=self.meeting.hosts)


# the command


def command(
    path: str = "",
    hosts: str = "",
    devices: int = 1,
    port: int = PORT,
    patience: float = MEET_S,
) -> int:
    """Under torchrun on every host (`torchrun ... --no-python roadtrain preflight JOB.toml`), or
    started on every host with the same --hosts. Of the job it reads `parallelism`; without it
    every pair of hosts is tested over the fastest network of all.

    Args:
        hosts: HOST,HOST,...: names or addresses in the order of ranks; this host is found in it
        devices: ranks of each host, with --hosts
        port: of the first host, where they meet, with --hosts
        patience: seconds to wait for all ranks
    """
    begin = time.monotonic()
    if devices < 1 or not patience > 0:
        raise ConfigError(
            f"--devices {devices}, --patience {patience:g}: 1 device or more, seconds above 0"
        )
    launch = launch_among(hosts.split(","), port) if hosts else launch_of(os.environ)
    per_rank = devices if hosts else 1
    asked = load_job(path).parallelism if path else ParallelismSection()
    asked.check_known()
    needed = needed_ranks(asked, per_rank)
    meeting = meet(launch, job=in_lines(asked, per_rank), needed=needed, deadline_s=patience)
    of_ranks = [host for host in stated(meeting.hosts, asked.networks) for _ in range(per_rank)]
    places = meeting.host_devices(of_ranks)
    parallelism = asked.degrees(len(of_ranks)) if asked.used else None
    groups: Sequence[NamedRanks] = ()
    if parallelism is not None:
        groups = Groups.of(parallelism, places, data_groups=DataGroups.ANYWHERE).to_create
    preflight(meeting, groups, of_ranks)
    if parallelism is not None:  # last: a wrong card can make a cluster of its own
        check_ranks(parallelism, places, data_groups=asked.data_groups)
    if meeting.rank == 0:
        print(f"preflight: all is well ({time.monotonic() - begin:.1f} s)")
    return 0


def in_lines(asked: ParallelismSection, per_rank: int) -> str:
    """What must be the same on all ranks."""
    said = {**asked.model_dump(mode="json"), "devices": per_rank}
    return "\n".join(f"{key} = {value}" for key, value in said.items())


def needed_ranks(asked: ParallelismSection, per_rank: int) -> int:
    """That meet, where each stands for `per_rank` of the job; 0 where the job takes what comes.
    Raises ConfigError."""
    if not asked.used or (asked.dp is None and not asked.widths):
        return 0
    parallelism = asked.degrees(0)
    ranks, rest = divmod(parallelism.devices, per_rank)
    if rest:
        raise ConfigError(
            f"{parallelism} is {parallelism.devices} ranks, which {per_rank} a host do not divide",
            hint="--devices is the number of ranks of each host",
        )
    return ranks


def launch_among(names: Sequence[str], port: int) -> Launch:
    """One rank a host of `names`; which one this is, this host's name or addresses say. Raises
    ConfigError, also for the name of another host that means this one's loopback here."""
    me = socket.gethostname()
    own = {card.address for card in this_host().cards}
    found = []
    for rank, name in enumerate(names):
        addresses = _addresses(name)
        loopback = [one for one in addresses if ipaddress.ip_address(one).is_loopback]
        if name == me or own & addresses:
            found.append(rank)
        elif len(loopback) == len(addresses) and len(names) > 1:
            raise ConfigError(
                f"the name {name} resolves to {loopback[0]} on host {me}, which is its loopback"
                f" (lo): {me} would look for {name} in itself",
                hint=f"give {name} the address of its card in /etc/hosts, or give the address",
            )
    if len(found) != 1:
        have = ", ".join(sorted(own)) or "none"
        raise ConfigError(
            f"host {me} (addresses {have}) is {len(found)} of {', '.join(names)}, not one",
            hint="name each host once, as it calls itself or by an address",
        )
    return Launch(found[0], len(names), names[0], port, agent=False, attempt="0")


def _addresses(name: str) -> set[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host {socket.gethostname()} knows no address of {name}: {error.strerror or error}"
        ) from error
    return {str(one[4][0]).partition("%")[0] for one in found}
