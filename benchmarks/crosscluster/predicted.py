"""Item `predicted` of `crosscluster`: compare predicted steps with measured steps.

Predictions use the configured rates of the lab's links, and costs measured on two otherwise idle
hosts. TCP carries 0.956 of the rate of a link. No constant is fitted to the measured steps. Needs
root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.common.report import Row, within
from benchmarks.crosscluster.costs import HostCosts, measure_costs
from benchmarks.crosscluster.lab import CPUS, ENVIRONMENTS, two_clusters
from benchmarks.crosscluster.model import Batch, ModelSize
from benchmarks.crosscluster.runs import Run
from benchmarks.crosscluster.simulated import predicted

GOAL = 0.10


def host_costs(size: ModelSize, batch: Batch, home: Path) -> HostCosts:
    """Measure the costs of a host for every size of micro-batch that the runs use."""
    sizes = sorted({batch.micro_rows, batch.rows // 4, batch.rows // 2})
    batches = [Batch(batch.rows, batch.sequence, batch.rows // rows) for rows in sizes]
    with two_clusters(ENVIRONMENTS["all InfiniBand"], (CPUS, CPUS)) as network:
        return measure_costs(network, size, batches, home)


def predictions(runs: Iterable[Run], costs: HostCosts) -> Iterator[Row]:
    for run in runs:
        result = predicted(run, costs)
        off = result.seconds / run.measured.seconds
        print(
            f"{run.case}: predicted {result.seconds:.2f} s, measured {run.measured.seconds:.2f} s"
            f" ({off - 1:+.1%})",
            flush=True,
        )
        ours, measured = result.seconds, run.measured.seconds
        goal = within(off, GOAL)
        yield Row(run.case, "a step", "s", ours, measured, "measured", of_floor=off, **goal)
