"""The summation service as a worker starts it: the workers of one start find each other, learn who
sums with whom (worker_places.py), and link up.

    connect: tell where this worker is -> listen -> group the workers -> sum with other hosts
    (worker_sums.py) -> sum inside this host -> agree about operations (agreement.py) -> watch spare
    hosts (spare_hosts.py)

From then on: `HostSums` (host_sums.py) sums memory, TensorSums (tensor_sums.py) tensors of torch.
Reducers are reducer.py, on spare hosts sum_server.py; what they decide is in protocol/.

NOTE no secret is told. What goes through `tell` (a process group of torch, most often) anybody on
its way can read, so no token does: workers of one host meet at Unix sockets, which know the user,
and those of several hosts prove a token made of the one that each was given in a file. Without one
they meet over loopback addresses only.

Assumes a way to tell all workers a few bytes (`tell`), used at the start only. Does NOT know torch.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from roadtrain.environment import host_identity
from roadtrain.errors import ConfigError
from roadtrain.servers import frames as m
from roadtrain.servers.connection import link_to
from roadtrain.sums.agreement import Agreement
from roadtrain.sums.coordinator import TO_COORDINATOR, Coordinator
from roadtrain.sums.coordinator_link import CoordinatorLink
from roadtrain.sums.host_sums import CrossHostSums, HostSums
from roadtrain.sums.host_topology import roots_here
from roadtrain.sums.protocol.membership import Spares
from roadtrain.sums.protocol.shares import optimum
from roadtrain.sums.spare_hosts import SpareHosts, watch
from roadtrain.sums.sum_server import Reducers
from roadtrain.sums.worker_places import (
    WorkerAddress,
    WorkerHello,
    check_hellos,
    groups_of,
    roots_of,
)
from roadtrain.sums.worker_sums import SumOptions, WorkerSums
from roadtrain.transport import shm
from roadtrain.transport.address import address_of, local_options
from roadtrain.transport.tcp import Address, TcpOptions, listen
from roadtrain.units import MIB

LEAVE_S = 10.0  # for the other workers to leave, at the end
NEAR_PART = 4 * MIB  # bytes of a part that a host's workers sum: to the other hosts it is a tensor
SILENCE_S = 3.0  # after which a host that vanished is gone round

T = TypeVar("T", bound=msgspec.Struct)
Tell = Callable[[bytes], list[bytes]]  # to all workers -> what each said, by rank


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


def connect(wanted: SpareHosts, setup: SumSetup, tell: Tell) -> HostSums:
    """Meet the other workers, and say by what this one sums. All workers call it. Raises
    ConfigError, PeerError."""
    hellos = _told(tell, _hello(wanted, setup))
    check_hellos(hellos)
    with ExitStack() as ends:
        worker = _JoiningWorker(wanted, setup, hellos, ends)
        worker.places = _told(tell, worker.listen())
        start = hellos[0]
        spares = start.come or bool(start.spares)
        hosts, groups = groups_of(worker.names, worker.places, inside=start.inside, spares=spares)
        # spare hosts come and go there
        elastic = groups if worker.waits else []
        worker.begin_reducers(groups, elastic, twice=bool(hosts and groups))
        tell(b"")  # all listen
        link = CoordinatorLink()
        near = outer = worker.sum_between_hosts(groups, link if elastic else None)
        above = None
        if hosts:
            above = worker.near.above = None if outer is None else CrossHostSums(outer)
            tell(b"")  # all that stand above others do
            near = worker.sum_inside_host(hosts, groups)
        assert near is not None
        agreement = worker.agree(near, above, link)
        if setup.workers > 1 or elastic:
            worker.link_coordinator(link, agreement, outer if elastic else None)
        if worker.far.coordinator is not None and elastic:
            ends.callback(watch(wanted, worker.far.coordinator, worker.spare))
        tell(b"")  # all are linked: one that leaves at once is missed by name
        return HostSums(near, above, agreement, ends.pop_all())


def _told(tell: Tell, mine: T) -> list[T]:
    """What every worker says, by rank."""
    return [
        msgspec.json.decode(words, type=type(mine)) for words in tell(msgspec.json.encode(mine))
    ]


def _hello(wanted: SpareHosts, setup: SumSetup) -> WorkerHello:
    """Raises ConfigError, also where this host has no such address."""
    rates = [*(setup.rates or [1.0] * setup.workers)]
    if len(rates) != setup.workers:
        raise ConfigError(f"{len(rates)} rates for {setup.workers} workers", hint="one for each")
    spares = wanted.now() if setup.rank == 0 else {}
    optimum(rates, [*spares.values()])
    try:
        found = socket.getaddrinfo(setup.address, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"address {setup.address!r}: {error.strerror or error}") from error
    tls = wanted.tls
    return WorkerHello(
        secrets.token_hex(8),
        spares,
        isinstance(wanted.spares, str),
        setup.inside and setup.rule == "sum",
        rates,
        host_identity(),
        wanted.token is not None,
        tls is not None,
        tls is None or None not in (tls.cert, tls.ca),
        ipaddress.ip_address(found).is_loopback,
    )


class _JoiningWorker:
    """One worker on its way into the service. `names`: of the workers' hosts, by rank."""

    def __init__(
        self,
        wanted: SpareHosts,
        setup: SumSetup,
        hellos: Sequence[WorkerHello],
        ends: ExitStack,
    ) -> None:
        self.setup, self.start, self.ends = setup, hellos[0], ends
        self.names = [hello.host for hello in hellos]
        self.waits = setup.rule == "sum"  # workers wait for each other
        self.options = TcpOptions(token=wanted.own_token(), tls=wanted.tls, retry_s=30.0)
        # how spare hosts are reached
        self.spare = replace(
            self.options, token=wanted.token, silence_s=SILENCE_S, retry_s=5.0, close_s=1.0
        )
        self.far = Reducers(setup.nbytes)  # sums between hosts, or of all workers
        self.near = Reducers(setup.nbytes)  # sums inside this host
        self.places: list[WorkerAddress] = []  # by rank

    def listen(self) -> WorkerAddress:
        """Where the others reach this worker's reducers."""
        where, options = "", self.options
        if len(set(self.names)) > 1:
            address = self.setup.address, 0
            listener = listen(address, self.far.accept, options, language=m.LANGUAGE)
            self.ends.callback(listener.close)
            where = "{}:{}".format(*listener.address)
        # its owner's alone
        home = self.ends.enter_context(tempfile.TemporaryDirectory(prefix="roadtrain-"))
        near, far = f"{home}/sums", f"{home}/far"
        for path, reducers in ((near, self.near), (far, self.far)):
            inside = shm.listen(path, reducers.accept, local_options(options), language=m.LANGUAGE)
            self.ends.callback(inside.close)
        roots = self.setup.roots
        own = roots_here() if roots is None else [*roots]
        return WorkerAddress(where, near, far, own, roots is not None)

    def begin_reducers(
        self, groups: Sequence[Sequence[int]], elastic: Sequence[Sequence[int]], *, twice: bool
    ) -> None:
        """`twice`: this worker's gradients are summed inside its host, then between hosts."""
        if twice:
            self.far.nbytes = self.near.nbytes = self.setup.nbytes // 2
        self.ends.callback(self.far.close, LEAVE_S)
        if self.setup.rank == 0:
            self.far.coordinator = Coordinator(
                self.start.session,
                self.setup.workers,
                self.waits,
                elastic,
                self._spares(groups),
                self.setup.report,
            )

    def sum_between_hosts(
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
            [self._address(other) for other in group],
            [start.rates[other] for other in group],
            self._spares(groups),
            self.far.accept,
            SumOptions(
                f"{start.session}-{number}",
                self.options,
                self.spare,
                self.setup.rule,
                self.setup.deadline_s,
                separate=self.setup.separate,
            ),
            None if coordinator is None else coordinator.reducer_gone,
        )
        self.ends.callback(sums.close)
        return sums

    def sum_inside_host(
        self, hosts: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]
    ) -> WorkerSums:
        own = next(ranks for ranks in hosts if self.setup.rank in ranks)
        used = [place for place, rank in enumerate(own) if any(rank in ranks for ranks in groups)]
        sums = WorkerSums(
            own.index(self.setup.rank),
            [None if rank == self.setup.rank else self.places[rank].path for rank in own],
            [1.0] * len(own),
            (),
            self.near.accept,
            SumOptions(
                self.start.session,
                self.options,
                deadline_s=self.setup.deadline_s,
                part_bytes=NEAR_PART,
            ),
            roots=used if groups else roots_of(self.places, own),
        )
        self.ends.callback(self.near.close, LEAVE_S)
        self.ends.callback(sums.close)
        return sums

    def agree(
        self, near: WorkerSums, above: CrossHostSums | None, link: CoordinatorLink
    ) -> Agreement:
        """The agreement about what is summed: all workers mean the same by it."""

        def give_up() -> None:
            near.give_up()
            if above is not None:
                above.give_up()

        say = link.say if self.setup.workers > 1 else None
        setup = self.setup
        agreement = Agreement(setup.rank, self.waits, setup.deadline_s, say, give_up, near.fail)
        self.ends.callback(agreement.close)
        return agreement

    def link_coordinator(
        self, link: CoordinatorLink, agreement: Agreement, sums: WorkerSums | None
    ) -> None:
        """`sums`: those that go round spare hosts."""
        link.agreement, link.sums = agreement, sums
        hello = self.start.session, self.setup.rank, self.setup.workers, TO_COORDINATOR
        link.linked(link_to(link, self._address(0), self.far.accept, hello, self.options))
        self.ends.callback(link.close)

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
        return tuple((first + i, *spare) for i, spare in enumerate(self.start.spares.items()))
