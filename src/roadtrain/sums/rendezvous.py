"""How the workers of one start come together for summations: who is on which host, who sums, who
watches spare hosts.

    a host's workers --(shared memory)--> its roots --(network)--> the same root of the other hosts,
    spare hosts
                     <------------------            <------------

Workers that are alone on their hosts need no first stage; those of one host no second, unless there
are spare hosts.

NOTE no secret is told. What goes through `tell` (a process group of torch, most often) anybody on
its way can read, so no token does: workers of one host meet at Unix sockets, which know the user,
and those of several hosts prove a token made of the one that each was given in a file. Without one
they meet over loopback addresses only.

Assumes a way to tell all workers a few bytes (`tell`), used at the start only. Does NOT know torch.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from roadtrain.device.buffers import Buffer
from roadtrain.environment import host_identity
from roadtrain.errors import ConfigError, PeerError
from roadtrain.servers import frames as m
from roadtrain.servers import health
from roadtrain.servers.connection import link_to
from roadtrain.sums import host_topology as topology
from roadtrain.sums.agreement import Agreement
from roadtrain.sums.coordinator import TO_COORDINATOR, Coordinator, CoordinatorLink
from roadtrain.sums.protocol.host_roots import choose, switches_of
from roadtrain.sums.protocol.membership import Spares
from roadtrain.sums.protocol.shares import optimum
from roadtrain.sums.reducer import Reducers
from roadtrain.sums.summation import SumOptions, WorkerSums
from roadtrain.transport import shm
from roadtrain.transport.address import address_of, local_options
from roadtrain.transport.tcp import Address, TcpOptions, Tls, listen
from roadtrain.units import MIB

LEAVE_S = 10.0  # for the other workers to leave, at the end
NEAR_PART = 4 * MIB  # bytes of a part that a host's workers sum: to the other hosts it is a tensor
SILENCE_S = 3.0  # after which a host that vanished is gone round
# between looks at the file, at hosts not there: first, last
LOOK_S, AGAIN_S, MOST_S = 1.0, 2.0, 300.0

T = TypeVar("T", bound=msgspec.Struct)
Tell = Callable[[bytes], list[bytes]]  # to all workers -> what each said, by rank


class WorkerAddress(msgspec.Struct, array_like=True):
    """What every worker says of itself. `address`: where the workers of other hosts reach it, ""
    where there are none.
    `path`, `far`: of Unix sockets, for those of its host: of what a host sums first, and of the
    rest. `roots`: which of its host's workers sum; empty: all."""

    address: str
    path: str
    far: str
    roots: list[int]
    stated: bool


class Home(msgspec.Struct, array_like=True):
    """Where a worker is, before it listens. `guarded`: it has a token; `tls`: it speaks TLS;
    `listens`: it could be dialed with that; `loopback`: only this host reaches its address."""

    host: str
    guarded: bool
    tls: bool
    listens: bool
    loopback: bool


class Start(msgspec.Struct, array_like=True):
    """What worker 0 says for all."""

    session: str
    spares: dict[str, float]
    come: bool  # spare hosts may come that are not there yet
    inside: bool
    rates: list[float]


@dataclass(frozen=True)
class Wanted:
    """Which spare hosts the user wants: a list, or a file that is read again and again. `token`:
    theirs, and what the workers' own is made of. `tls`: of spare hosts, and of workers to those
    on other hosts."""

    spares: Sequence[str] | str
    rates: Sequence[float] | None
    token: bytes | None = field(repr=False)
    tls: Tls | None = None

    def own_token(self) -> bytes | None:
        """Of the workers among themselves: spare hosts' token in another role."""
        return self.token and hmac.digest(
            self.token, b"roadtrain: workers of a summation", "sha256"
        )

    def now(self) -> dict[str, float]:
        """Address -> rate. Raises ConfigError."""
        if isinstance(self.spares, str):
            return self._read(Path(self.spares))
        rates = self.rates or [1.0] * len(self.spares)
        if len(rates) != len(self.spares):
            raise ConfigError(
                f"{len(rates)} rates for {len(self.spares)} spare hosts", hint="one for each"
            )
        return {spare: rate for spare, rate in zip(self.spares, rates) if address_of(spare)}

    @staticmethod
    def _read(path: Path) -> dict[str, float]:
        try:
            lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
            found = {words[0]: float(words[1]) if words[1:] else 1.0 for words in lines if words}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the spare hosts in {path}: {error}",
                hint="a line for each: HOST:PORT, then its rate if it is not 1",
            ) from error
        for address, rate in found.items():
            address_of(address)
            optimum([1.0], [rate])
        return found


