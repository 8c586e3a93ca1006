"""meet(): the ranks of a start find each other, and every rank learns who is there, or why not.

All goes through the TCPStore of torchrun (MASTER_ADDR, MASTER_PORT), as JSON with known fields:
nothing is unpickled (Rule 8). Rank 0 collects what the others say of themselves and answers all of
them at once, so that every rank that has come ends with the same sentence where somebody is missing
or means another job (Rule 5). A rank that cannot reach the store can only say so itself.

Note: starts after each other. The store outlives a start where an agent has it, and agents do not
count restarts alike: one that fails counts, one that is told to begin again does not. So ranks are
numbered as they come, rank 0 hears each of them once, and says to each which meeting it is in: the
one that has the number of rank 0.

Does NOT make process groups, nor test the networks that they will use (preflight.py).
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby, zip_longest
from typing import TypeVar

import msgspec
import psutil
import torch.distributed as dist

from roadtrain.environment import Launch
from roadtrain.errors import (
    ConfigError,
    DeadlineError,
    LostError,
    PeerError,
    RoadtrainError,
    WireError,
)
from roadtrain.stages.host_cards import this_host
from roadtrain.stages.networks import KINDS, HostCards

T = TypeVar("T")
GRACE_S = 3.0  # how much longer the others wait for rank 0, and it for them to read its answer
MEET_S = 18.0  # from the import of torch on: hosts begin together
POLL_S = 0.02
TRY_S = 3.0  # of one attempt to connect to the store


@dataclass(frozen=True)
class RankHello:
    """What a rank says of itself. `job`: what must be the same on all ranks, a line each. `needed`:
    the ranks that the job's parallelism has, 0 where it has none."""

    rank: int
    world_size: int
    host: HostCards
    job: str
    needed: int
    attempt: str = "0"

    def __str__(self) -> str:
        return f"rank {self.rank} of host {self.host.name}"


@dataclass(frozen=True)
class MeetingAnswer:
    """Rank 0's, to all. `hosts`: of each rank; none where `refused` says why not."""

    hosts: tuple[HostCards, ...] = ()
    refused: str = ""
    error: str = ""  # the class of the error
    hint: str = ""

    def check(self) -> None:
        """Raises the error that the answer is."""
        if self.refused:
            errors: dict[str, type[RoadtrainError]] = {
                one.__name__: one for one in (ConfigError, DeadlineError, PeerError)
            }
            raise errors.get(self.error, PeerError)(self.refused, hint=self.hint)


def refusal(error: RoadtrainError) -> MeetingAnswer:
    """An answer that raises such an error on every rank."""
    return MeetingAnswer(
        refused=str(error).partition("\nhint: ")[0], error=type(error).__name__, hint=error.hint
    )


@dataclass(frozen=True)
class RankMeeting:
    """Ranks that have met. `hosts`: of each rank, as its system says; names are unique."""

    launch: Launch
    store: dist.Store  # of this meeting alone; lives as long as rank 0, or its agent
    hosts: tuple[HostCards, ...]
    arrivals: dist.Store  # where ranks come, those of other starts too

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def host_devices(self, hosts: Sequence[HostCards] = ()) -> list[tuple[str, str, int]]:
        """(host, cluster, ranks there), in the order of ranks. A cluster is the hosts that have
        one fast fabric. hosts: with what the user states (`stated`); default: as they are."""
        by_host = groupby(hosts or self.hosts, lambda host: host.name)
        return [(name, cluster_of(first), 1 + len(rest)) for name, (first, *rest) in by_host]


def cluster_of(host: HostCards) -> str:
    """Named by the fabric of its fastest kind of card; "ethernet" where it has no faster one."""
    card = min(host.cards, key=lambda one: (KINDS.index(one.kind), one.meets), default=None)
    if card is None or card.kind == KINDS[-1]:
        return KINDS[-1]
    return f"{card.kind} {card.meets}"


