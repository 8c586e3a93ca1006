"""Check the promises of the commands `plan`, `launch`, `launch --replan` and `launch --write`. Runs
are in labs on this machine and on two Ray nodes.

    --only ITEM,..
    plan     plan and launch from a cluster file and a job file; compare a step with its
             prediction; kill a host
    start    time from the command to the first step on two Ray nodes
    faults   30 scripted faults of launched runs
    replan   slow a link to a quarter of its rate and plan again
    files    validate the files of --write slurm and kubernetes

Needs root. All hosts share this machine's processors, whose speed is measured right before each
plan. Links have 12 to 100 Mbit/s in each direction. Does NOT emulate latency.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.report import Report, Row
from benchmarks.launch.bench import Bench, attempted
from roadtrain.errors import ConfigError
from roadtrain.lab import network_available

ITEMS = ("plan", "start", "faults", "replan", "files")


def run(quick: bool = False, only: Sequence[str] = ()) -> Report:
    """Run the named items, or all items if `only` is empty. Raises ConfigError if the lab cannot be
    emulated.
    """
    if (why := network_available()) is not None:
        raise ConfigError(f"the lab cannot be emulated on this machine: {why}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as home:
        bench = Bench(Path(home), quick)
        for name in only or ITEMS:
            print(f"launch: {name}", flush=True)
            item = importlib.import_module(f"benchmarks.launch.{name}")
            try:
                rows += attempted(name, item.rows(bench))
            finally:
                bench.forget_stores()
    return Report("launch", rows)
