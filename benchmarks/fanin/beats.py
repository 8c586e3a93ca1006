"""Item `beats` of `fanin`: measure the share of a link's rate that heartbeats take, and the seconds
until a log names a stopped worker.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.common.children import Child, go_on, running, wait_for_all
from benchmarks.common.lab import START_S, Lab, Scene
from benchmarks.common.report import Row, at_most
from benchmarks.fanin.count import count
from benchmarks.fanin.transfer import WIRE, Bench
from roadtrain.errors import DeadlineError

SHARE, NAMED_S = 0.002, 2.0
STOPPED, RUNNING_S, WAIT_S = 2, 3.0, 15.0


def rows(bench: Bench) -> Iterator[Row]:
    """Measure heartbeats during training, and the seconds until a log names a stopped worker."""
    scene = Scene(4)
    with (
        Lab(scene, bench.home / "beats") as lab,
        lab.serving(scene.server_names, switches=True) as addresses,
    ):
        spec = replace(bench.spec(computes=False), steps=1000)
        fan_in = scene.fan_in(lab.network, WIRE)
        with lab.started(lab.served(spec, addresses, fan_in)) as ranks:
            go_on(ranks)
            time.sleep(1.0)
            yield from _shares(_counted(lab), scene)
            yield from _stopped(lab, ranks)


def _counted(lab: Lab) -> dict[str, dict[str, float]]:
    """Count the bytes of heartbeats of the server's host and of one worker's host for three
    seconds.
    """
    names = ("node", "w0")
    hosts = [lab.network.hosts[name] for name in names]
    with running(count, [{"device": "eth0"}] * 2, lab.home, hosts=hosts) as counters:
        wait_for_all(counters, "ready", START_S)
        time.sleep(RUNNING_S)
        go_on(counters)
        return dict(zip(names, wait_for_all(counters, "result", START_S), strict=True))


def _shares(beats: Mapping[str, Mapping[str, float]], scene: Scene) -> Iterator[Row]:
    case = f"heartbeats while {scene.workers} workers train, share of the link's rate"
    for host, found in beats.items():
        for way in ("sent", "received"):
            share = found[way] / found["seconds"] / scene.rate
            goal, met = f"< {SHARE:.1%}", 0 < share < SHARE
            yield Row(case, f"{way} by {host}", "%", 100 * share, goal=goal, met=met)


def _stopped(lab: Lab, ranks: Sequence[Child]) -> Iterator[Row]:
    logs = {name: server.log for name, server in lab.servers.items()}
    logs |= {f"worker {r}": rank.log for r, rank in enumerate(ranks) if rank.log and r != STOPPED}
    before = {name: len(log.read_text()) for name, log in logs.items()}
    ranks[STOPPED].process.send_signal(signal.SIGSTOP)
    begin, found = time.monotonic(), dict[str, str]()
    while not found:
        if time.monotonic() > begin + WAIT_S:
            raise DeadlineError(f"no log has named worker {STOPPED} within {WAIT_S:.0f} s")
        time.sleep(0.01)
        for name, log in logs.items():
            new = log.read_text()[before[name] :]
            if line := re.search(rf".*\bworker {STOPPED}\b.*", new):
                found[name] = line[0]
    seconds, (name, text) = time.monotonic() - begin, next(iter(found.items()))
    case = f"worker {STOPPED} is stopped; named by {name}: {' '.join(text.split())}"
    yield Row(case, "seconds until then", "s", seconds, **at_most(seconds, NAMED_S))
