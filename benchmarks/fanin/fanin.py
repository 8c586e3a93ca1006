"""Measure fan-in (sums inside the network) with workers, switches and one server in the lab. Fan-in
is compared with the same server over TCP without switches, and with torch's all-reduce.

    --only ITEM,..
    model        explore all states of the protocol
    lab          4 and 8 workers below one switch
    loss         links that lose packets
    random       millions of random packets
    rate         packets a second that a switch adds, and the processor time of a packet
    beats        heartbeats, and a stopped worker
    convergence  integers of 32, 16 and 8 bits
    tree         8 workers in two racks
    predicted    measured steps of `lab` and `tree`, compared with the simulator's predictions

Links carry 400 Mbit/s in each direction, counted as whole frames, unless the name of a case gives
another rate. All hosts share this machine's processors. Needs root.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.report import Report, Row
from benchmarks.fanin.transfer import Bench
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab import network_available

ITEMS = {  # item -> module of this package, and its function from Bench to rows
    "model": ("model", "rows"),
    "lab": ("transfer", "one_switch"),
    "loss": ("loss", "rows"),
    "random": ("random", "rows"),
    "rate": ("xdp", "rows"),
    "beats": ("beats", "rows"),
    "convergence": ("convergence", "rows"),
    "tree": ("transfer", "tree"),
    "predicted": ("predicted", "rows"),
}


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
            print(f"fanin: {name}", flush=True)
            module, function = ITEMS[name]
            try:
                item = importlib.import_module(f"benchmarks.fanin.{module}")
                rows += getattr(item, function)(bench)
            except RoadtrainError as error:
                print(f"fanin: {name} ended: {error}", flush=True)
                message = str(error).partition("\n")[0]
                rows.append(Row(name, message, "", None, goal="it runs", met=False))
    return Report("fanin", rows)
