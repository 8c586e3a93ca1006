"""Measure the processor time that a packet of the fan-in takes at a worker, a switch and a server,
in a lab with one worker whose model computes almost nothing. It includes everything that is done
for the packet's bytes: the kernel, the virtual links, copies, and waking up threads.

In a lab all hosts share this machine's processors, so these times bound a step of many workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.lab import FRAME, NODE, ROOT, Lab, Measured, Scene
from benchmarks.common.lab_worker import WorkerSpec
from benchmarks.common.report import Row
from roadtrain.planner.probe import processors
from roadtrain.simulator.fabric import UPDATE_BYTES

WIRE, STEPS = "int32", 4


@dataclass(frozen=True)
class PacketSeconds:
    """Processor seconds of a packet that a process sends or receives, counted together."""

    worker: float
    switch: float
    server: float


@cache
def updates_here() -> float:
    """Measure the bytes/s that updates by one thread on this machine read and write."""
    return processors(1)["updates"]


@cache
def packet_seconds(spec: WorkerSpec) -> PacketSeconds:
    """Measure with one worker that transfers the model of `spec`."""
    with TemporaryDirectory(prefix="roadtrain-bench-") as home, Lab(Scene(1), Path(home)) as lab:
        measured = lab.train(spec, WIRE)
    return seconds_of(measured, spec.elements * UPDATE_BYTES / updates_here())


def seconds_of(measured: Measured, update_s: float) -> PacketSeconds:
    """Divide the processor time of a step of one worker by its packets. The switch receives and
    sends the packets of gradients; the lab's bridges copy parameters. `update_s`: seconds of the
    server's updates.
    """
    link, cpu = measured.frames["w0"], measured.cpu
    handled = (link.sent + link.received) / FRAME
    summed = 2 * link.sent / FRAME
    return PacketSeconds(
        cpu["worker"] / handled, cpu[ROOT] / summed, (cpu[NODE] - update_s) / handled
    )


def rows(spec: WorkerSpec) -> Iterator[Row]:
    found = packet_seconds(spec)
    for role in ("worker", "switch", "server"):
        seconds = getattr(found, role)
        metric = f"processor time of a packet at a {role}"
        yield Row("one worker in the lab", metric, "us", 1e6 * seconds)
