"""meet(): the ranks of a job find each other. In each start (a launch of all ranks), every rank
receives the hosts of all ranks, or the same error. Does NOT create process groups or test networks
(preflight.py).

Messages go through torchrun's TCPStore as JSON; nothing is unpickled (Rule 8). Rank 0 collects the
hellos (first messages) of other ranks and answers all at once, so a missing rank ends all ranks
with the same error (Rule 5).

Note "restarts": torchrun's store may exist longer than a start, and its agents' counts of restarts
do not identify a start. So ranks are numbered in the order of arrival, over all starts, and rank 0
reads each hello once. The arrival number of rank 0 is the number of the meeting, which it tells
every other rank.
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
from roadtrain.retry import retry
from roadtrain.stages.host_cards import this_host
from roadtrain.stages.networks import KINDS, HostCards

T = TypeVar("T")
# extra time in which other ranks wait for rank 0's answer, and in which rank 0 waits until they
# have read it
GRACE_S = 3.0
# the default deadline of a meeting; it is short because all hosts start at about the same time
MEET_S = 18.0
POLL_S = 0.02
TRY_S = 3.0  # the timeout of one attempt to connect to the store


@dataclass(frozen=True)
class RankHello:
    """The first message of a rank. `job`: lines of text that must be the same on all ranks.
    `needed`: the number of ranks that the job's parallelism needs; 0 if it states none."""

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
    """Rank 0's answer to all ranks: the host of each rank, or an error."""

    hosts: tuple[HostCards, ...] = ()  # the host of each rank; empty if the start is refused
    refused: str = ""  # the message of the error; "" if there is none
    error: str = ""  # the name of the error's class
    hint: str = ""

    def check(self) -> None:
        """If the answer is an error, raise this error."""
        if self.refused:
            errors: dict[str, type[RoadtrainError]] = {
                kind.__name__: kind for kind in (ConfigError, DeadlineError, PeerError)
            }
            raise errors.get(self.error, PeerError)(self.refused, hint=self.hint)


def refusal(error: RoadtrainError) -> MeetingAnswer:
    """Return an answer that raises `error` on every rank."""
    return MeetingAnswer(
        refused=str(error).partition("\nhint: ")[0], error=type(error).__name__, hint=error.hint
    )


@dataclass(frozen=True)
class RankMeeting:
    """The result of a meeting: the hosts of all ranks, and the store through which the ranks
    met."""

    launch: Launch
    store: dist.Store  # this meeting's part of the store; it exists as long as rank 0 or its agent
    hosts: tuple[HostCards, ...]  # the host of each rank, with unique names
    arrivals: dist.Store  # the part of the store with the hellos of this start and of other starts

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def host_devices(self, hosts: Sequence[HostCards] = ()) -> list[tuple[str, str, int]]:
        """Return (host, cluster, number of ranks) for each host, in rank order. hosts: the host of
        each rank after the user's statements (default: as detected). Hosts whose fastest cards are
        on the same fabric are a cluster."""
        by_host = groupby(hosts or self.hosts, lambda host: host.name)
        return [(name, cluster_of(first), 1 + len(rest)) for name, (first, *rest) in by_host]


def cluster_of(host: HostCards) -> str:
    """Return the fabric of the host's fastest kind of card, or "ethernet" if it only has Ethernet
    cards."""
    card = min(host.cards, key=lambda c: (KINDS.index(c.kind), c.fabric_id), default=None)
    if card is None or card.kind == KINDS[-1]:
        return KINDS[-1]
    return f"{card.kind} {card.fabric_id}"


