"""connect_sums: a data group's gradients summed by the summation service: by the workers' own
reducers and those of spare hosts, that come and go while training goes on.

    gradient out -> reducers (sums/protocol/shares.py says which sums how much) -> the whole sum in

Each worker sends a gradient once and gets its sum once; who sums has other workers' shares besides.
Every worker keeps the whole state and updates all of it on its device: that is what the placements
`summation` and `parameter-server` of a plan say and what is simulated (Rule 7). To update a share
each and gather the values would be less work and memory, and M (n - 1) / n bytes more each way.

Bits are those of sums without reducers where each host has one worker, or all are on one host (sums
run in the order of the ranks); else each host's workers are summed first, which is said (Rule 6).
Does NOT know layers or steps; a stage of several (pp, tp) is refused in ParallelOptions.
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
    """The messages of all ranks of a job to all (stages/control_links.py)."""

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
    """The GradientSum (stages/gradient_sum.py) of this rank; None where there is one rank. hosts:
    of each rank. address: of this host, as the other ranks reach it. Collective. Raises
    ConfigError, PeerError."""
    if len(hosts) == 1:
        report("reducers: none is used, one worker has nothing to sum with others")
        return None
    wanted = SpareHosts(reducers, None, token_of(token_file))
    there = ranks.same(wanted.now, "the reducers")
    source = f" ({reducers})" if isinstance(reducers, str) else ""
    beside = "the workers sum where none is there" if alone else "so do workers"
    report(f"reducers: {', '.join(there) or 'none yet'}{source} sum gradients, {beside}")
    if len(set(hosts)) < len(hosts) and len(set(hosts)) > 1:
        report(
            f"reducers: the workers of each of {len(set(hosts))} hosts are summed first, so that"
            " the bits are others than without reducers (to rounding)"
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
    sums = connect(wanted, setup, lambda words: ranks.gather(words, "the reducers"))
    return TensorSums(sums, "")
