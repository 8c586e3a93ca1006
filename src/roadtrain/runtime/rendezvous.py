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
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec

from roadtrain.device.buffers import Buffer
from roadtrain.errors import ConfigError, PeerError
from roadtrain.protocol.host_roots import choose, switches_of
from roadtrain.protocol.shares import optimum
from roadtrain.runtime import agreement as agreeing
from roadtrain.runtime import frames as m
from roadtrain.runtime import health
from roadtrain.runtime import host as topology
from roadtrain.runtime.agreement import Agreement, AgreementCoordinator
from roadtrain.runtime.membership import Control
from roadtrain.runtime.reducer import Reducers
from roadtrain.runtime.summation import WorkerSums, link_to
from roadtrain.transport import shm
from roadtrain.transport.address import address_of, local_options
from roadtrain.transport.link import Link
from roadtrain.transport.tcp import Address, TcpOptions, Tls, listen
from roadtrain.units import MIB

LEAVE_S = 10.0  # for the other workers to leave, at the end
NEAR_PART = 4 * MIB  # bytes of a part that a host's workers sum: to the other hosts it is a tensor
SILENCE_S = 3.0  # after which a host that vanished is gone round
# between looks at the file, at hosts not there: first, last
LOOK_S, AGAIN_S, MOST_S = 1.0, 2.0, 300.0

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
    inside: bool
    rates: list[float]


@dataclass(frozen=True)
class Wanted:
    """Which spare hosts the user wants: a list, or a file that is read again and again. `token`:
    theirs, and what the workers' own is made of. `tls`: of spare hosts, and of workers to those
    on other hosts."""

    spares: Sequence[str] | str
    rates: Sequence[float] | None
    token: bytes | None
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
    (runtime/reducer.py). `how`: of a tensor, its priority and format there; a worker says so before
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


def connect(
    wanted: Wanted,
    rates: Sequence[float] | None,
    roots: Sequence[int] | None,
    tell: Tell,
    ends: list[Callable[[], None]],
    *,
    rank: int,
    workers: int,
    inside: bool,
    rule: str,
    address: str,
    nbytes: int,
    deadline_s: float,
) -> HostSums:
    """What this worker sums by. `ends`: what ends all this is put
    there, to be called from the last on. All workers call it. Raises ConfigError, PeerError."""
    rates = [*(rates or [1.0] * workers)]
    if len(rates) != workers:
        raise ConfigError(f"{len(rates)} rates for {workers} workers", hint="one for each")
    spares = wanted.now() if rank == 0 else {}
    optimum(rates, [*spares.values()])
    mine = Start(secrets.token_hex(8), spares, inside and rule == "sum", rates)
    start = msgspec.json.decode(tell(msgspec.json.encode(mine))[0], type=Start)
    homes = [
        msgspec.json.decode(one, type=Home)
        for one in tell(msgspec.json.encode(_home(wanted, address)))
    ]
    names = [one.host for one in homes]
    _check_homes(homes)
    options = TcpOptions(token=wanted.own_token(), tls=wanted.tls, retry_s=30.0)
    far, near = Reducers(nbytes), Reducers(nbytes)
    where = ""
    if len(set(names)) > 1:
        listener = listen((address, 0), far.accept, options, language=m.LANGUAGE)
        ends.append(listener.close)
        where = "{}:{}".format(*listener.address)
    home = tempfile.TemporaryDirectory(prefix="roadtrain-")  # its owner's alone
    ends.append(home.cleanup)
    for name, reducers in (("sums", near), ("far", far)):
        inner_listener = shm.listen(
            f"{home.name}/{name}", reducers.accept, local_options(options), language=m.LANGUAGE
        )
        ends.append(inner_listener.close)
    here = WorkerAddress(
        where,
        f"{home.name}/sums",
        f"{home.name}/far",
        _roots_here() if roots is None else [*roots],
        roots is not None,
    )
    places = [
        msgspec.json.decode(one, type=WorkerAddress) for one in tell(msgspec.json.encode(here))
    ]
    hosts, sums = _groups(names, places, inside=start.inside, spares=bool(start.spares))
    if hosts and sums:
        far.nbytes = near.nbytes = nbytes // 2
    number, group = next(((i, ranks) for i, ranks in enumerate(sums) if rank in ranks), (0, []))
    spare = replace(options, token=wanted.token, silence_s=SILENCE_S, retry_s=5.0, close_s=1.0)
    numbered = tuple((len(group) + i, *one) for i, one in enumerate(start.spares.items()))
    session = f"{start.session}-{number}"
    if rule == "sum" and group[:1] == [rank]:
        far.control = Control(session, len(group), numbered, print)
    if rank == 0:
        far.agreeing = AgreementCoordinator(start.session, workers, rule == "sum")
    tell(b"")  # all listen
    outer: WorkerSums | None = None
    join: Callable[[Agreement], Link] | None = None
    agreement = Agreement(rank, workers, rule == "sum", deadline_s)
    if workers > 1:
        hello = start.session, rank, workers, agreeing.HELLO
        first = (
            None
            if rank == 0
            else places[0].far
            if names[0] == names[rank]
            else address_of(places[0].address)
        )
        join = partial(link_to, address=first, own=far, hello=hello, options=options)
    if group:
        addresses: list[Address | str | None] = [
            (
                None
                if one == rank
                else (
                    places[one].far
                    if names[one] == names[rank]
                    else address_of(places[one].address)
                )
            )
            for one in group
        ]
        outer = WorkerSums(
            group.index(rank),
            addresses,
            [start.rates[one] for one in group],
            numbered,
            far,
            session=session,
            options=options,
            spare=spare,
            rule=rule,
            deadline_s=deadline_s,
            control=rule == "sum",
        )
        ends += [partial(far.close, LEAVE_S), outer.close]
        if far.control is not None:
            ends.append(_watch(wanted, far.control, spare))
    if not hosts:
        assert outer is not None
        return _agreeing(HostSums(outer, None, agreement), join, ends)
    near.above = above = None if outer is None else Above(outer)
    tell(b"")  # all that stand above others do
    own = next(own for own in hosts if rank in own)
    used = [place for place, one in enumerate(own) if any(one in ranks for ranks in sums)]
    inner = WorkerSums(
        own.index(rank),
        [None if one == rank else places[one].path for one in own],
        [1.0] * len(own),
        (),
        near,
        session=start.session,
        options=options,
        deadline_s=deadline_s,
        part_bytes=NEAR_PART,
        roots=used if sums else _roots(places, own),
    )
    ends += [partial(near.close, LEAVE_S), inner.close]
    return _agreeing(HostSums(inner, above, agreement), join, ends)