def meet(
    launch: Launch,
    *,
    job: str = "",
    needed: int = 0,
    deadline_s: float = MEET_S,
    notice_s: float = 0.0,
    host: HostCards | None = None,
) -> RankMeeting:
    """Wait for all ranks, at most `deadline_s` seconds, and return their meeting. Collective.

    job: lines of text that must be the same on all ranks. needed: the number of ranks that the job
    needs (0: unknown). notice_s: extra seconds for a restarted rank, in which others notice that
    its previous process ended. host: this host (default: detected). Raises ConfigError if ranks
    have different jobs or world sizes, or the same rank. Raises PeerError if the store cannot be
    reached. Raises DeadlineError if ranks do not arrive; the error names the missing ranks and the
    hosts of the others.
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
    """Wait for the number of this rank's meeting. number: this rank's arrival number."""
    try:
        return get(store, f"meeting of/{number}", int, patience_s, f"{hello} waited for rank 0")
    except DeadlineError as error:
        store.set(f"gone/{number}", "")
        if store.check(["last"]):
            raise _too_many(hello, int(store.get("last"))) from error
        raise


def publish(store: dist.Store, key: str, value: object, readers: int) -> None:
    """Publish a value from rank 0, and wait up to 3 s until it was read `readers` times, because
    the store may end with rank 0."""
    put(store, key, value)
    _wait_for(store, f"{key}/read", readers)


def _wait_for(store: dist.Store, key: str, readers: int) -> None:
    until = time.monotonic() + GRACE_S
    while store.add(key, 0) < readers and time.monotonic() < until:
        time.sleep(POLL_S)


def read(store: dist.Store, key: str, kind: type[T], patience_s: float, who: str) -> T:
    """Wait for a value that rank 0 publishes. who: the name of this rank in errors. Raises
    DeadlineError if it does not arrive in time, LostError if the store is closed, and WireError if
    it is invalid."""
    value = get(store, key, kind, patience_s, f"{who} waited for rank 0: {key}")
    with suppress(RuntimeError):  # rank 0 no longer waits for readers; the value is valid
        store.add(f"{key}/read", 1)
    return value


def put(store: dist.Store, key: str, value: object) -> None:
    store.set(key, msgspec.json.encode(value).decode())


def get(store: dist.Store, key: str, kind: type[T], patience_s: float, waiting: str) -> T:
    """Wait for a value in the store. waiting: the first words of errors: the rank, and the subject.
    Raises DeadlineError if it does not arrive in time, LostError if the store is closed, and
    WireError if it is invalid."""
    try:
        store.wait([key], timedelta(seconds=max(patience_s, POLL_S)))
        data = store.get(key)
    except dist.DistStoreError as error:
        raise DeadlineError(f"{waiting}: no answer within {patience_s:.0f} s") from error
    except RuntimeError as error:
        raise LostError(f"{waiting}: the rendezvous store was closed") from error
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"{waiting}: the message is invalid: {error}") from error


def _store(launch: Launch, host: str, deadline_s: float) -> dist.Store:
    me = f"host {host} (rank {launch.rank})"
    addresses = _resolved(launch, me)
    own = launch.rank == 0 and not launch.agent
    until = time.monotonic() + deadline_s

    def reach() -> None:
        left_s = max(until - time.monotonic(), POLL_S)
        socket.create_connection((addresses[0], launch.port), min(left_s, TRY_S)).close()

    try:
        if not own:
            retry(reach, OSError, deadline_s)
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
        if isinstance(error, OSError):
            why = error.strerror or "no answer"
        else:
            why = str(error).splitlines()[0]
        raise PeerError(
            f"{me} cannot {'open' if own else 'reach'} the rendezvous at {where} (MASTER_ADDR"
            f" {launch.address}) within {deadline_s:.0f} s: {why}",
            hint="check that rank 0's host is up, MASTER_ADDR is right and no firewall interferes",
        ) from error


def _resolved(launch: Launch, me: str) -> list[str]:
    """Return the addresses of the store's host, loopback addresses last. Raises ConfigError if its
    name cannot be resolved."""
    try:
        found = socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{me} cannot resolve MASTER_ADDR {launch.address}: {error.strerror or error}",
            hint="add the name to DNS or /etc/hosts, or set MASTER_ADDR to an IP address",
        ) from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    return sorted(addresses, key=lambda address: ipaddress.ip_address(address).is_loopback)


def _only_loopback(addresses: Sequence[str]) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _loopback_error(launch: Launch, addresses: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"MASTER_ADDR {launch.address} resolves to {addresses[0]}, which is loopback (lo): other"
        " hosts would look for rank 0 on themselves",
        hint=f"map {launch.address} to its card's address in /etc/hosts of every host, or set"
        " MASTER_ADDR to that address",
    )


class _Arrivals:
    """Rank 0's side of a meeting: it reads the hellos (first messages) of ranks until the time
    `until` (of time.monotonic), and answers all of these ranks. `number`: the number of the
    meeting. `own`: the store of this meeting's answer."""

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
        """Answer all ranks, and return the answer when all have read it, or after 3 s."""
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
                pass  # the sender of an invalid hello gets the same refusal as other ranks
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
                    # the rank's earlier process ended, and this hello is from its restart
                    del found[hello.rank]
                check_same(self.mine, found, hello)
                found[hello.rank] = hello
        except (ConfigError, PeerError) as error:
            return refusal(error)
        hosts = [found[rank].host for rank in range(self.launch.world_size)]
        return MeetingAnswer(hosts=unique_names(hosts))

    def _next(self) -> RankHello:
        """Return the next hello of a rank that still waits. Raises DeadlineError if none arrives in
        time, and WireError for an invalid hello."""
        while True:
            key, left = f"hello/{self.seen + 1}", self.until - time.monotonic()
            try:
                hello = get(self.store, key, RankHello, left, "rank 0 waited for other ranks")
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
    """Return the number of hellos that rank 0 has read, over all starts."""
    return int(store.get("heard")) if store.check(["heard"]) else 0


