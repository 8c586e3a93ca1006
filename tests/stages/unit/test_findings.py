"""The diagnosis that a preflight draws from its findings, how ranks meet, and which job it reads.
No networks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass, replace

import psutil
import pytest
import torch.distributed as dist

from roadtrain.environment import Launch, launch_of
from roadtrain.errors import ConfigError, DeadlineError, PeerError
from roadtrain.options.schema import checked
from roadtrain.stages import preflight, probes
from roadtrain.stages import rank_meeting as meeting
from roadtrain.stages.findings import (
    CardLink,
    Finding,
    LinkFault,
    Report,
    links_of,
    matrix,
    problem,
)
from roadtrain.stages.job_parallelism import ParallelismSection
from roadtrain.stages.networks import HostCard, HostCards, choose_networks
from roadtrain.stages.rank_meeting import (
    MeetingAnswer,
    RankHello,
    check_same,
    half_open,
    refusal,
)
from roadtrain.training import preflight_command
from tests.support.ports import free_port


@dataclass(frozen=True)
class Ranks:
    name: str
    ranks: tuple[int, ...]


def host(name, n, net=1, **more):
    card = HostCard("eth0", f"10.{net}.0.{n}", 16, bytes_per_s=1e8, mtu=1500, **more)
    return HostCards(f"id of {name}", name, (card,))


HOSTS = [host("a", 1), host("b", 2), host("c", 3)]
NETWORKS = [*choose_networks([Ranks("dp", (0, 1))], HOSTS).values()]
LINKS = links_of(NETWORKS)


def reports(received_from=None, ahead=None, **trouble):
    """Reports of three hosts. ahead: Seconds by which a host's clock runs ahead. trouble: Fault by
    "source_target"."""
    ahead, out = ahead or {}, {}
    for name in ("a", "b", "c"):
        findings = []
        for link in LINKS:
            if link.source == name:
                why = trouble.get(f"{link.source}_{link.target}")
                off = ahead.get(link.target, 0.0) - ahead.get(name, 0.0)
                findings.append(Finding(link, why, "nothing" if why else "", 1e-4, off, 5e7))
        out[name] = Report(name, tuple(findings), (received_from or {}).get(name, ()))
    return out


def diagnosis(found, links=LINKS):
    return str(problem(found, links))


def test_every_pair_of_every_group_once() -> None:
    assert [(link.source, link.target) for link in LINKS] == [
        (x, y) for x in "abc" for y in "abc" if x != y
    ]
    assert problem(reports(), LINKS) is None


def test_links_that_do_not_connect() -> None:
    closed = LinkFault.CANNOT_CONNECT
    assert "host b: eth0 (ethernet, 10.1.0.2) cannot reach 10.1.0.3 (eth0) of host c: nothing" in (
        diagnosis(reports(b_c=closed, c_b=closed))
    )
    one_way = diagnosis(reports(c_a=closed))
    assert "although a reaches c: one direction is closed" in one_way
    both = {"c_a": closed, "a_c": closed}
    # connections from a arrive at c, but c's answers do not arrive at a
    assert "packets from c do not arrive at a" in diagnosis(
        reports(received_from={"c": ("10.1.0.1",)}, **both)
    )
    # the host at the end of most failed links is named first
    all_of_c = reports(c_a=closed, a_c=closed, c_b=closed, b_c=closed)
    assert diagnosis(all_of_c).startswith("host c: eth0")
    assert "(and 3 more such links)" in diagnosis(all_of_c)


def test_addresses_in_different_subnets_are_reported() -> None:
    far = [HOSTS[0], host("b", 2, net=9)]
    links = links_of([*choose_networks([], far).values()])
    found = {
        name: Report(name, tuple(Finding(link, LinkFault.CANNOT_CONNECT, "x") for link in links
                                 if link.source == name))
        for name in "ab"
    }  # fmt: skip
    assert "different subnets, 10.1.0.0/16 and 10.9.0.0/16" in diagnosis(found, links)


def test_the_fault_that_explains_the_others_is_reported() -> None:
    lost, closed = LinkFault.LARGE_LOST, LinkFault.CANNOT_CONNECT
    assert "a large payload to it is lost (MTU 1500 here, 1500 there)" in diagnosis(
        reports(a_b=lost)
    )
    assert "cannot reach" in diagnosis(reports(a_b=lost, b_c=closed, ahead={"c": 99.0}))
    assert "gets no answer" in diagnosis(reports(a_b=LinkFault.NO_ANSWER, b_a=lost))
    assert "from it is lost" in diagnosis(reports(a_b=LinkFault.LARGE_LOST_BACK))
    absent = reports(b_c=closed) | {"a": Report("a", (), failed="a waited for c")}
    del absent["c"]
    assert "host c came to the rendezvous, but did not report" in diagnosis(absent)
    failed = reports() | {"b": Report("b", (), failed="eth0 is gone")}
    assert diagnosis(failed) == "host b: eth0 is gone"


@pytest.mark.parametrize(("host", "ahead"), [("a", 60.0), ("b", -60.0), ("c", 3.0)])
def test_a_clock_that_differs_is_named(host, ahead) -> None:
    way = "ahead of" if ahead > 0 else "behind"
    assert f"clock of host {host} is {abs(ahead):.1f} s {way} that of the others" in diagnosis(
        reports(ahead={host: ahead})
    )
    assert problem(reports(ahead={host: ahead / 100}), LINKS) is None


def test_the_matrix() -> None:
    lines = matrix(reports(b_c=LinkFault.NO_ANSWER), ["a", "b", "c"], NETWORKS)
    assert lines[0].split() == ["from", "\\", "to", "a", "b", "c"]
    assert "ethernet 100 us 50 MB/s" in lines[1]
    assert "ethernet no answer" in lines[2]
    assert lines[-1] == "network: control: ethernet at 100 MB/s (eth0 of a b c)"
    pairs = [Ranks(f"dp {i}", (0, 1)) for i in range(30)]
    networks = [*choose_networks(pairs, HOSTS).values()]
    assert matrix({}, [], networks) == [
        "network: ethernet at 100 MB/s: 31 groups (dp 0 to control)"
    ]
    many = [f"h{i}" for i in range(13)]
    assert "6 links, 100 us, 50 MB/s, the slowest 50 MB/s" in matrix(reports(), many, [])[0]


def hello(rank, world_size=4, name="a", job="", needed=0):
    return RankHello(rank, world_size, replace(HOSTS[0], name=name), job, needed)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            hello(1, 6, "b"),
            "rank 1 of host b was started as one of 6 ranks .*, rank 0 of host a as one of 4",
        ),
        (hello(1, 4, "b", needed=8), "parallelism has 8 ranks, but 4 were started"),
        (hello(0, 4, "b"), "host a and host b both have rank 0"),
        (hello(1, 4, "b", job="x"), "rank 0 of host a and rank 1 of host b have different jobs"),
    ],
)
def test_ranks_of_different_starts_are_refused(other, reason) -> None:
    check_same(hello(0), {}, hello(0))
    check_same(hello(0), {0: hello(0)}, hello(1, name="b"))
    with pytest.raises(ConfigError, match=reason):
        check_same(hello(0), {0: hello(0)}, other)


def test_hosts_with_the_same_name_get_unique_names() -> None:
    a, b = host("box", 1), replace(host("box", 2), identity="another")
    assert [entry.name for entry in meeting.unique_names([a, a, b])] == [
        "box at 10.1.0.1",
        "box at 10.1.0.1",
        "box at 10.1.0.2",
    ]
    assert [entry.name for entry in meeting.unique_names([a, a])] == ["box", "box"]
    # a card that both have (such as a virtual machine's bridge) does not make a name unique
    common = HostCard("virbr0", "192.168.122.1", 24)
    c, d = (replace(entry, cards=(common, *entry.cards)) for entry in (a, b))
    assert [entry.name for entry in meeting.unique_names([c, d])] == [
        "box at 10.1.0.1",
        "box at 10.1.0.2",
    ]
    alone = [replace(entry, cards=(common,)) for entry in (a, b)]
    assert len({entry.name for entry in meeting.unique_names(alone)}) == 2


def test_hosts_on_a_fast_fabric_form_a_cluster() -> None:
    ib = [replace(entry, cards=(replace(entry.cards[0], kind="infiniband"), *entry.cards))
          for entry in HOSTS[:2]]  # fmt: skip
    hosts = (ib[0], ib[0], ib[1], HOSTS[2])
    met = meeting.RankMeeting(launch(0, 1), dist.HashStore(), hosts, dist.HashStore())
    assert met.host_devices() == [
        ("a", "infiniband 10.1.0.0/16", 2),
        ("b", "infiniband 10.1.0.0/16", 1),
        ("c", "ethernet", 1),
    ]
    # systems list cards in any order
    rails = [HostCard(f"ib{n}", f"10.{n}.0.1", 16, kind="infiniband") for n in (1, 2)]
    both = [
        HostCards(name, name, tuple(cards)) for name, cards in (("a", rails), ("b", rails[::-1]))
    ]
    assert meeting.cluster_of(both[0]) == meeting.cluster_of(both[1])


def test_connections_that_cannot_be_answered(tmp_path, monkeypatch) -> None:
    rest, mapped = "00000000:00000000 00:00000000 00000000 0 0 0", "0000000000000000FFFF0000"
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(
        "head\n"
        f"   0: 0100000A:1F90 0200000A:C350 03 {rest}\n"  # asks for 8080
        f"   1: 0100000A:1F90 0300000A:C350 01 {rest}\n"  # is connected
        f"   2: 0100000A:1F91 0400000A:C350 03 {rest}\n"  # another port
    )
    line = f"   0: {mapped}0100000A:1F90 {mapped}0500000A:C350 03 {rest}\n"
    (tmp_path / "net/tcp6").write_text("head\n" + line)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert half_open(8080) == {"10.0.0.2", "10.0.0.5"}


def launch(rank, world_size, port=0, address="127.0.0.1", **more):
    return Launch(rank, world_size, address, port, **{"agent": False, "attempt": "0", **more})


def all_meet(world_size, changes=None, absent=(), deadline_s=8.0, agent=None):
    """Let all ranks meet, each in a thread. Returns by rank its result or error. agent: Holds the
    store."""
    port, out = agent.port if agent else free_port(), {}

    def meet(rank):
        own = {"job": "", "needed": 0, "deadline_s": deadline_s, "host": HOSTS[rank % 3]}
        own |= (changes or {}).get(rank, {})
        size = own.pop("world_size", world_size)
        time.sleep(own.pop("late_s", 0.0))
        how = {"agent": agent is not None, "attempt": own.pop("attempt", "0")}
        try:
            out[rank] = meeting.meet(launch(rank, size, port, **how), **own)
        except Exception as error:
            out[rank] = error

    threads = [
        threading.Thread(target=meet, args=(rank,))
        for rank in range(world_size)
        if rank not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def test_all_ranks_meet() -> None:
    met = all_meet(4)
    assert all(result.hosts == (*HOSTS, HOSTS[0]) for result in met.values()), met
    assert meeting.late_error(met[0]) is None


@pytest.mark.slow
def test_all_ranks_report_the_same_missing_rank() -> None:  # Rule 5
    met = all_meet(3, absent={1}, deadline_s=2.0)
    assert {type(outcome) for outcome in met.values()} == {DeadlineError}
    assert len({str(outcome) for outcome in met.values()}) == 1
    assert "2 of 3 ranks have reached" in str(met[0])
    assert "(of a, c), rank 1 has not" in str(met[0])


@pytest.mark.slow
def test_all_ranks_report_the_same_wrong_world_size() -> None:
    """Including a rank that arrives after the refusal."""
    met = all_meet(3, {1: {"late_s": 1.0}, 2: {"world_size": 4}})
    assert {type(outcome) for outcome in met.values()} == {ConfigError}
    assert len({str(outcome) for outcome in met.values()}) == 1


@pytest.fixture
def agent():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_ranks_meet_although_their_agents_count_restarts_differently(agent) -> None:
    """One agent restarted its rank by itself, another on request: all ranks meet."""
    met = all_meet(3, {1: {"attempt": "1"}}, agent=agent)
    assert all(result.hosts == tuple(HOSTS) for result in met.values()), met


@pytest.mark.slow
def test_successive_starts_share_one_store(agent, monkeypatch) -> None:
    """No rank takes the verdict of an earlier start for its own or meets a rank that has ended."""
    monkeypatch.setattr(meeting, "GRACE_S", 0.2)
    first = all_meet(2, agent=agent)
    first[0].store.set("verdict", "of the first")
    again = all_meet(2, agent=agent)  # another parallelize() of the same processes
    assert again[1].hosts == tuple(HOSTS[:2]) and not again[1].store.check(["verdict"])
    # rank 1 ends, and its restart ends too, while rank 0 still computes
    alone = all_meet(2, {1: {"attempt": "1"}}, absent={0}, deadline_s=1.0, agent=agent)
    assert "rank 1 of host b arrived after all 2 ranks had met" in str(alone[1])
    third = all_meet(2, {0: {"attempt": "1"}, 1: {"attempt": "2", "late_s": 0.3}}, agent=agent)
    assert third[1].hosts == tuple(HOSTS[:2]) and meeting.late_error(third[0]) is None


@pytest.mark.slow
def test_a_restarted_rank_waits_until_the_others_notice(agent) -> None:
    """An agent starts its ranks again at once; a step of the others may take minutes."""
    again = {"attempt": "1", "deadline_s": 0.2, "notice_s": 5.0}
    met = all_meet(2, {0: {"late_s": 1.0}, 1: again}, agent=agent)
    assert met[1].hosts == tuple(HOSTS[:2]), met


@pytest.mark.parametrize(
    ("size", "reason"),
    [(2, "rank 0 of host a was started as one of 2 ranks"), (1, "arrived after all 1 ranks had")],
)
def test_a_surplus_rank_is_found_later(size, reason) -> None:
    store = dist.HashStore()
    store.set("heard", "1")
    store.add("arrived", 2)
    meeting.put(store, "hello/2", hello(0, size))
    met = meeting.RankMeeting(launch(0, 1), dist.HashStore(), (HOSTS[0],), store)
    assert reason in str(meeting.late_error(met))


def test_a_verdict_is_waited_for_once(monkeypatch) -> None:  # Rule 5
    """Rank 0 has died, but its agent still serves the store."""
    waits = []

    def nobody(*_):
        waits.append(1)
        raise DeadlineError("nothing came")

    async def probed(*_):
        return (), ()

    @contextlib.asynccontextmanager
    async def open_doors(_):
        yield doors

    store, doors = dist.HashStore(), probes.ProbePorts("00", {"10.1.0.1": 1, "10.1.0.3": 1})
    for name in "ac":
        meeting.put(store, f"doors/{name}", doors)
    monkeypatch.setattr(preflight, "serving", open_doors)
    monkeypatch.setattr(preflight, "_verdict", nobody)
    monkeypatch.setattr(preflight, "probe", probed)
    met = meeting.RankMeeting(launch(1, 3), store, tuple(HOSTS), dist.HashStore())
    with pytest.raises(DeadlineError, match="nothing came"):
        preflight.preflight(met, [], HOSTS)
    assert len(waits) == 1


def test_a_link_passes_although_its_rate_could_not_be_measured(monkeypatch) -> None:
    link = CardLink("a", "a", "ethernet", "127.0.0.1", "127.0.0.1")
    reads = []

    async def once(reader):
        reads.append(1)
        if len(reads) > 1:
            raise EOFError  # the host went away
        await reader.readexactly(probes.LARGE + 2 * probes.LENGTH.size)
        return 0.0

    async def both():
        async with probes.serving([link.source_address]) as doors:
            return await probes.probe(doors, {link: doors})

    monkeypatch.setattr(probes, "_receive_rate", once)
    found, incoming = asyncio.run(both())
    assert [(finding.fault, finding.bytes_per_s) for finding in found] == [
        (None, 0.0)
    ] and not incoming


@pytest.mark.parametrize("kind", [ConfigError, PeerError, DeadlineError])
def test_a_refusal_raises_the_same_error_on_every_rank(kind) -> None:
    with pytest.raises(kind, match=r"so\nhint: because"):
        refusal(kind("so", hint="because")).check()
    MeetingAnswer(hosts=tuple(HOSTS)).check()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"),
        ({"RANK": "4"}, "RANK is 4, but must be at least 0 and below WORLD_SIZE, which is 4"),
        ({"RANK": "first"}, "is not an integer: .*first"),
    ],
)
def test_ranks_that_were_not_started_by_torchrun(environment, reason) -> None:
    variables = {"WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"} if environment else {}
    with pytest.raises(ConfigError, match=reason):
        launch_of(environment | variables)


@pytest.mark.slow
def test_nobody_at_the_rendezvous(monkeypatch) -> None:  # Rule 5
    with pytest.raises(ConfigError, match=r"MASTER_ADDR 127.0.0.1 resolves to 127.0.0.1, which is"):
        meeting.meet(launch(1, 2, free_port()), deadline_s=0.5, host=HOSTS[0])

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(meeting.socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="cannot resolve MASTER_ADDR nowhere: Name or"):
        meeting.meet(launch(1, 2, address="nowhere"), deadline_s=0.5, host=HOSTS[0])


def test_this_host_is_found_by_name_or_address(monkeypatch) -> None:
    addresses = {"a": "10.1.0.1", "b": "10.1.0.2", "c": "127.0.1.1", "10.1.0.2": "10.1.0.2"}
    monkeypatch.setattr(preflight_command, "this_host", lambda: HOSTS[1])
    monkeypatch.setattr(preflight_command.socket, "gethostname", lambda: "b")
    monkeypatch.setattr(
        preflight_command.socket,
        "getaddrinfo",
        lambda name, *_, **__: [(0, 0, 0, "", (addresses[name], 0))],
    )
    assert preflight_command.launch_among(["a", "b"], 7).rank == 1
    assert preflight_command.launch_among(["a", "10.1.0.2"], 7).address == "a"
    with pytest.raises(ConfigError, match=r"on host b, the name c resolves to 127.0.1.1"):
        preflight_command.launch_among(["a", "b", "c"], 7)
    with pytest.raises(ConfigError, match=r"must name host b \(10.1.0.2\) once, not 0"):
        preflight_command.launch_among(["a"], 7)


def parallelism_section(**keys):
    return checked(ParallelismSection, keys)


def test_how_many_ranks_must_meet() -> None:
    assert preflight_command.needed_ranks(parallelism_section(), 1) == 0
    assert preflight_command.needed_ranks(parallelism_section(pp=2), 1) == 0  # as many as come
    assert preflight_command.needed_ranks(parallelism_section(pp=2, dp=2), 1) == 4
    assert preflight_command.needed_ranks(parallelism_section(pp=2, widths=[2, 1]), 1) == 3
    assert preflight_command.needed_ranks(parallelism_section(pp=2, dp=2, tp=2), 4) == 2
    with pytest.raises(ConfigError, match="has 4 ranks, not a multiple of 3 per host"):
        preflight_command.needed_ranks(parallelism_section(pp=2, dp=2), 3)


@pytest.mark.parametrize(
    ("placements", "reason"),
    [
        ([{"stage": 0, "memory": True}, {"stage": 0, "files": "x"}], "stage 0 has 2 placements"),
        ([{"stage": 1, "files": "x", "token_file": "t"}], "token_file, which needs servers"),
    ],
)
def test_placements_that_contradict_each_other(placements, reason) -> None:  # Rule 6
    with pytest.raises(ConfigError, match=reason):
        parallelism_section(placements=placements)


def test_the_preflight_refuses_a_job_that_could_not_run(monkeypatch) -> None:
    """A data group across two clusters is refused even if all its links work."""
    ib = [replace(host, cards=(replace(host.cards[0], kind="infiniband"),)) for host in HOSTS[:2]]
    apart = replace(ib[1], cards=(replace(ib[1].cards[0], fabric="hall b"), *HOSTS[1].cards))
    met = meeting.RankMeeting(launch(1, 2), dist.HashStore(), (ib[0], apart), dist.HashStore())
    proven = []
    monkeypatch.setattr(preflight_command, "launch_of", lambda _: met.launch)
    monkeypatch.setattr(preflight_command, "meet", lambda *_, **__: met)
    monkeypatch.setattr(preflight_command, "override", lambda hosts, _: hosts)
    monkeypatch.setattr(preflight_command, "preflight", lambda *words: proven.append(words))
    monkeypatch.setattr(preflight_command, "load_job", lambda *_, **__: Ranks("", ()))
    monkeypatch.setattr(Ranks, "parallelism", parallelism_section(dp=2), raising=False)
    with pytest.raises(ConfigError, match=r"the data group of stage 0 .* mixes clusters"):
        preflight_command.command("job.toml")
    assert proven
    monkeypatch.setattr(Ranks, "parallelism", parallelism_section(dp=2, across_clusters=True))
    assert preflight_command.command("job.toml") == 0
