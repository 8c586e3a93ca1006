"""Rows of `crosscluster`, predicted beside measured.

Known beforehand are the rates that the lab's links were set to (TCP carries 0.956 of a link's) and
what two hosts alone showed: seconds of a layer, of an update, and of processors for a byte. Nothing
is fitted to a row. Needs root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.crosscluster_known import Known, known
from benchmarks.crosscluster_lab import ENVIRONMENTS, two_clusters
from benchmarks.crosscluster_model import Batch, ModelSize
from benchmarks.crosscluster_runs import Run
from benchmarks.crosscluster_simulated import predicted
from benchmarks.report import Row

GOAL = 0.10


def measured_known(size: ModelSize, batch: Batch, home: Path) -> Known:
    """Micro-batches of the rows that any measurement has."""
    sizes = sorted({batch.micro_rows, batch.rows // 4, batch.rows // 2})
    batches = [Batch(batch.rows, batch.sequence, batch.rows // rows) for rows in sizes]
    with two_clusters(ENVIRONMENTS["all InfiniBand"]) as network:
        return known(network, size, batches, home)


def predictions(runs: Iterable[Run], of: Known) -> Iterator[Row]:
    for one in runs:
        result = predicted(one, of)
        off = result.seconds / one.measured.seconds
        print(
            f"{one.case}: predicted {result.seconds:.2f} s, measured {one.measured.seconds:.2f} s"
            f" ({off - 1:+.1%})",
            flush=True,
        )
        yield Row(
            one.case,
            "a step",
            "s",
            result.seconds,
            one.measured.seconds,
            "measured",
            None,
            off,
            f"within {GOAL:.0%}",
            abs(off - 1) <= GOAL,
        )