def check_same(mine: RankHello, found: Mapping[int, RankHello], hello: RankHello) -> None:
    """Raise ConfigError about the first contradiction between a rank's hello (first message) and
    earlier ones. mine: the hello of rank 0. found: rank -> earlier hello."""
    here, there = (f"rank {h.rank} of host {h.host.name}" for h in (mine, hello))
    if hello.world_size != mine.world_size:
        raise _other_size(hello, mine.world_size, here)
    if hello.needed and hello.needed != hello.world_size:
        raise ConfigError(
            f"the job's parallelism has {hello.needed} ranks, but {hello.world_size} were started"
            f" (WORLD_SIZE of {there})",
            hint="start one rank per device: nnodes times nproc-per-node must be dp x tp x pp",
        )
    if hello.rank in found:
        raise ConfigError(
            f"host {found[hello.rank].host.name} and host {hello.host.name} both have rank"
            f" {hello.rank}",
            hint="give each host its own --node-rank",
        )
    if hello.job != mine.job:
        lines = zip_longest(mine.job.splitlines(), hello.job.splitlines(), fillvalue="nothing")
        first, second = next(pair for pair in lines if pair[0] != pair[1])
        raise ConfigError(
            f"{here} and {there} have different jobs: {first} on the first, {second} on the second",
            hint="start all ranks with the same job",
        )


def _other_size(hello: RankHello, world_size: int, other: str = "rank 0") -> ConfigError:
    needed = f"; the job's parallelism has {hello.needed}" if hello.needed else ""
    return ConfigError(
        f"{hello} was started as one of {hello.world_size} ranks (WORLD_SIZE), {other} as one of"
        f" {world_size}{needed}",
        hint="pass the same --nnodes and --nproc-per-node to torchrun on all hosts",
    )


def _too_many(hello: RankHello, world_size: int) -> ConfigError:
    if hello.world_size != world_size:
        return _other_size(hello, world_size)
    return ConfigError(
        f"{hello} arrived after all {world_size} ranks had met",
        hint="give each host its own --node-rank; after a restart of one host, restart the others",
    )


def late_error(meeting: RankMeeting) -> RoadtrainError | None:
    """Return an error if any rank arrived after the meeting was complete, otherwise None."""
    store = meeting.arrivals
    for number in range(_count_seen(store) + 1, store.add("arrived", 0) + 1):
        with suppress(DeadlineError):
            hello = get(store, f"hello/{number}", RankHello, GRACE_S, "rank 0 read a late hello")
            if not store.check([f"gone/{number}"]):
                return _too_many(hello, meeting.world_size)
    return None


def unique_names(hosts: Sequence[HostCards]) -> tuple[HostCards, ...]:
    """Return the hosts with unique names. An address that only one of them has, or else the host's
    identity, distinguishes hosts of the same name."""
    by_name: dict[str, dict[str, HostCards]] = {}
    for host in hosts:
        by_name.setdefault(host.name, {})[host.identity] = host

    def unique(host: HostCards) -> HostCards:
        alike = by_name[host.name].values()
        if len(alike) == 1:
            return host
        addresses = [card.address for other in alike for card in other.cards]
        own = (card.address for card in host.cards if addresses.count(card.address) == 1)
        return replace(host, name=f"{host.name} at {next(own, host.identity)}")

    return tuple(map(unique, hosts))


def _missing(launch: Launch, found: Mapping[int, RankHello]) -> RoadtrainError:
    absent = [rank for rank in range(launch.world_size) if rank not in found]
    hosts = dict.fromkeys(found[rank].host.name for rank in sorted(found))
    resolved = [str(entry[4][0]) for entry in socket.getaddrinfo(launch.address, launch.port)]
    if _only_loopback(resolved) and len(hosts) == 1:
        return _loopback_error(launch, resolved)
    which = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    unanswered = sorted(half_open(launch.port))
    blocked = (
        f"; packets from {', '.join(unanswered)} arrive here, but replies do not arrive there: a"
        " firewall blocks one direction"
        if unanswered
        else ""
    )
    return DeadlineError(
        f"{len(found)} of {launch.world_size} ranks have reached {launch.address}:{launch.port}"
        f" (of {', '.join(hosts)}), {which} {'has' if len(absent) == 1 else 'have'} not{blocked}",
        hint="check that the missing host is up and can reach this address; read its output",
    )


def half_open(*ports: int) -> set[str]:
    """Return the addresses of hosts that try to connect to `ports` of this host, but do not receive
    its replies."""
    return {
        link.raddr.ip.removeprefix("::ffff:")
        for link in psutil.net_connections("tcp")
        if link.status == psutil.CONN_SYN_RECV and link.laddr.port in ports
    }
