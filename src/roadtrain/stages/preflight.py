"""preflight(): test the networks before process groups are created. If two hosts of a group cannot
reach each other, every rank raises the same error within 30 s, which names the host, the card and
the reason (Rule 5).

    every host: choose networks -> open test ports -> test its links (probes.py) -> report to rank 0
    rank 0:     find the main problem, if any (findings.py) -> send the verdict to all ranks

One rank per host runs the tests. An InfiniBand or RoCE card is tested through its IP address, since
RDMA itself cannot be tested. `roadtrain preflight` runs only these tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress

from roadtrain.errors import DeadlineError
from roadtrain.stages.findings import CardLink, Report, links_of, matrix, problem
from roadtrain.stages.networks import (
    GroupNetwork,
    HostCard,
    HostCards,
    choose_networks,
)
from roadtrain.stages.probes import ProbePorts, probe, serving
from roadtrain.stages.rank_groups import RankGroup
from roadtrain.stages.rank_meeting import (
    MeetingAnswer,
    RankMeeting,
    get,
    late_error,
    publish,
    put,
    read,
    refusal,
)

LISTEN_S = 10.0  # limit from the end of the meeting until all hosts listen
PROBE_S = 11.0  # limit from the end of LISTEN_S until all hosts have reported
Links = Mapping[CardLink, tuple[HostCard, HostCard]]


def preflight(
    meeting: RankMeeting,
    groups: Sequence[RankGroup],
    hosts: Sequence[HostCards],
    *,
    say: Callable[[str], None] = print,
) -> dict[str, GroupNetwork]:
    """Choose and test the network of each group and of all ranks, and return the networks by group
    name. Collective.

    groups: all groups of the job, the same on every rank. hosts: the host of each rank, with the
    user's statements applied. say: called on rank 0 with each line of the table of results. Raises
    the same ConfigError or PeerError on every rank.
    """
    networks = choose_networks(groups, hosts)
    chosen, reports = [*networks.values()], dict[str, Report]()
    me = meeting.hosts[meeting.rank].name
    if links := links_of(chosen):
        first = next(rank for rank, host in enumerate(meeting.hosts) if host.name == me)
        if meeting.rank == first:
            reports = asyncio.run(_test_host(meeting, me, links))
        else:
            _verdict(meeting, me).check()
    if meeting.rank == 0:
        for line in matrix(reports, [*reports], chosen):
            say(line)
    return networks


async def _test_host(meeting: RankMeeting, me: str, links: Links) -> dict[str, Report]:
    """Test the links of this host, and answer other hosts' tests until rank 0 has decided. Returns
    the reports of all hosts on rank 0, otherwise {}. A problem raises the same error on every
    rank."""
    own = [link for link in links if link.source == me]
    async with AsyncExitStack() as until_verdict:
        try:
            addresses = [link.source_address for link in own]
            ports = await until_verdict.enter_async_context(serving(addresses))
            put(meeting.store, f"doors/{me}", ports)
            until = time.monotonic() + LISTEN_S
            targets = {link: _ports_of(meeting, me, link.target, until) for link in own}
            report = Report(me, *await probe(ports, targets))
        except (OSError, DeadlineError) as error:
            report = Report(me, (), failed=str(error))
        put(meeting.store, f"report/{me}", report)
        return await asyncio.to_thread(_decide, meeting, me, links)


def _ports_of(meeting: RankMeeting, me: str, host: str, until: float) -> ProbePorts:
    waiting = f"host {me} waited for host {host} to listen"
    return get(meeting.store, f"doors/{host}", ProbePorts, until - time.monotonic(), waiting)


def _decide(meeting: RankMeeting, me: str, links: Links) -> dict[str, Report]:
    """On rank 0, collect and return all reports and publish the verdict. On other ranks, wait for
    the verdict and return {}."""
    if meeting.rank:
        _verdict(meeting, me).check()
        return {}
    reports, until = dict[str, Report](), time.monotonic() + PROBE_S
    for host in dict.fromkeys(host.name for host in meeting.hosts):
        with suppress(DeadlineError):  # `problem` returns an error about a host without a report
            key, left_s = f"report/{host}", until - time.monotonic()
            reports[host] = get(meeting.store, key, Report, left_s, host)
    error = late_error(meeting) or problem(reports, links)
    verdict = refusal(error) if error else MeetingAnswer(hosts=meeting.hosts)
    publish(meeting.store, "verdict", verdict, meeting.world_size - 1)
    verdict.check()
    return reports


def _verdict(meeting: RankMeeting, me: str) -> MeetingAnswer:
    who = f"rank {meeting.rank} of host {me}"
    return read(meeting.store, "verdict", MeetingAnswer, LISTEN_S + PROBE_S + 5.0, who)
