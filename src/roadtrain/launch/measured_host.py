"""`python -m roadtrain.launch.measured_host`: measure the links between a run's hosts, and
summarize the metrics of a host's workers. Does NOT import torch.

    ADDRESS:PORT TOKEN_FILE   started by a LaunchEngine as a process: answers probes until
                                  the engine ends the process
    (no arguments)            started by `LaunchEngine.ask` as a command: probes the listening
                                  hosts; reads the hosts' addresses and the token from stdin,
                                  because other users can see arguments (Rule 8)

Links are measured one at a time. No workers run meanwhile, because their traffic would slow the
links.
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
LAST_STEPS = 20  # medians are over at most this many steps, the last ones made by one plan
PATIENCE_S = 30.0  # how long to try to reach a host that does not listen yet


class MeasureRequest(msgspec.Struct):
    """A request to a host to measure links and to read metrics. `others`: the ADDRESS:PORT of each
    listening host. `metrics`: the paths of the metrics files of the host's workers. Both may be
    empty."""

    token: str = ""
    others: list[str] = []
    metrics: list[str] = []


class WorkerSeconds(msgspec.Struct):
    """Median times of a worker's last steps in seconds. `seconds`: a whole step. `stages`: each
    stage of a step, such as Forward. `predicted`: the plan's prediction for each stage, if there is
    one."""

    seconds: float
    stages: dict[str, float] = {}
    predicted: dict[str, float] = {}


class HostAnswer(msgspec.Struct):
    """A host's answer to a MeasureRequest. `links`: (sender, receiver, bytes per second, latency in
    seconds), where the hosts are an ADDRESS:PORT of the request, or "here" for the answering host.
    `missing`: the reason for each link that could not be measured."""

    links: list[tuple[str, str, float, float]] = []
    missing: list[str] = []
    workers: list[WorkerSeconds] = []


def answer(request: MeasureRequest) -> HostAnswer:
    """Measure the links and read the metrics that a request names. Raises ConfigError for an
    invalid token or address."""
    out = HostAnswer(workers=[w for path in request.metrics if (w := seconds_of(Path(path)))])
    if request.others:
        options = TcpOptions(token=request.token.encode(), retry_s=PATIENCE_S)
        found, out.missing = links.matrix(request.others, options)
        out.links = [(*pair, *both) for pair, both in found.items()]
    return out


def seconds_of(path: Path) -> WorkerSeconds | None:
    """Return a summary of a metrics file, or None if the file has no steps."""
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
        links.serve(address, options, links.ProbeReport)
    else:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=MeasureRequest)
        print(msgspec.json.encode(answer(request)).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