def _agreeing(
    sums: HostSums, join: Callable[[Agreement], Link] | None, ends: list[Callable[[], None]]
) -> HostSums:
    sums.agreement.leads(sums.give_up, sums.near.fail)
    if join is not None:
        sums.agreement.linked(join(sums.agreement))
        ends.append(sums.agreement.close)
    return sums


def _home(wanted: Wanted, address: str) -> Home:
    """Raises ConfigError where this host has no such address."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"address {address!r}: {error.strerror or error}") from error
    tls = wanted.tls
    listens = tls is None or None not in (tls.cert, tls.ca)
    return Home(
        _host(),
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


def _host() -> str:
    """The same for processes that see the same memory and network."""
    return (
        f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
        f" {os.stat('/proc/self/ns/net').st_ino}"
    )


def _roots_here() -> list[int]:
    """By the topology of this host's accelerators and network cards; without accelerators all
    workers are alike."""
    devices = topology.functions(topology.ACCELERATORS, topology.NVIDIA)
    return (
        [*choose(switches_of(devices, topology.functions(topology.CARDS))).roots] if devices else []
    )


def _watch(wanted: Wanted, control: Control, options: TcpOptions) -> Callable[[], None]:
    """Offers spare hosts that are wanted, answer and are not there, has those left out that are
    not wanted any more. Returns what ends it."""
    # address -> next try, wait after
    over, again = threading.Event(), dict[str, tuple[float, float]]()

    def due(address: str) -> bool:
        """Waits grow: a host that comes and goes costs more than it gives."""
        at, wait_s = again.get(address, (0.0, AGAIN_S))
        if found := time.monotonic() >= at:
            again[address] = time.monotonic() + wait_s, min(2 * wait_s, MOST_S)
        return found

    def look() -> None:
        while not over.wait(LOOK_S):
            try:
                now = wanted.now()
            except ConfigError as error:
                if due(""):
                    control.report(f"spare hosts stay as they are: {error}")
                continue
            there = control.spares
            for address in there.keys() - now.keys():
                control.lost_reducer(there[address], f"spare host {address} is not wanted any more")
            for address in now.keys() - there.keys():
                if due(address) and not isinstance(
                    health.ask(address_of(address), options), PeerError
                ):
                    control.offered(address, now[address])

    thread = threading.Thread(target=look, name="spare hosts", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end
