"""Where the workers of a summation are, as they tell each other at the start, and which of them sum
with which.

    a host's workers --(shared memory)--> its roots --(network)--> the same root of the other hosts,
    spare hosts
                     <------------------            <------------

Workers that are alone on their hosts need no first stage; those of one host no second, unless there
are spare hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from roadtrain.errors import ConfigError


class WorkerHello(msgspec.Struct, array_like=True):
    """What every worker says before it listens. Of worker 0 counts what it says for all: the name
    of the start, spare hosts, links' rates. `come`: spare hosts may come that are not there yet;
    `guarded`: it has a token; `tls`: it speaks TLS; `listens`: it could be dialed with that;
    `loopback`: only this host reaches its address."""

    session: str
    spares: dict[str, float]
    come: bool
    inside: bool
    rates: list[float]
    host: str
    guarded: bool
    tls: bool
    listens: bool
    loopback: bool


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


def check_hellos(hellos: Sequence[WorkerHello]) -> None:
    """The same error on all workers, since all have heard the same. Raises ConfigError."""
    first = hellos[0]
    for rank, one in enumerate(hellos):
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
    hosts = len({one.host for one in hellos})
    if hosts > 1 and not all(one.listens for one in hellos):
        raise ConfigError(
            f"workers on {hosts} hosts listen for each other, and one has tls without cert or ca",
            hint="tls=Tls(cert, key, ca) of this host, on all of them",
        )
    if hosts > 1 and not first.guarded and not all(one.loopback for one in hellos):
        raise ConfigError(
            f"workers on {hosts} hosts and no token: anybody who reaches their addresses could"
            " join",
            hint=(
                "token_file=PATH, the same file on all hosts: (umask 077; head -c 32 /dev/urandom |"
                " base64 > PATH)"
            ),
        )


def groups_of(
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
    roots = [roots_of(places, own) for own in hosts]
    return hosts, [
        [own[of[i]] for own, of in zip(hosts, roots)] for i in range(min(map(len, roots)))
    ]


def roots_of(places: Sequence[WorkerAddress], own: Sequence[int]) -> list[int]:
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
