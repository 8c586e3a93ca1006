"""Orders of a cluster's hosts, and which of them are left out: what is tried beside the order of
the file where hosts with devices differ.

Ranks are numbered host by host, so the order says which hosts meet at a border between stages, and
which are one data group. A host whose card or device is slow is best at an end of a pipeline, or
out of it. Hosts of a kind are alike and stay together; kinds that are alike but for their name are
not told apart. At most MOST arrangements are tried: all orders of few kinds; of many, those in
which one that is unlike most moves to an end. Pure. Does NOT know what an arrangement is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, permutations, zip_longest

from roadtrain.config.cluster import Cluster, Host
from roadtrain.errors import ConfigError
from roadtrain.planner.search import SearchResult

MOST = 24
FEW = 4  # kinds of hosts with devices of which all orders are tried
NAMES = {"name", "addresses"}  # of a host: what says nothing of how fast it is


@dataclass(frozen=True)
class Arrangement:
    """`cluster`: with its hosts in the order of ranks. `left_out`: kinds of hosts with devices that
    it lacks."""

    cluster: Cluster
    left_out: tuple[Host, ...] = ()

    @property
    def whole(self) -> Cluster:
        """With what is left out behind those that compute, where no rank comes to it."""
        hosts = (*self.cluster.workers, *self.left_out, *self.cluster.spares)
        return self.cluster.model_copy(update={"hosts": hosts})

    @property
    def said(self) -> str:
        """For people."""
        order = "hosts in the order " + ", ".join(host.name for host in self.cluster.workers)
        without = ", ".join(host.name for host in self.left_out)
        return order + (f", without {without}" if without else "")


@dataclass(frozen=True)
class Arranged:
    """The best arrangement, what was found for it, and how many were tried."""

    arrangement: Arrangement
    answer: SearchResult
    tried: int


def arrangements(cluster: Cluster) -> Iterator[Arrangement]:
    """The order of the file first; then others, each once."""
    kinds, seen = cluster.workers, set[tuple[Hashable, ...]]()
    # in turn, so that the bound leaves some of each
    others = chain.from_iterable(zip_longest(_without(kinds), _orders(kinds), fillvalue=()))
    fresh = (one for one in chain([kinds], others) if one and not _known(one, seen))
    for order in islice(fresh, MOST):
        left_out = tuple(host for host in kinds if host not in order)
        hosts = (*order, *cluster.spares)
        yield Arrangement(cluster.model_copy(update={"hosts": hosts}), left_out)


def best_arrangement(cluster: Cluster, searched: Callable[[Cluster], SearchResult]) -> Arranged:
    """By the score of each one's pick; the order of the file where no other is better. `searched`:
    the search of a cluster, which raises ConfigError where it takes no plan. Raises ConfigError
    where none does, as for the order of the file."""
    best: tuple[Arrangement, SearchResult] | None = None
    first: ConfigError | None = None
    tried = 0
    for one in arrangements(cluster):
        try:
            answer = searched(one.cluster)
        except ConfigError as error:
            first = first or error
            continue
        finally:
            tried += 1
        if best is None or _score(answer) < _score(best[1]):
            best = one, answer
    if best is None:
        assert first is not None
        raise first
    return Arranged(*best, tried)


def _score(answer: SearchResult) -> float:
    return float("inf") if answer.pick is None else answer.pick.score


def _likeness(host: Host) -> Hashable:
    return host.model_dump_json(exclude=NAMES)


def _known(order: Sequence[Host], seen: set[tuple[Hashable, ...]]) -> bool:
    """Whether hosts that are alike were in this order before."""
    signature = tuple(_likeness(host) for host in order)
    known = signature in seen
    seen.add(signature)
    return known


def _odd(kinds: Sequence[Host]) -> list[Host]:
    """Those unlike most hosts, the slowest card first; all where no kind is like another."""
    alike = Counter[Hashable]()
    for host in kinds:
        alike[_likeness(host)] += host.count
    most, often = alike.most_common(1)[0] if kinds else ("", 0)
    odd = [host for host in kinds if _likeness(host) != most or often == 1]
    return sorted(odd, key=lambda host: max((nic.total for nic in host.nics), default=0.0))


def _orders(kinds: Sequence[Host]) -> Iterator[tuple[Host, ...]]:
    if len(kinds) <= FEW:
        yield from permutations(kinds)
        return
    odd = _odd(kinds)
    for moved in chain(([host] for host in odd), [odd]):
        rest = [host for host in kinds if host not in moved]
        yield (*rest, *moved)
        yield (*moved, *rest)


def _without(kinds: Sequence[Host]) -> Iterator[tuple[Host, ...]]:
    """Without one of those unlike most, or several."""
    odd = _odd(kinds)[:FEW]
    for many in range(1, len(odd) + 1):
        for gone in combinations(odd, many):
            yield tuple(host for host in kinds if host not in gone)
