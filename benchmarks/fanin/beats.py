"""Item `beats` of `fanin`: measure the share of a link's rate that heartbeats take, and the seconds
until a log names a stopped worker.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.common.report import Row
from benchmarks.fanin.lab import FanInRank, Lab, Scene, end, go, wait_until
from benchmarks.fanin.transfer import WIRE, Bench, row
from roadtrain.lab import LabHost

SHARE, NAMED_S = 0.002, 2.0
STOPPED, RUNNING_S, WAIT_S = 2, 3.0, 15.0


@contextmanager
def counted(host: LabHost) -> Iterator[dict[str, float]]:
    """Count the bytes of heartbeats that a host sends and receives during the `with` block. The
    yielded dict is filled after the block, with {"sent", "received", "seconds"}.
    """
    words = [sys.executable, "-m", "benchmarks.fanin.count", "eth0"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = host.run(words, **pipes, text=True)
    found: dict[str, float] = {}
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield found
        line, _ = process.communicate("enough\n", timeout=30)
        found.update(json.loads(line.partition(" ")[2]))
    finally:
        process.kill()
        process.communicate()


def rows(bench: Bench) -> Iterator[Row]:
    """Measure heartbeats during training, and the seconds until a log names a stopped worker."""
    scene = Scene(4)
    with Lab(scene, bench.home / "beats") as lab, lab.serving(switches=True) as address:
        fan_in = scene.fan_in(lab.network, WIRE)
        spec = bench.spec(steps=1000, computes=False)
        spec = replace(spec, steps=1000, servers=(address,), token=str(lab.token), fan_in=fan_in)
        ranks = lab.start(spec)
        try:
            lab.warm_up(ranks)
            go(ranks)
            time.sleep(1.0)
            beats = _counted(lab)
            yield from _shares(beats, scene)
            yield from _stopped(lab, ranks)
        finally:
            end(ranks)


def _counted(lab: Lab) -> dict[str, dict[str, float]]:
    """Count the bytes of heartbeats of the server's host and of one worker's host for three
    seconds.
    """
    hosts = lab.network.hosts
    with counted(hosts["node"]) as node, counted(hosts["w0"]) as worker:
        time.sleep(RUNNING_S)
    return {"node": node, "w0": worker}


def _shares(beats: Mapping[str, Mapping[str, float]], scene: Scene) -> Iterator[Row]:
    case = f"heartbeats while {scene.workers} workers train, share of the link's rate"
    for host, found in beats.items():
        for way in ("sent", "received"):
            share = found[way] / found["seconds"] / scene.rate
            met = 0 < share < SHARE
            goal = f"< {SHARE:.1%}"
            yield row(case, f"{way} by {host}", "%", 100 * share, goal, met)


def _stopped(lab: Lab, ranks: Sequence[FanInRank]) -> Iterator[Row]:
    logs = {name: lab.log(name) for name in lab.servers}
    logs |= {f"worker {r}": rank.errors for r, rank in enumerate(ranks) if r != STOPPED}
    before = {name: len(log.read_text()) for name, log in logs.items()}
    ranks[STOPPED].process.send_signal(signal.SIGSTOP)

    def lines() -> dict[str, str]:
        new = {name: log.read_text()[before[name] :] for name, log in logs.items()}
        found = {name: re.search(rf".*\bworker {STOPPED}\b.*", text) for name, text in new.items()}
        return {name: match[0] for name, match in found.items() if match}

    seconds = wait_until(f"a line that names worker {STOPPED}", lines, WAIT_S)
    name, line = next(iter(lines().items()))
    case = f"worker {STOPPED} is stopped; named by {name}: {' '.join(line.split())}"
    goal = f"<= {NAMED_S:.0f} s"
    yield row(case, "seconds until then", "s", seconds, goal, seconds <= NAMED_S)
