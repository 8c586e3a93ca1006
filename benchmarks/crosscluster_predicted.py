"""Rows of `crosscluster`, predicted beside measured.

Known beforehand are the rates that the lab's links were set to (TCP carries 0.956 of a link's) and
what two hosts alone showed: seconds of a layer, of an update, and of processors for a byte. Nothing
is fitted to a row. Needs root.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import crosscluster
from benchmarks.crosscluster_known import Known, known
from benchmarks.crosscluster_lab import ENVIRONMENTS, two_clusters
from benchmarks.crosscluster_model import Batch, ModelSize
from benchmarks.crosscluster_runs import Bench, Run, Setting
from benchmarks.crosscluster_simulated import predicted
from benchmarks.report import Report, Row
from roadtrain.errors import ConfigError
from roadtrain.lab import cpus_available, network_available

GOAL = 0.10


def run(quick: bool = False) -> Report:
    if (why := network_available() or cpus_available()) is not None:
        raise ConfigError(f"the clusters cannot be emulated here: {why}")
    size = ModelSize(layers=4, hidden=128, inner=256) if quick else ModelSize()
    batch = Batch(rows=8, sequence=32, microbatches=4) if quick else Batch()
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        found = measured_known(size, batch, Path(name) / "known")
        bench = Bench(Setting(size, batch, 1 if quick else 3, Path(name)))
        # they measure as they are asked for their rows
        for rows in (
            crosscluster.four_environments,
            crosscluster.throttled_cluster,
            crosscluster.overlapped_optimizer,
        ):
            list(rows(bench))
    return Report("crosscluster_predicted", list(predictions(bench.runs, found)))


def measured_known(size: ModelSize, batch: Batch, home: Path) -> Known:
    """Micro-batches of the rows that any measurement has."""
    sizes = sorted({batch.micro_rows, 2 * batch.micro_rows, batch.rows // 4})
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
