"""`python -m roadtrain.launch.measured_host`, on a host of a run: its links to the run's other
hosts, and what its workers' metrics say.

    ADDRESS:PORT TOKEN_FILE   a process of a LaunchEngine: answers one that asks, until it is ended
    (no words)                a command of a LaunchEngine (`ask`): it is told which hosts listen,
                              with the token, on standard input (Rule 8)

The asking host asks each of the others for its link to every other, one after the other, as
`roadtrain probe --hosts` does. Links are slowed by all else that uses them: so workers do not run
meanwhile. Does NOT import torch.
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
LAST_STEPS = 20  # of a worker's metrics, over which medians are, where one plan made them
PATIENCE_S = 30.0  # for a host that does not listen yet


class Told(msgspec.Struct):
    """What a host is told. `others`: ADDRESS:PORT of those that listen. `metrics`: files of its
    workers."""

    token: str = ""
    others: list[str] = []
    metrics: list[str] = []


class WorkerSeconds(msgspec.Struct):
    """Of a worker's last steps by one plan: medians. `predicted`: what the plan promised of the
    same stages; none where the file does not say."""

    seconds: float
    stages: dict[str, float] = {}
    predicted: dict[str, float] = {}


class HostAnswer(msgspec.Struct):
    """`links`: (from, to, bytes a second, seconds of latency), each end ADDRESS:PORT as told, or
    "here"."""

    links: list[tuple[str, str, float, float]] = []
    missing: list[str] = []
    workers: list[WorkerSeconds] = []


def answer(told: Told) -> HostAnswer:
    """Raises ConfigError."""
    out = HostAnswer(workers=[worker for one in told.metrics if (worker := seconds_of(Path(one)))])
    if told.others:
        options = TcpOptions(token=told.token.encode(), retry_s=PATIENCE_S)
        found, out.missing = links.matrix(told.others, options)
        out.links = [(*pair, *both) for pair, both in found.items()]
    return out


def seconds_of(path: Path) -> WorkerSeconds | None:
    """None for a file without steps."""
    lines = last_alike(path, LAST_STEPS)
    if not lines:
        return None
    stages = [line.get("stages", {}) for line in lines]
    names = dict.fromkeys(name for of_step in stages for name in of_step)
    return WorkerSeconds(
        median(line["seconds"] for line in lines),
        {name: median(one.get(name, {}).get("seconds", 0.0) for one in stages) for name in names},
        lines[-1].get("predicted", {}).get("stages", {}),
    )


def main(address: str = "", token_file: str = "") -> None:
    if address:
        options = TcpOptions(token=token_of(token_file), retry_s=PATIENCE_S)
        links.serve(address, options, links.HostReport)
    else:
        told = msgspec.json.decode(sys.stdin.buffer.read(), type=Told)
        print(msgspec.json.encode(answer(told)).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
