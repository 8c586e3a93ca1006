"""`python -m roadtrain.launch.measured_host`, on a host of a run: measure its links to the run's
other hosts, and summarize its workers' metrics.

    ADDRESS:PORT TOKEN_FILE   run as a process of a LaunchEngine: answer probes until it is ended
    (no arguments)            run by `LaunchEngine.ask`: probe the listening hosts, which it gets
                              with the token on stdin (Rule 8)

The probing host has every host measure its link to every other, one link after the other, like
`roadtrain probe --hosts`. Other traffic would slow the links, so no workers run meanwhile. Does NOT
import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import msgspec

from roadtrain.planner import probe_links as links
from roadtrain.training.metrics import last_alike
from roadtrain.transport.address import token_of
from roadtrain.transport.tcp import TcpOptions

MODULE = "roadtrain.launch.measured_host"
LAST_STEPS = 20  # medians are over up to this many last steps made by one plan
PATIENCE_S = 30.0  # how long to retry a host that does not listen yet


class MeasureRequest(msgspec.Struct):
    """A request to a host. `others`: ADDRESS:PORT of the listening hosts. `metrics`: the metrics
    files of its workers."""

    token: str = ""
    others: list[str] = []
    metrics: list[str] = []


class WorkerSeconds(msgspec.Struct):
    """Median times of a worker's last steps, in seconds: a whole step, and each phase of it.
    `predicted`: the plan's predictions for the phases; empty if the file has none."""

    seconds: float
    stages: dict[str, float] = {}
    predicted: dict[str, float] = {}


class HostAnswer(msgspec.Struct):
    """A host's answer. `links`: (from, to, bytes per second, latency in seconds); each end is an
    ADDRESS:PORT of the request, or "here". `missing`: reasons for links that are missing."""

    links: list[tuple[str, str, float, float]] = []
    missing: list[str] = []
    workers: list[WorkerSeconds] = []


def answer(request: MeasureRequest) -> HostAnswer:
    """Measure the links and read the metrics of a request. Raises ConfigError."""
    out = HostAnswer(workers=[w for path in request.metrics if (w := seconds_of(Path(path)))])
    if request.others:
        options = TcpOptions(token=request.token.encode(), retry_s=PATIENCE_S)
        found, out.missing = links.matrix(request.others, options)
        out.links = [(*pair, *both) for pair, both in found.items()]
    return out


def seconds_of(path: Path) -> WorkerSeconds | None:
    """Summarize a metrics file; None if it has no steps."""
    lines = last_alike(path, LAST_STEPS)
    if not lines:
        return None
    stages = [line.get("stages", {}) for line in lines]
    names = dict.fromkeys(name for of_step in stages for name in of_step)
    return WorkerSeconds(
        median(line["seconds"] for line in lines),
        {name: median(step.get(name, {}).get("seconds", 0.0) for step in stages) for name in names},
        lines[-1].get("predicted", {}).get("stages", {}),
    )


def main(address: str = "", token_file: str = "") -> None:
    if address:
        options = TcpOptions(token=token_of(token_file), retry_s=PATIENCE_S)
        links.serve(address, options, links.HostReport)
    else:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=MeasureRequest)
        print(msgspec.json.encode(answer(request)).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
