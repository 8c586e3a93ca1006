"""How the workers of one start come together for summations: who is on which host, who sums, who watches spare hosts.

    a host's workers --(shared memory)--> its roots --(network)--> the same root of the other hosts, spare hosts
                     <------------------            <------------

Workers that are alone on their hosts need no first stage; those of one host no second, unless there are spare hosts.
Assumes a way to tell all workers a few bytes (`tell`), used at the start only. Does NOT know torch.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec

from roadtrain.errors import ConfigError, PeerError
from roadtrain.flow.inside import choose, switches_of
from roadtrain.flow.shares import optimum
from roadtrain.node import topology, watch
from roadtrain.node.dial import address_of, local_options
from roadtrain.node.roster import Control
from roadtrain.node.summation import Summation
from roadtrain.node.summing import Summers
from roadtrain.store.buffers import Buffer
from roadtrain.units import MIB
from roadtrain.wire import shm
from roadtrain.wire.tcp import Options, listen

LEAVE_S = 10.0  # for the other workers to leave, at the end
NEAR_PART = 4 * MIB  # bytes of a part that a host's workers sum: to the other hosts it is a tensor
SILENCE_S = 3.0  # after which a host that vanished is gone round
LOOK_S, AGAIN_S, MOST_S = 1.0, 2.0, 300.0  # between looks at the file, at hosts not there: first, last

Tell = Callable[[bytes], list[bytes]]  # to all workers -> what each said, by rank


class Place(msgspec.Struct, array_like=True):
    """What every worker says of itself. `roots`: which of its host's workers sum; empty: all."""

    host: str
    address: str
    path: str
    roots: list[int]
    stated: bool


class Start(msgspec.Struct, array_like=True):
    """What worker 0 says for all."""

    token: str
    session: str
    spares: dict[str, float]
    inside: bool
    rates: list[float]


@dataclass(frozen=True)
class Wanted:
    """Which spare hosts the user wants: a list, or a file that is read again and again."""

    spares: Sequence[str] | str
    rates: Sequence[float] | None
    token: bytes | None

    def now(self) -> dict[str, float]:
        """Address -> rate. Raises ConfigError."""
        if isinstance(self.spares, str):
            return self._read(Path(self.spares))
        rates = self.rates or [1.0] * len(self.spares)
        if len(rates) != len(self.spares):
            raise ConfigError(f"{len(rates)} rates for {len(self.spares)} spare hosts", hint="one for each")
        return {spare: rate for spare, rate in zip(self.spares, rates) if address_of(spare)}

    @staticmethod
    def _read(path: Path) -> dict[str, float]:
        try:
            lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
            found = {words[0]: float(words[1]) if words[1:] else 1.0 for words in lines if words}
        except (OSError, ValueError) as error:
            raise ConfigError(f"the spare hosts in {path}: {error}",
                              hint="a line for each: HOST:PORT, then its rate if it is not 1") from error
        for address, rate in found.items():
            address_of(address)
            optimum([1.0], [rate])
        return found


