"""Search for plans that use a cluster's hosts in other orders than the cluster file, or that use
only some of the hosts. This helps on clusters whose hosts with devices differ.

The order of the hosts decides which hosts are neighbors in a pipeline, and which hosts form a
data-parallel group. A host with a slow network card or device often slows training down the least
if it is the first or last host of the pipeline, or if it is not used. Hosts of the same kind stay
together. At most 24 arrangements are tried. If there are more than 4 kinds of hosts with devices,
only the kinds that differ from the most common kind are moved, to the beginning or to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, permutations, zip_longest

from roadtrain.config.cluster import Cluster, Host
from roadtrain.errors import ConfigError
from roadtrain.planner.search import SearchResult

MOST = 24  # largest number of arrangements that are tried
FEW = 4  # largest number of kinds of hosts with devices for which all orders are tried
NAMES = {"name", "addresses"}  # fields of a host that do not affect its speed


@dataclass(frozen=True)
class Arrangement:
    """An order of the hosts that compute. `cluster`: the cluster with the hosts in this order.
    `left_out`: hosts with devices that this arrangement does not use, with one entry per kind."""

    cluster: Cluster
    left_out: tuple[Host, ...] = ()

    @property
    def whole(self) -> Cluster:
        """The cluster with all hosts; the unused hosts come last."""
        hosts = (*self.cluster.workers, *self.left_out, *self.cluster.spares)
        return self.cluster.model_copy(update={"hosts": hosts})

    @property
    def text(self) -> str:
        """A text for the user that lists the hosts that compute, in their order, and the unused
        hosts."""
        order = "hosts in the order " + ", ".join(host.name for host in self.cluster.workers)
        without = ", ".join(host.name for host in self.left_out)
        return order + (f", without {without}" if without else "")


@dataclass(frozen=True)
class Arranged:
    """The best arrangement, its search result, and the number of arrangements that were tried."""

    arrangement: Arrangement
    answer: SearchResult
    tried: int


def arrangements(cluster: Cluster) -> Iterator[Arrangement]:
    """Yield at most 24 different arrangements. The first has the order of the cluster file."""
    kinds, seen = cluster.workers, set[tuple[Hashable, ...]]()
    # subsets and orders alternate, so that both are among the first MOST arrangements
    others = chain.from_iterable(zip_longest(_without(kinds), _orders(kinds), fillvalue=()))
    fresh = (order for order in chain([kinds], others) if order and not _is_repeated(order, seen))
    for order in islice(fresh, MOST):
        left_out = tuple(host for host in kinds if host not in order)
        hosts = (*order, *cluster.spares)
        yield Arrangement(cluster.model_copy(update={"hosts": hosts}), left_out)


def best_arrangement(cluster: Cluster, searched: Callable[[Cluster], SearchResult]) -> Arranged:
    """Return the arrangement whose best plan has the best score; among equals, the first that was
    tried. The order of the cluster file is tried first.

    `searched`: searches a cluster, and raises ConfigError if no plan is possible. If no plan is
    possible on any arrangement, the ConfigError of the first arrangement is raised.
    """
    best: tuple[Arrangement, SearchResult] | None = None
    first: ConfigError | None = None
    tried = 0
    for arrangement in arrangements(cluster):
        try:
            answer = searched(arrangement.cluster)
        except ConfigError as error:
            first = first or error
            continue
        finally:
            tried += 1
        if best is None or _score(answer) < _score(best[1]):
            best = arrangement, answer
    if best is None:
        assert first is not None
        raise first
    return Arranged(*best, tried)


def _score(answer: SearchResult) -> float:
    return float("inf") if answer.pick is None else answer.pick.score


def _likeness(host: Host) -> Hashable:
    """Return a value that is equal for hosts that differ only in name and addresses."""
    return host.model_dump_json(exclude=NAMES)


def _is_repeated(order: Sequence[Host], seen: set[tuple[Hashable, ...]]) -> bool:
    """Return True if `seen` has an order that is equal to `order` except for names and addresses;
    otherwise add `order` to `seen` and return False."""
    signature = tuple(_likeness(host) for host in order)
    repeated = signature in seen
    seen.add(signature)
    return repeated


def _odd(kinds: Sequence[Host]) -> list[Host]:
    """Return the kinds of hosts that differ from the most common kind, slowest network card first.
    If all hosts differ, return all kinds."""
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
    """Yield subsets of the kinds of hosts. Each leaves out one or several kinds that differ from
    the most common kind."""
    odd = _odd(kinds)[:FEW]
    for many in range(1, len(odd) + 1):
        for dropped in combinations(odd, many):
            yield tuple(host for host in kinds if host not in dropped)
