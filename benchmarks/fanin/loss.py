"""Item `loss` of `fanin`: links that lose packets. Compares goodput with that of the same links
without loss, and checks that the training losses are the same.

Linux needs more processor time for links that lose packets, so all links have only 50 Mbit/s.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.lab import MBIT, Lab, Measured, Scene
from benchmarks.common.report import Row, at_least
from benchmarks.fanin.transfer import WIRE, Bench
from roadtrain.errors import ConfigError
from roadtrain.lab import loss_available

RATE, WORKERS = 50 * MBIT, 4
GOODPUT = {0.0001: 0.97, 0.001: 0.90, 0.01: 0.60}  # loss -> least share of the goodput without loss
SIZE = {"layers": 2, "width": 512, "inner": 1536}  # S is 28 MB


def rows(bench: Bench) -> Iterator[Row]:
    if (why := loss_available()) is not None:
        raise ConfigError(f"packet loss cannot be emulated on this machine: {why}")
    whole = _run(bench, 0.0)
    for loss, goal in GOODPUT.items():
        run = _run(bench, loss)
        case = f"loss of {loss:.2%} at every NIC, {WORKERS} workers, {RATE / MBIT:.0f} Mbit/s"
        share = whole.seconds / run.seconds
        yield Row(case, "goodput, of that without loss", "", share, **at_least(share, goal))
        same = run.losses == whole.losses
        what = "losses of training are those without loss, bit for bit"
        yield Row(case, what, "", float(same), goal="= 1", met=same)
        yield Row(case, "processors busy, share of all", "", run.busy)


def _run(bench: Bench, loss: float) -> Measured:
    with Lab(Scene(WORKERS, RATE, loss=loss), bench.home / f"loss{loss}") as lab:
        return bench.measure(f"loss of {loss:.2%}", lab, bench.sized(**SIZE), WIRE)