def meet(
    launch: Launch,
    *,
    job: str = "",
    needed: int = 0,
    deadline_s: float = MEET_S,
    notice_s: float = 0.0,
    host: HostCards | None = None,
) -> RankMeeting:
    """Waits for all ranks, at most `deadline_s`. Collective.

    job, needed: see RankHello. notice_s: how much longer a rank waits that was started again: the
    others have so much time to notice that it was gone. host: this one; default: as the system
    says. Raises ConfigError for ranks that mean different things, DeadlineError where some do not
    come (which, and from where the others came), PeerError where the store cannot be reached.
    """
    if launch.attempt != "0":
        deadline_s += notice_s
    until = time.monotonic() + deadline_s
    host = host or this_host()
    store = dist.PrefixStore("roadtrain", _store(launch, host.name, deadline_s))
    hello = RankHello(launch.rank, launch.world_size, host, job, needed, launch.attempt)
    number = store.add("arrived", 1)
    put(store, f"hello/{number}", hello)
    if launch.rank == 0:
        own = dist.PrefixStore(f"meeting/{number}", store)
        until = max(until, time.monotonic() + 1.0)
        answer = _Arrivals(store, own, number, launch, hello, until).answer_all()
    else:
        met_as = _meeting_of(store, number, hello, deadline_s + GRACE_S)
        own = dist.PrefixStore(f"meeting/{met_as}", store)
        answer = read(own, "met", MeetingAnswer, GRACE_S, str(hello))
    answer.check()
    return RankMeeting(launch, own, answer.hosts, store)


def _meeting_of(store: dist.Store, number: int, hello: RankHello, patience_s: float) -> int:
    """The number of the meeting that the rank is in which came as `number`."""
    try:
        return get(store, f"meeting of/{number}", int, patience_s, f"{hello} waited for rank 0")
    except DeadlineError as error:
        store.set(f"gone/{number}", "")
        if store.check(["last"]):
            raise _too_many(hello, int(store.get("last"))) from error
        raise


def publish(store: dist.Store, key: str, value: object, readers: int) -> None:
    """Rank 0 says something to all; returns when the others, `readers`, have read it, or have had
    the time to: the store may end with rank 0."""
    put(store, key, value)
    _wait_for(store, f"{key}/read", readers)


def _wait_for(store: dist.Store, key: str, readers: int) -> None:
    until = time.monotonic() + GRACE_S
    while store.add(key, 0) < readers and time.monotonic() < until:
        time.sleep(POLL_S)


def read(store: dist.Store, key: str, kind: type[T], patience_s: float, who: str) -> T:
    """What rank 0 says. Raises DeadlineError, LostError."""
    said = get(store, key, kind, patience_s, f"{who} waited for rank 0: {key}")
    try:
        store.add(f"{key}/read", 1)
    except RuntimeError:  # it has not waited: what it said counts
        pass
    return said


def put(store: dist.Store, key: str, value: object) -> None:
    store.set(key, msgspec.json.encode(value).decode())


def get(store: dist.Store, key: str, kind: type[T], patience_s: float, waiting: str) -> T:
    """A value of the store. Raises DeadlineError and LostError, which say `waiting`."""
    try:
        store.wait([key], timedelta(seconds=max(patience_s, POLL_S)))
        data = store.get(key)
    except dist.DistStoreError as error:
        raise DeadlineError(f"{waiting}: nothing came within {patience_s:.0f} s") from error
    except RuntimeError as error:
        raise LostError(f"{waiting}: the store of the rendezvous is gone") from error
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"{waiting}: what came is not valid: {error}") from error


def _store(launch: Launch, host: str, deadline_s: float) -> dist.Store:
    me = f"host {host} (rank {launch.rank})"
    addresses = _resolved(launch, me)
    own = launch.rank == 0 and not launch.agent
    why = "" if own else _unanswered(addresses[0], launch.port, deadline_s)
    try:
        if why:
            raise OSError(why)
        return dist.TCPStore(
            addresses[0],
            launch.port,
            is_master=own,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (OSError, RuntimeError) as error:
        if _only_loopback(addresses) and not own:
            raise _loopback_error(launch, addresses) from error
        where = f"{addresses[0]}:{launch.port}"
        raise PeerError(
            f"{me} cannot {'open' if own else 'reach'} the rendezvous at {where} (MASTER_ADDR"
            f" {launch.address}) within {deadline_s:.0f} s: {str(error).splitlines()[0]}",
            hint="is rank 0's host up, is MASTER_ADDR its address, does a firewall stop the port?",
        ) from error


def _unanswered(address: str, port: int, patience_s: float) -> str:
    """ "" when something listens there, else why not within `patience_s`. torch's store would wait
    longer than it is told, and print what it tries."""
    until, why = time.monotonic() + patience_s, ""
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=min(left, TRY_S)):
                return ""
        except OSError as error:
            why = error.strerror or "no answer"
            time.sleep(min(0.1, left))
    return why or "no answer"


