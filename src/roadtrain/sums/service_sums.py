"""connect_sums: connects the ranks of a data-parallel group to the summation service, whose
reducers on workers and spare hosts sum the gradients of the ranks.

    gradient -> reducers (shares in protocol/shares.py) -> sum of the gradients of all ranks

Each worker sends a gradient once, receives its sum once, and updates all parameters. The planner
and the simulator assume the same for the placements `summation` and `parameter-server`.

If there are several hosts, some with several workers, the gradients of each host are summed first.
This changes the rounding, and the user is told so (Rule 6: nothing changes silently). Otherwise the
sums have the same bits as without reducers. ParallelOptions refuses to combine the summation
service with several pipeline or tensor-parallel stages (pp, tp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil

from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.sums.sums import SumSetup, connect
from roadtrain.sums.tensor_sums import TensorSums
from roadtrain.transport.address import token_of


class JobRanks(Protocol):
    """The interface of collectives that exchange small messages among all ranks of a job
    (stages/control_links.py)."""

    @property
    def rank(self) -> int: ...
    def gather(self, message: bytes, what: str) -> list[bytes]: ...
    def same(self, call: Callable[[], Any], what: str) -> Any: ...


def connect_sums(
    reducers: Sequence[str] | str,
    token_file: str | None,
    ranks: JobRanks,
    *,
    alone: bool,
    hosts: Sequence[str],
    address: str,
    deadline_s: float,
    report: Callable[[str], None],
) -> TensorSums | None:
    """Connect this rank to the summation service. All ranks must call this function.

    Args:
        reducers: Addresses of the spare hosts, or the path of a file that lists these addresses.
        alone: If True, the workers' own reducers sum nothing while there is a spare host.
        hosts: The host of each rank.
        address: The address at which the other ranks reach this host.

    Returns:
        The connection of this rank, which is a GradientSum (stages/gradient_sum.py). None if there
        is only one rank.

    Raises:
        ConfigError: The options or the list of spare hosts are invalid.
        PeerError: Another rank or a spare host cannot be reached.
    """
    if len(hosts) == 1:
        report("reducers: not used, as there is only one worker")
        return None
    spare_hosts = SpareHosts(reducers, None, token_of(token_file))
    there = ranks.same(spare_hosts.now, "the reducers")
    source = f" ({reducers})" if isinstance(reducers, str) else ""
    beside = "workers only if there is no spare host" if alone else "and so do the workers"
    report(f"reducers: {', '.join(there) or 'none yet'}{source} sum gradients, {beside}")
    if len(set(hosts)) < len(hosts) and len(set(hosts)) > 1:
        report(
            f"reducers: the workers of each of {len(set(hosts))} hosts are summed first, so sums"
            " are rounded differently than without reducers"
        )
    free = psutil.virtual_memory().available
    setup = SumSetup(
        rank=ranks.rank,
        workers=len(hosts),
        inside=True,
        rule="sum",
        address=address,
        nbytes=free // (2 * hosts.count(hosts[ranks.rank])),
        deadline_s=deadline_s,
        separate=alone,
        report=report,
    )
    sums = connect(spare_hosts, setup, lambda message: ranks.gather(message, "the reducers"))
    return TensorSums(sums, "")