class Above:
    """What the workers of a host have summed, summed with the other hosts' before they get it
    (sums/reducer.py). `how`: of a tensor, its priority and format there; a worker says so before
    it pushes."""

    def __init__(self, sums: WorkerSums) -> None:
        self._sums, self.how = sums, dict[int, tuple[int, str]]()
        self._outs: dict[tuple[int, int], Buffer] = {}
        self._lock = threading.Lock()  # over giving up, and what would be begun after it

    def __call__(
        self,
        where: tuple[int, int],
        dtype: str,
        total: memoryview,
        answer: Callable[[memoryview], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        with self._lock:
            if where[0] not in self.how:
                return  # given up: nobody waits for it
            out = self._outs.get(where)
            if out is None or out.nbytes < len(total):
                out = self._outs[where] = Buffer(len(total))
            self._begin(where, dtype, total, out.view[: len(total)], answer, failed)

    def _begin(
        self,
        where: tuple[int, int],
        dtype: str,
        total: memoryview,
        view: memoryview,
        answer: Callable[[memoryview], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        def done() -> None:
            if self._sums.error is not None:
                failed(self._sums.error)
            else:
                answer(view)

        priority, format = self.how[where[0]]
        key = int.from_bytes(
            blake2b("{} {}".format(*where).encode(), digest_size=7).digest(), "little"
        )
        self._sums.sum(key, total, view, dtype, done, priority=priority, format=format)

    def give_up(self) -> None:
        with self._lock:
            self.how.clear()
            self._outs.clear()
            self._sums.give_up()


@dataclass(frozen=True)
class HostSums:
    """What a worker sums by: `near` it does, `above` stands above that where its host sums
    first."""

    near: WorkerSums
    above: Above | None
    agreement: Agreement

    def give_up(self) -> None:
        self.near.give_up()
        if self.above is not None:
            self.above.give_up()


@dataclass(frozen=True)
class SumSetup:
    """One worker of a summation."""

    rank: int
    workers: int
    inside: bool  # hosts sum first
    rule: str
    address: str  # of this host, for the workers of others
    nbytes: int  # that reducers here may use
    deadline_s: float
    rates: Sequence[float] | None = None  # of the workers' links; None: all are alike
    roots: Sequence[int] | None = None  # which of a host's workers sum; None: by its topology
    separate: bool = False  # workers sum only while there is no spare host
    report: Callable[[str], None] = print  # of worker 0, hears of spare hosts that come and go


def connect(
    wanted: Wanted, setup: SumSetup, tell: Tell, ends: list[Callable[[], None]]
) -> HostSums:
    """What this worker sums by. `ends`: what ends all this is put
    there, to be called from the last on. All workers call it. Raises ConfigError, PeerError."""
    rates = [*(setup.rates or [1.0] * setup.workers)]
    if len(rates) != setup.workers:
        raise ConfigError(f"{len(rates)} rates for {setup.workers} workers", hint="one for each")
    spares = wanted.now() if setup.rank == 0 else {}
    optimum(rates, [*spares.values()])
    inside, come = setup.inside and setup.rule == "sum", isinstance(wanted.spares, str)
    mine = Start(secrets.token_hex(8), spares, come, inside, rates)
    start = _told(tell, mine)[0]
    homes = _told(tell, _home(wanted, setup.address))
    _check_homes(homes)
    return _Rendezvous(wanted, setup, start, [one.host for one in homes], ends).meet(tell)


def _told(tell: Tell, mine: T) -> list[T]:
    """What every worker says, by rank."""
    return [msgspec.json.decode(one, type=type(mine)) for one in tell(msgspec.json.encode(mine))]


class _Rendezvous:
    """One worker that knows how the start begins. `names`: of the workers' hosts."""

    def __init__(
        self,
        wanted: Wanted,
        setup: SumSetup,
        start: Start,
        names: Sequence[str],
        ends: list[Callable[[], None]],
    ) -> None:
        self.wanted, self.setup, self.start, self.names = wanted, setup, start, names
        self.ends = ends
        self.waits = setup.rule == "sum"  # workers wait for each other
        self.options = TcpOptions(token=wanted.own_token(), tls=wanted.tls, retry_s=30.0)
        # how spare hosts are reached
        self.spare = replace(
            self.options, token=wanted.token, silence_s=SILENCE_S, retry_s=5.0, close_s=1.0
        )
        self.far = Reducers(setup.nbytes)  # sums between hosts, or of all workers
        self.near = Reducers(setup.nbytes)  # sums inside this host
        self.places: list[WorkerAddress] = []  # by rank

    def meet(self, tell: Tell) -> HostSums:
        rank, workers, start = self.setup.rank, self.setup.workers, self.start
        self.places = _told(tell, self._listen())
        hosts, groups = _groups(
            self.names,
            self.places,
            inside=start.inside,
            spares=start.come or bool(start.spares),
        )
        if hosts and groups:
            self.far.nbytes = self.near.nbytes = self.setup.nbytes // 2
        elastic = groups if self.waits else []  # spare hosts come and go there
        self.ends.append(partial(self.far.close, LEAVE_S))
        if rank == 0:
            self.far.coordinator = Coordinator(
                start.session,
                workers,
                self.waits,
                elastic,
                self._spares(groups),
                self.setup.report,
            )
        tell(b"")  # all listen
        link = CoordinatorLink() if workers > 1 or elastic else None
        outer = self._outer(groups, link if elastic else None)
        inner, above = self._inner(tell, hosts, groups, outer) if hosts else (outer, None)
        assert inner is not None
        others = link if workers > 1 else None
        agreement = Agreement(rank, self.waits, self.setup.deadline_s, others)
        sums = HostSums(inner, above, agreement)
        agreement.leads(sums.give_up, inner.fail)
        self.ends.append(agreement.close)
        if link is not None:
            link.agreement, link.sums = agreement, outer if elastic else None
            hello = start.session, rank, workers, TO_COORDINATOR
            link.linked(link_to(link, self._address(0), self.far.accept, hello, self.options))
            self.ends.append(link.close)
        if self.far.coordinator is not None and elastic:
            self.ends.append(_watch(self.wanted, self.far.coordinator, self.spare))
        tell(b"")  # all are linked: one that leaves at once is missed by name
        return sums

    def _listen(self) -> WorkerAddress:
        """Where the others reach this worker's reducers."""
        where, options = "", self.options
        if len(set(self.names)) > 1:
            address = self.setup.address, 0
            listener = listen(address, self.far.accept, options, language=m.LANGUAGE)
            self.ends.append(listener.close)
            where = "{}:{}".format(*listener.address)
        home = tempfile.TemporaryDirectory(prefix="roadtrain-")  # its owner's alone
        self.ends.append(home.cleanup)
        near, far = f"{home.name}/sums", f"{home.name}/far"
        for path, reducers in ((near, self.near), (far, self.far)):
            inside = shm.listen(path, reducers.accept, local_options(options), language=m.LANGUAGE)
            self.ends.append(inside.close)
        roots = self.setup.roots
        own = _roots_here() if roots is None else [*roots]
        return WorkerAddress(where, near, far, own, roots is not None)

    def _address(self, rank: int) -> Address | str | None:
        """Of a worker's reducers between hosts; None: they are this worker's own."""
        if rank == self.setup.rank:
            return None
        place = self.places[rank]
        same = self.names[rank] == self.names[self.setup.rank]
        return place.far if same else address_of(place.address)

    def _spares(self, groups: Sequence[Sequence[int]]) -> Spares:
        """The groups have as many workers each, so spare hosts have the same numbers in all."""
        first = len(groups[0]) if groups else 0
        return tuple((first + i, *one) for i, one in enumerate(self.start.spares.items()))

    def _outer(
        self, groups: Sequence[Sequence[int]], coordinator: CoordinatorLink | None
    ) -> WorkerSums | None:
        """Sums with other hosts, or of all workers, if this worker takes part in them."""
        rank, start = self.setup.rank, self.start
        number = next((i for i, ranks in enumerate(groups) if rank in ranks), None)
        if number is None:
            return None
        group = groups[number]
        sums = WorkerSums(
            group.index(rank),
            [self._address(one) for one in group],
            [start.rates[one] for one in group],
            self._spares(groups),
            self.far,
            SumOptions(
                f"{start.session}-{number}",
                self.options,
                self.spare,
                self.setup.rule,
                self.setup.deadline_s,
                separate=self.setup.separate,
            ),
            coordinator,
        )
        self.ends.append(sums.close)
        return sums

    def _inner(
        self,
        tell: Tell,
        hosts: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]],
        outer: WorkerSums | None,
    ) -> tuple[WorkerSums, Above | None]:
        """Sums inside this host, and what stands above them."""
        self.near.above = above = None if outer is None else Above(outer)
        tell(b"")  # all that stand above others do
        own = next(ranks for ranks in hosts if self.setup.rank in ranks)
        used = [place for place, one in enumerate(own) if any(one in ranks for ranks in groups)]
        sums = WorkerSums(
            own.index(self.setup.rank),
            [None if one == self.setup.rank else self.places[one].path for one in own],
            [1.0] * len(own),
            (),
            self.near,
            SumOptions(
                self.start.session,
                self.options,
                deadline_s=self.setup.deadline_s,
                part_bytes=NEAR_PART,
            ),
            roots=used if groups else _roots(self.places, own),
        )
        self.ends += [partial(self.near.close, LEAVE_S), sums.close]
        return sums, above


def _home(wanted: Wanted, address: str) -> Home:
    """Raises ConfigError where this host has no such address."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"address {address!r}: {error.strerror or error}") from error
    tls = wanted.tls
    listens = tls is None or None not in (tls.cert, tls.ca)
    return Home(
        host_identity(),
        wanted.token is not None,
        tls is not None,
        listens,
        ipaddress.ip_address(found).is_loopback,
    )


def _check_homes(homes: Sequence[Home]) -> None:
    """The same error on all workers, since all have heard the same. Raises ConfigError."""
    first = homes[0]
    for rank, one in enumerate(homes):
        for what, here, there in (
            ("token_file", first.guarded, one.guarded),
            ("tls", first.tls, one.tls),
        ):
            if here != there:
                raise ConfigError(
                    f"worker 0 has {'a' if here else 'no'} {what}, worker {rank} has "
                    f"{'one' if there else 'none'}",
                    hint="give all workers the same",
                )
    hosts = len({one.host for one in homes})
    if hosts > 1 and not all(one.listens for one in homes):
        raise ConfigError(
            f"workers on {hosts} hosts listen for each other, and one has tls without cert or ca",
            hint="tls=Tls(cert, key, ca) of this host, on all of them",
        )
    if hosts > 1 and not first.guarded and not all(one.loopback for one in homes):
        raise ConfigError(
            f"workers on {hosts} hosts and no token: anybody who reaches their addresses could"
            " join",
            hint=(
                "token_file=PATH, the same file on all hosts: (umask 077; head -c 32 /dev/urandom |"
                " base64 > PATH)"
            ),
        )


def _groups(
    names: Sequence[str], places: Sequence[WorkerAddress], *, inside: bool, spares: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """`names`: of the workers' hosts. The ranks of each host, none where hosts do not sum first;
    the ranks of each summation between hosts."""
    hosts = [
        [rank for rank, name in enumerate(names) if name == one] for one in dict.fromkeys(names)
    ]
    if not inside or len(hosts) == len(places) or (len(hosts) == 1 and spares):
        return [], [[*range(len(places))]]
    if len(hosts) == 1:
        return hosts, []
    roots = [_roots(places, own) for own in hosts]
    return hosts, [
        [own[of[i]] for own, of in zip(hosts, roots)] for i in range(min(map(len, roots)))
    ]


def _roots(places: Sequence[WorkerAddress], own: Sequence[int]) -> list[int]:
    """Which of a host's workers sum, by their place on it: as its first says."""
    first, everyone = places[own[0]], [*range(len(own))]
    roots = first.roots or everyone
    if not set(roots) <= set(everyone) or len({*roots}) != len(roots):
        if not first.stated:
            return everyone  # the host has other devices than these workers'
        raise ConfigError(
            f"roots {roots} of a host with {len(own)} workers", hint="each once, counted from 0"
        )
    return roots


def _roots_here() -> list[int]:
    """By the topology of this host's accelerators and network cards; without accelerators all
    workers are alike."""
    devices = topology.functions(topology.ACCELERATORS, topology.NVIDIA)
    return [*choose(switches_of(devices, topology.functions(topology.CARDS)))] if devices else []


def _watch(wanted: Wanted, coordinator: Coordinator, options: TcpOptions) -> Callable[[], None]:
    """Offers spare hosts that are wanted, answer and are not there, has those left out that are
    not wanted any more. Returns what ends it."""
    # address -> next try, wait after
    over, again = threading.Event(), dict[str, tuple[float, float]]()
    silent = dict[str, str]()  # address -> why it does not answer, as it was said

    def due(address: str) -> bool:
        """Waits grow: a host that comes and goes costs more than it gives."""
        at, wait_s = again.get(address, (0.0, AGAIN_S))
        if found := time.monotonic() >= at:
            again[address] = time.monotonic() + wait_s, min(2 * wait_s, MOST_S)
        return found

    def answers(address: str) -> bool:
        found = health.ask(address_of(address), options)
        why = str(found).splitlines()[0] if isinstance(found, PeerError) else ""
        if why and silent.get(address) != why:
            coordinator.report(f"spare host {address} is used as soon as it answers: {why}")
        silent[address] = why
        return not why

    def look() -> None:
        while not over.wait(LOOK_S):
            try:
                now = wanted.now()
            except ConfigError as error:
                if due(""):
                    coordinator.report(f"spare hosts stay as they are: {error}")
                continue
            there = [group.spares for group in coordinator.groups]
            for group, spares in zip(coordinator.groups, there):
                for address in spares.keys() - now.keys():
                    why = f"spare host {address} is not wanted any more"
                    group.lost_reducer(spares[address], why)
            for address in now.keys() - set.intersection(*map(set, there)):
                if due(address) and answers(address):
                    for group in coordinator.groups:
                        group.offered(address, now[address])

    thread = threading.Thread(target=look, name="spare hosts", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end