def _resolved(launch: Launch, me: str) -> list[str]:
    """The addresses of the store, those beyond this host before its own. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{me} knows no address of MASTER_ADDR {launch.address}: {error.strerror or error}",
            hint="put it into the name server or /etc/hosts, or give an address",
        ) from error
    addresses = [str(one[4][0]).partition("%")[0] for one in found]
    return sorted(addresses, key=lambda one: ipaddress.ip_address(one).is_loopback)


def _only_loopback(addresses: Sequence[str]) -> bool:
    return all(ipaddress.ip_address(one).is_loopback for one in addresses)


def _loopback_error(launch: Launch, addresses: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"MASTER_ADDR {launch.address} resolves to {addresses[0]}, which is loopback (lo): a host"
        " that takes it for that looks for rank 0 in itself, and finds no one",
        hint=f"give {launch.address} the address of its card in /etc/hosts of every host, or give"
        " the address as MASTER_ADDR",
    )


class _Arrivals:
    """Rank 0's: hears the ranks that come, one after another, until `until`, and answers all of
    them in the store `own`, of the meeting `number`."""

    def __init__(
        self,
        store: dist.Store,
        own: dist.Store,
        number: int,
        launch: Launch,
        mine: RankHello,
        until: float,
    ) -> None:
        self.store, self.own, self.number = store, own, number
        self.launch, self.mine, self.until = launch, mine, until
        self.first = self.seen = _count_seen(store)

    def answer_all(self) -> MeetingAnswer:
        """What all are told; they have read it, or have had the time to."""
        answer = self._collect()
        if not answer.refused:
            self.store.set("last", str(len(answer.hosts)))
        put(self.own, "met", answer)
        for number in range(self.first + 1, self.seen + 1):
            put(self.store, f"meeting of/{number}", self.number)
        while answer.refused and self.seen - self.first < self.launch.world_size:
            try:
                self._next()
            except DeadlineError:
                break
            except WireError:
                pass  # it is told that the others were refused
            put(self.store, f"meeting of/{self.seen}", self.number)
        _wait_for(self.own, "met/read", self.seen - self.first - 1)
        return answer

    def _collect(self) -> MeetingAnswer:
        found: dict[int, RankHello] = {}
        try:
            while len(found) < self.launch.world_size:
                try:
                    hello = self._next()
                except DeadlineError:
                    return refusal(_missing(self.launch, found))
                before = found.get(hello.rank)
                if before and before.attempt != hello.attempt and before.host == hello.host:
                    del found[hello.rank]  # it has ended, and was started again
                check_same(self.mine, found, hello)
                found[hello.rank] = hello
        except (ConfigError, PeerError) as error:
            return refusal(error)
        hosts = [found[rank].host for rank in range(self.launch.world_size)]
        return MeetingAnswer(hosts=unique_names(hosts))

    def _next(self) -> RankHello:
        """Of the next one who still waits. Raises DeadlineError, WireError."""
        while True:
            key, left = f"hello/{self.seen + 1}", self.until - time.monotonic()
            try:
                hello = get(self.store, key, RankHello, left, "rank 0 waited for others")
            except WireError:
                self._count()
                raise
            self._count()
            if not self.store.check([f"gone/{self.seen}"]):
                return hello

    def _count(self) -> None:
        self.seen += 1
        self.store.set("heard", str(self.seen))


def _count_seen(store: dist.Store) -> int:
    """How many of those who came rank 0 has heard, in this start and those before."""
    return int(store.get("heard")) if store.check(["heard"]) else 0


def check_same(mine: RankHello, found: Mapping[int, RankHello], hello: RankHello) -> None:
    """Raises ConfigError where a rank that comes means another start than rank 0, whose `mine`
    is: the first difference."""
    here, there = (f"rank {one.rank} of host {one.host.name}" for one in (mine, hello))
    if hello.world_size != mine.world_size:
        raise _other_size(hello, mine.world_size, here)
    if hello.needed and hello.needed != hello.world_size:
        raise ConfigError(
            f"the job's parallelism has {hello.needed} ranks, and {hello.world_size} were started"
            f" (WORLD_SIZE of {there})",
            hint="one rank a device: nnodes times nproc-per-node is dp x tp x pp",
        )
    if hello.rank in found:
        raise ConfigError(
            f"host {found[hello.rank].host.name} and host {hello.host.name} both have rank"
            f" {hello.rank}",
            hint="give each host its own --node-rank",
        )
    if hello.job != mine.job:
        lines = zip_longest(mine.job.splitlines(), hello.job.splitlines(), fillvalue="nothing")
        one, other = next(pair for pair in lines if pair[0] != pair[1])
        raise ConfigError(
            f"{here} and {there} do not mean the same job: {one}, and {other}",
            hint="give all ranks the same job",
        )


def _other_size(hello: RankHello, world_size: int, other: str = "rank 0") -> ConfigError:
    needed = f"; the job's parallelism has {hello.needed}" if hello.needed else ""
    return ConfigError(
        f"{hello} was started as one of {hello.world_size} ranks (WORLD_SIZE), {other} as one of"
        f" {world_size}{needed}",
        hint="give torchrun the same --nnodes and --nproc-per-node on all hosts",
    )


def _too_many(hello: RankHello, world_size: int) -> ConfigError:
    """For a rank that came when all others had met."""
    if hello.world_size != world_size:
        return _other_size(hello, world_size)
    return ConfigError(
        f"{hello} came when all {world_size} ranks were there",
        hint="give each host its own --node-rank; if it was started again, start all others too",
    )


def late(meeting: RankMeeting) -> RoadtrainError | None:
    """Why a rank that came after all were there is one too many."""
    store = meeting.arrivals
    for number in range(_count_seen(store) + 1, store.add("arrived", 0) + 1):
        with suppress(DeadlineError):
            hello = get(store, f"hello/{number}", RankHello, GRACE_S, "rank 0 read who is late")
            if not store.check([f"gone/{number}"]):
                return _too_many(hello, meeting.world_size)
    return None


def unique_names(hosts: Sequence[HostCards]) -> tuple[HostCards, ...]:
    """`hosts` of which no two have one name: where they have, an address is added that only one
    of them has."""
    by_name: dict[str, dict[str, HostCards]] = {}
    for host in hosts:
        by_name.setdefault(host.name, {})[host.identity] = host

    def unique(host: HostCards) -> HostCards:
        alike = by_name[host.name].values()
        if len(alike) == 1:
            return host
        known = [card.address for one in alike for card in one.cards]
        own = (card.address for card in host.cards if known.count(card.address) == 1)
        return replace(host, name=f"{host.name} at {next(own, host.identity)}")

    return tuple(map(unique, hosts))


def _missing(launch: Launch, found: Mapping[int, RankHello]) -> RoadtrainError:
    absent = [rank for rank in range(launch.world_size) if rank not in found]
    hosts = dict.fromkeys(found[rank].host.name for rank in sorted(found))
    resolved = [str(one[4][0]) for one in socket.getaddrinfo(launch.address, launch.port)]
    if _only_loopback(resolved) and len(hosts) == 1:
        return _loopback_error(launch, resolved)
    which = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    unanswered = sorted(half_open(launch.port))
    heard = (
        f"; packets of {', '.join(unanswered)} arrive here, and the answers do not arrive there: a"
        " firewall lets one direction through only"
        if unanswered
        else ""
    )
    return DeadlineError(
        f"{len(found)} of {launch.world_size} ranks have come to {launch.address}:{launch.port}"
        f" (of {', '.join(hosts)}), {which} {'has' if len(absent) == 1 else 'have'} not{heard}",
        hint="is the missing host up, can it reach this address, and what does it say itself?",
    )


def half_open(*ports: int) -> set[str]:
    """Addresses that ask for connections to `ports` of this host and do not get its answers."""
    return {
        one.raddr.ip.removeprefix("::ffff:")
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_SYN_RECV and one.laddr.port in ports
    }
