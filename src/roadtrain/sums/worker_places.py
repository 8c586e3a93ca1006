"""The greetings and addresses that workers exchange at the start, and the groups of workers that
sum with each other. A root is a worker that sums for the workers of its host.

    a host's workers <--(shared memory)--> its roots <--(network)--> roots of other hosts,
                                                                     spare hosts
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from roadtrain.errors import ConfigError


class WorkerHello(msgspec.Struct, array_like=True):
    """The greeting that a worker sends to all workers before the worker listens for links. Only
    worker 0's values count for the fields from `session` to `rates`."""

    session: str  # name of the run
    spares: dict[str, float]  # address -> link rate
    dynamic: bool  # whether spare hosts are listed in a file, so more may be added
    inside: bool  # whether to sum inside each host first
    rates: list[float]  # rates of the workers' links
    host: str
    has_token: bool
    tls: bool
    listens: bool  # can accept links: it has no TLS, or it has TLS with certificate and CA
    loopback: bool  # its address is a loopback address


class WorkerAddress(msgspec.Struct, array_like=True):
    """The addresses of a worker's reducers."""

    address: str  # HOST:PORT for workers of other hosts; "" if there are no other hosts
    path: str  # Unix socket for sums inside the host
    far: str  # Unix socket for sums between hosts
    roots: list[int]  # workers of its host that sum; if empty, all sum
    stated: bool  # whether the user chose `roots`


def check_hellos(hellos: Sequence[WorkerHello]) -> None:
    """Check that the workers' options fit together. All workers raise the same ConfigError."""
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        for what, here, there in (
            ("token", first.has_token, hello.has_token),
            ("tls", first.tls, hello.tls),
        ):
            if here != there:
                raise ConfigError(
                    f"worker 0 has {'' if here else 'no '}{what}, but worker {rank} has"
                    f" {'' if there else 'no '}{what}",
                    hint=f"give all workers the same {what}",
                )
    hosts = len({hello.host for hello in hellos})
    if hosts > 1 and not all(hello.listens for hello in hellos):
        raise ConfigError(
            f"workers on {hosts} hosts must accept links, but a worker has tls without cert or ca",
            hint="give every worker tls=Tls(cert, key, ca) of its host",
        )
    if hosts > 1 and not first.has_token and not all(hello.loopback for hello in hellos):
        raise ConfigError(
            f"workers on {hosts} hosts have no token, so anybody who can reach a worker could join",
            hint="use token=PATH, the same file on all hosts: (umask 077; head -c 32"
            " /dev/urandom | base64 > PATH)",
        )


def groups_of(
    names: Sequence[str], places: Sequence[WorkerAddress], *, inside: bool, spares: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Divide the workers into groups.

    Args:
        names: The host of each worker.
        inside: Whether to sum inside each host before summing between hosts.
        spares: Whether there are spare hosts now, or may be later.

    Returns:
        The ranks of each host, or an empty list if there are no sums inside hosts; and the ranks of
        each group that sums between hosts.
    """
    hosts = [
        [rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)
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
    """Return the numbers of the workers of a host that sum, counted from 0 on the host. The host's
    first worker decides. `own` lists the ranks of the host's workers. Raises ConfigError if the
    user chose invalid roots."""
    first, everyone = places[own[0]], [*range(len(own))]
    roots = first.roots or everyone
    if not set(roots) <= set(everyone) or len({*roots}) != len(roots):
        if not first.stated:
            return everyone  # the host has devices that no worker uses
        raise ConfigError(
            f"invalid roots {roots} for a host with {len(own)} workers",
            hint="list no worker twice; the workers of each host are counted from 0",
        )
    return roots