class Above:
    """What the workers of a host have summed, summed with the other hosts' before they get it (node/summing.py). `how`:
    of a tensor, its priority and format there; a worker says so before it pushes."""

    def __init__(self, sums: Summation) -> None:
        self._sums, self.how = sums, dict[int, tuple[int, str]]()
        self._outs: dict[tuple[int, int], Buffer] = {}

    def __call__(
        self, where: tuple[int, int], dtype: str, total: memoryview, answer: Callable[[memoryview], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        out = self._outs.get(where)
        if out is None or out.nbytes < len(total):
            out = self._outs[where] = Buffer(len(total))
        view = out.view[: len(total)]

        def done() -> None:
            if self._sums.error is not None:
                failed(self._sums.error)
            else:
                answer(view)

        priority, format = self.how.get(where[0], (0, ""))
        key = int.from_bytes(blake2b("{} {}".format(*where).encode(), digest_size=7).digest(), "little")
        self._sums.sum(key, total, view, dtype, done, priority=priority, format=format)


def connect(
    wanted: Wanted, rates: Sequence[float] | None, roots: Sequence[int] | None, tell: Tell,
    ends: list[Callable[[], None]], *, rank: int, workers: int, inside: bool, rule: str, address: str, nbytes: int,
    deadline_s: float,
) -> tuple[Summation, Above | None]:
    """This worker's Summation, and what stands above it where its host sums first. `ends`: what ends all this is put
    there, to be called from the last on. All workers call it. Raises ConfigError, PeerError."""
    rates = [*(rates or [1.0] * workers)]
    if len(rates) != workers:
        raise ConfigError(f"{len(rates)} rates for {workers} workers", hint="one for each")
    spares = wanted.now() if rank == 0 else {}
    optimum(rates, [*spares.values()])
    mine = Start(secrets.token_hex(), secrets.token_hex(8), spares, inside and rule == "sum", rates)
    start = msgspec.json.decode(tell(msgspec.json.encode(mine))[0], type=Start)
    options = Options(token=start.token.encode(), retry_s=30.0)
    far, near = Summers(nbytes), Summers(nbytes)
    listener = listen((address, 0), far.accept, options)
    ends.append(listener.close)
    home = tempfile.TemporaryDirectory(prefix="roadtrain-")
    path = f"{home.name}/sums"
    ends += [home.cleanup, shm.listen(path, near.accept, local_options(options)).close]
    here = Place(_host(), "{}:{}".format(*listener.address), path, _roots_here() if roots is None else [*roots],
                 roots is not None)
    places = [msgspec.json.decode(one, type=Place) for one in tell(msgspec.json.encode(here))]
    hosts, sums = _groups(places, inside=start.inside, spares=bool(start.spares))
    if hosts and sums:
        far.nbytes = near.nbytes = nbytes // 2
    number, group = next(((i, ranks) for i, ranks in enumerate(sums) if rank in ranks), (0, []))
    spare = replace(options, token=wanted.token, silence_s=SILENCE_S, retry_s=5.0, close_s=1.0)
    numbered = tuple((len(group) + i, *one) for i, one in enumerate(start.spares.items()))
    session = f"{start.session}-{number}"
    if rule == "sum" and group[:1] == [rank]:
        far.control = Control(session, len(group), numbered, print)
    tell(b"")  # all listen
    outer = None
    if group:
        outer = Summation(
            group.index(rank), [None if one == rank else address_of(places[one].address) for one in group],
            [start.rates[one] for one in group], numbered, far, session=session, options=options, spare=spare,
            rule=rule, deadline_s=deadline_s, control=rule == "sum")
        ends += [partial(far.close, LEAVE_S), outer.close]
        if far.control is not None:
            ends.append(_watch(wanted, far.control, spare))
    if not hosts:
        assert outer is not None
        return outer, None
    near.above = above = None if outer is None else Above(outer)
    tell(b"")  # all that stand above others do
    own = next(own for own in hosts if rank in own)
    used = [place for place, one in enumerate(own) if any(one in ranks for ranks in sums)]
    inner = Summation(
        own.index(rank), [None if one == rank else places[one].path for one in own], [1.0] * len(own), (), near,
        session=start.session, options=options, deadline_s=deadline_s, part_bytes=NEAR_PART,
        roots=used if sums else _roots(places, own))
    ends += [partial(near.close, LEAVE_S), inner.close]
    return inner, above


def _groups(places: Sequence[Place], *, inside: bool, spares: bool) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of each host, none where hosts do not sum first; the ranks of each summation between hosts."""
    names = [place.host for place in places]
    hosts = [[rank for rank, name in enumerate(names) if name == one] for one in dict.fromkeys(names)]
    if not inside or len(hosts) == len(places) or (len(hosts) == 1 and spares):
        return [], [[*range(len(places))]]
    if len(hosts) == 1:
        return hosts, []
    roots = [_roots(places, own) for own in hosts]
    return hosts, [[own[of[i]] for own, of in zip(hosts, roots)] for i in range(min(map(len, roots)))]


def _roots(places: Sequence[Place], own: Sequence[int]) -> list[int]:
    """Which of a host's workers sum, by their place on it: as its first says."""
    first, everyone = places[own[0]], [*range(len(own))]
    roots = first.roots or everyone
    if not set(roots) <= set(everyone) or len({*roots}) != len(roots):
        if not first.stated:
            return everyone  # the host has other devices than these workers'
        raise ConfigError(f"roots {roots} of a host with {len(own)} workers", hint="each once, counted from 0")
    return roots


def _host() -> str:
    """The same for processes that see the same memory and network."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _roots_here() -> list[int]:
    """By the topology of this host's accelerators and network cards; without accelerators all workers are alike."""
    devices = topology.functions(topology.ACCELERATORS, topology.NVIDIA)
    return [*choose(switches_of(devices, topology.functions(topology.CARDS))).roots] if devices else []


def _watch(wanted: Wanted, control: Control, options: Options) -> Callable[[], None]:
    """Offers spare hosts that are wanted, answer and are not there, has those left out that are not wanted any more.
    Returns what ends it."""
    over, again = threading.Event(), dict[str, tuple[float, float]]()  # address -> next try, wait after

    def due(address: str) -> bool:
        """Waits grow: a host that comes and goes costs more than it gives."""
        at, wait_s = again.get(address, (0.0, AGAIN_S))
        if (found := time.monotonic() >= at):
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
                control.gone(there[address], f"spare host {address} is not wanted any more")
            for address in now.keys() - there.keys():
                if due(address) and not isinstance(watch.ask(address_of(address), options), PeerError):
                    control.offered(address, now[address])

    thread = threading.Thread(target=look, name="spare hosts", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end
