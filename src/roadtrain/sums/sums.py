"""Start of the summation service at a worker: the workers of a run exchange their addresses, are
divided into groups that sum with each other (worker_places.py), and connect. Does NOT import torch.

    connect: exchange greetings -> listen -> group the workers -> sums with other hosts
    (worker_sums.py) -> sums inside this host -> agreement on operations (agreement.py) -> watch
    spare hosts (spare_hosts.py)

NOTE no secrets. The messages that workers exchange at the start are not encrypted, so they contain
no token. Workers of one host connect through Unix sockets, which check the user. Workers of several
hosts authenticate with a token derived from their token file. Without a token file, only loopback
addresses are used.
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

LEAVE_S = 10.0  # timeout at the end for the other workers to leave
# Bytes of a part inside a host. The sum of each such part is a tensor in the sums between hosts.
NEAR_PART = 4 * MIB
SILENCE_S = 3.0  # a spare host that is silent for longer counts as lost

T = TypeVar("T", bound=msgspec.Struct)
# An all-gather: takes this worker's message, and returns the messages of all workers by rank.
Gather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class SumSetup:
    """The options with which one worker connects to the summation service."""

    rank: int
    workers: int
    inside: bool  # whether to sum inside each host before summing between hosts
    rule: str  # "sum" or "accumulate" (protocol/reducer.py)
    address: str  # address at which other hosts reach this host
    nbytes: int  # budget of this worker's reducers
    deadline_s: float
    rates: Sequence[float] | None = None  # rates of the workers' links; None if all are equal
    # workers of this host that sum; if None, the topology of the host determines them
    roots: Sequence[int] | None = None
    separate: bool = False  # while there is a spare host, the workers' reducers sum nothing
    report: Callable[[str], None] = print  # called at worker 0 with changes of spare hosts


def connect(spare_hosts: SpareHosts, setup: SumSetup, gather: Gather) -> HostSums:
    """Connect this worker with all other workers. All workers must call this function.

    Raises:
        ConfigError: The options are invalid, or differ between workers.
        PeerError: A worker or a spare host cannot be reached.
    """
    hellos = _gathered(gather, _hello(spare_hosts, setup))
    check_hellos(hellos)
    with ExitStack() as ends:
        worker = _JoiningWorker(spare_hosts, setup, hellos, ends)
        worker.places = _gathered(gather, worker.listen())
        start = hellos[0]
        spares = start.dynamic or bool(start.spares)
        hosts, groups = groups_of(worker.names, worker.places, inside=start.inside, spares=spares)
        # groups in which spare hosts may be added and removed
        elastic = groups if worker.waits else []
        worker.begin_reducers(groups, elastic, twice=bool(hosts and groups))
        gather(b"")  # barrier: all workers listen
        link = CoordinatorLink()
        near = outer = worker.sum_between_hosts(groups, link if elastic else None)
        above = None
        if hosts:
            above = worker.near.above = None if outer is None else CrossHostSums(outer)
            gather(b"")  # barrier: all `above` are set
            near = worker.sum_inside_host(hosts, groups)
        assert near is not None
        agreement = worker.agree(near, above, link)
        if setup.workers > 1 or elastic:
            worker.link_coordinator(link, agreement, outer if elastic else None)
        if worker.far.coordinator is not None and elastic:
            ends.callback(watch(spare_hosts, worker.far.coordinator, worker.spare))
        gather(b"")  # barrier: all workers are linked, so the loss of a worker is noticed
        return HostSums(near, above, agreement, ends.pop_all())


def _gathered(gather: Gather, mine: T) -> list[T]:
    """Exchange a struct among all workers, and return the structs by rank."""
    return [msgspec.json.decode(raw, type=type(mine)) for raw in gather(msgspec.json.encode(mine))]


def _hello(spare_hosts: SpareHosts, setup: SumSetup) -> WorkerHello:
    """Make this worker's greeting. Raises ConfigError."""
    rates = [*(setup.rates or [1.0] * setup.workers)]
    if len(rates) != setup.workers:
        raise ConfigError(
            f"{len(rates)} rates for {setup.workers} workers", hint="give one rate for each worker"
        )
    spares = spare_hosts.now() if setup.rank == 0 else {}
    optimum(rates, [*spares.values()])
    try:
        found = socket.getaddrinfo(setup.address, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"cannot resolve {setup.address!r}: {error.strerror or error}") from error
    tls = spare_hosts.tls
    return WorkerHello(
        secrets.token_hex(8),
        spares,
        isinstance(spare_hosts.spares, str),
        setup.inside and setup.rule == "sum",
        rates,
        host_identity(),
        spare_hosts.token is not None,
        tls is not None,
        tls is None or None not in (tls.cert, tls.ca),
        ipaddress.ip_address(found).is_loopback,
    )


class _JoiningWorker:
    """The state of the function `connect` at one worker."""

    def __init__(
        self,
        spare_hosts: SpareHosts,
        setup: SumSetup,
        hellos: Sequence[WorkerHello],
        ends: ExitStack,
    ) -> None:
        self.setup, self.start, self.ends = setup, hellos[0], ends
        self.names = [hello.host for hello in hellos]
        self.waits = setup.rule == "sum"  # workers wait for each other
        self.options = TcpOptions(token=spare_hosts.own_token(), tls=spare_hosts.tls, retry_s=30.0)
        # options of links to spare hosts
        self.spare = replace(
            self.options, token=spare_hosts.token, silence_s=SILENCE_S, retry_s=5.0, close_s=1.0
        )
        self.far = Reducers(setup.nbytes)  # for sums between hosts, or of all workers
        self.near = Reducers(setup.nbytes)  # for sums inside this host
        self.places: list[WorkerAddress] = []  # by rank

    def listen(self) -> WorkerAddress:
        """Listen for links to this worker's reducers. Returns the addresses of the reducers."""
        where, options = "", self.options
        if len(set(self.names)) > 1:
            address = self.setup.address, 0
            listener = listen(address, self.far.accept, options, language=m.LANGUAGE)
            self.ends.callback(listener.close)
            where = "{}:{}".format(*listener.address)
        # accessible to this user only
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
        """Set the budgets of the reducers. At worker 0, also create the coordinator. `elastic`: the
        groups for which spare hosts may change. `twice`: whether gradients are summed inside hosts
        and then between hosts."""
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
        """Connect this worker with the other workers of its group. Returns None if this worker is
        in no group."""
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
            None if coordinator is None else coordinator.reducer_lost,
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
        """Make this worker's Agreement, which checks that all workers sum the same tensors."""

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
        """Connect to the coordinator. `sums` uses spare hosts, or is None."""
        link.agreement, link.sums = agreement, sums
        hello = self.start.session, self.setup.rank, self.setup.workers, TO_COORDINATOR
        link.linked(link_to(link, self._address(0), self.far.accept, hello, self.options))
        self.ends.callback(link.close)

    def _address(self, rank: int) -> Address | str | None:
        """Return the address of worker `rank` for sums between hosts, or None for this worker
        itself."""
        if rank == self.setup.rank:
            return None
        place = self.places[rank]
        same = self.names[rank] == self.names[self.setup.rank]
        return place.far if same else address_of(place.address)

    def _spares(self, groups: Sequence[Sequence[int]]) -> Spares:
        """Return the spare hosts, with the numbers that their reducers have in every group."""
        first = len(groups[0]) if groups else 0
        return tuple((first + i, *spare) for i, spare in enumerate(self.start.spares.items()))
