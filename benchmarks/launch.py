"""From plan to run: what is promised of `roadtrain plan`, `launch`, `launch --replan` and
`--write`, beside what happens in labs on this machine and on two Ray nodes.

    --only ITEM,..
    plan     two files, planned and launched: a step beside its prediction; a host killed
    start    from nothing to the first step on two Ray nodes
    faults   30 scripted faults of launched runs
    replan   a link slowed to a quarter, planned anew
    files    what --write slurm and kubernetes give, through validators

Needs root. All hosts share this machine's processors; how fast a device is, is measured right
before each plan (launch_speed.py). Links have 12 to 100 Mbit/s each way. Does NOT emulate latency.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launch_bench import Bench
from benchmarks.report import Report, Row
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab import network_available

ITEMS = ("plan", "start", "faults", "replan", "files")


def run(quick: bool = False, only: Sequence[str] = ()) -> Report:
    """Raises ConfigError where the lab cannot be emulated."""
    if (why := network_available()) is not None:
        raise ConfigError(f"the lab cannot be emulated here: {why}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as home:
        bench = Bench(Path(home), quick)
        for name in only or ITEMS:
            print(f"launch: {name}", flush=True)
            try:
                for row in importlib.import_module(f"benchmarks.launch_{name}").rows(bench):
                    rows.append(row)
            except RoadtrainError as error:
                print(f"launch: {name} ended: {error}", flush=True)
                said = str(error).partition("\n")[0]
                rows.append(Row(name, said, "", None, None, None, None, None, "it runs", False))
            finally:
                bench.forget_stores()
    return Report("launch", rows)
