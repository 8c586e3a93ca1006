"""Compare the time of a step with its floor, for 1, 2, 4 and 8 workers over slow emulated links.
There are as many servers as workers, each on a host of its own.

Links carry only 25 Mbit/s, so that the processors of this machine do not limit a step. S is the
bytes of the 16-bit parameters. In a step, a worker pulls S and pushes S. It keeps K bytes from
forward, and pulls all other parameters again for backward:

    pulled = S + (S - K)        pushed = S

Every link carries `pulled` in one direction and `pushed` in the other. At staleness 1, `pulled` is
therefore the floor. At staleness 0, a parameter is pulled after its gradient was pushed, so the
last chunk (P bytes) is sent back to all W workers after everything else:

    floor = (S + (S - K) + (W P at staleness 0)) / rate

Here `rate` is 0.956 of the rate of a link, because TCP carries 1448 of the 1514 bytes of an
Ethernet frame.

For comparison, FSDP2 over gloo in bf16 runs over the same links. The time of a step is the mean
over all steps except the first two. Needs root. Does NOT emulate latency.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.common.children import run_children
from benchmarks.common.lab import Lab, Measured, Scene
from benchmarks.common.lab_worker import WARM_UP, WorkerSpec, block_elements
from benchmarks.common.report import Report, Row, cores
from roadtrain.errors import ConfigError
from roadtrain.lab import CARRIED, network_available
from roadtrain.units import KIB

COUNTS = (1, 2, 4, 8)
RATE = 25e6 / 8  # bytes a second
LAYERS, CHUNK = 4, 1 << 16
STEPS, PEER_STEPS = WARM_UP + 4, WARM_UP + 2
FEW = "34MiB"  # a budget that keeps half of the blocks from forward to backward
GOAL = 1.10


def run(quick: bool = False) -> Report:
    if (why := network_available()) is not None:
        raise ConfigError(f"the cluster cannot be emulated on this machine: {why}")
    counts, layers, steps = ((1, 2), 3, PEER_STEPS) if quick else (COUNTS, LAYERS, STEPS)
    spec = WorkerSpec(
        "ours",
        steps,
        "bf16",
        layers=layers,
        width=256,
        inner=704,
        tokens=16,
        chunk=CHUNK,
        budget="",
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        for count in counts:
            scene = Scene(count, RATE, servers=count)
            with Lab(scene, Path(name, f"{count}"), "700MiB") as lab:
                if count == 1:
                    rows.append(bare(lab, 1 if quick else 4))
                fsdp = replace(spec, method="fsdp", steps=PEER_STEPS)
                peer = lab.train(fsdp) if count > 1 else None
                few = [] if count != 2 else [(1, FEW)] if quick else [(0, FEW), (1, FEW)]
                for staleness, budget in ((0, ""), (1, ""), *few):
                    case = replace(spec, staleness=staleness, budget=budget)
                    got = lab.train(case)
                    rows += compare(case, count, got, peer)
                    print(f"{rows[-4].case}: {fmean(got.steps):.2f} s a step", flush=True)
    return Report("scaling", rows)


def floor_bytes(parameters: int, kept: int, piece: int, staleness: int) -> int:
    """Compute the bytes that the busier direction of a link must carry in a step.

    Args:
        parameters: bytes of all parameters
        kept: bytes of the parameters that are kept from forward to backward
        piece: bytes of one chunk times the number of workers; used only at staleness 0
    """
    pulled = parameters + (parameters - min(kept, parameters))
    return pulled + (0 if staleness else min(piece, parameters))


def kept_bytes(parameters: int, blocks: int, slots: int, block: int) -> int:
    """Compute the bytes of parameters that a worker with `slots` buffers keeps from forward to
    backward. The model has `blocks` blocks of `block` bytes each, and a root block that is always
    kept.
    """
    return parameters - max(0, blocks - slots) * block


def compare(spec: WorkerSpec, count: int, got: Measured, peer: Measured | None) -> Iterator[Row]:
    slots = got.results[0]["kept_blocks"]
    block = 2 * block_elements(spec)
    kept = kept_bytes(spec.nbytes, spec.layers, slots, block)
    piece = count * 2 * spec.chunk
    floor = floor_bytes(spec.nbytes, kept, piece, spec.staleness) / (CARRIED * RATE)
    case = (
        f"network, {count} worker(s) and {count} server(s), {spec.elements / 1e6:.1f} M"
        f" parameters, {8 * RATE / 1e6:g} Mbit/s, staleness {spec.staleness},"
        f" {min(slots, spec.layers)} of {spec.layers} blocks kept from forward to backward"
        f"{f', budget {spec.budget}' * bool(spec.budget)}"
    )
    ours, theirs = fmean(got.steps), None if peer is None else fmean(peer.steps)
    judged = not spec.budget
    yield Row(
        case,
        "step",
        "s",
        ours,
        peer=theirs,
        peer_name=None if peer is None else "FSDP2, bf16",
        ratio=None if theirs is None else theirs / ours,
        of_floor=floor / ours,
        goal=f"ours <= {GOAL:.2f} x {floor:.2f}" if judged else None,
        met=ours <= GOAL * floor if judged else None,
    )
    busy = got.cpu["worker"] / (cores() * ours)
    yield Row(case, "processor time of the workers, of all cores", "", busy)
    for way, metric in (("received", "pulled"), ("sent", "pushed")):
        mine, other = (
            None if run is None else moved(run, way, count) / spec.nbytes for run in (got, peer)
        )
        name = None if peer is None else f"FSDP2, {way}"
        yield Row(case, f"{metric} by a worker a step", "S", mine, other, name)


def moved(run: Measured, way: str, workers: int) -> float:
    """Return the mean bytes of a worker's link in a step. `way`: "sent" or "received"."""
    return fmean(getattr(run.frames[f"w{rank}"], way) for rank in range(workers))


# the bare socket


def bare(lab: Lab, seconds: float) -> Row:
    """Measure the slower direction of a bare connection between two hosts that sends in both
    directions at once.
    """
    hosts = [lab.network.hosts[name] for name in ("w0", "s0")]
    common = {"address": hosts[0].address, "nbytes": int(RATE * seconds)}
    each = [{**common, "listens": listens} for listens in (True, False)]
    rate = min(run_children(probe, each, hosts=hosts, within_s=60 + 10 * seconds))
    return Row(
        f"a bare socket, both ways at once, {8 * RATE / 1e6:g} Mbit/s each",
        "arriving, the slower way",
        "MB/s",
        rate / 1e6,
        peer=RATE / 1e6,
        peer_name="the link",
        ratio=rate / RATE,
        of_floor=rate / (CARRIED * RATE),
    )


def probe(address: str, nbytes: int, listens: bool) -> float:
    """Send and receive `nbytes` bytes at the same time. Returns the bytes/s of the arriving
    data.
    """
    if listens:
        with socket.create_server((address, 7100)) as server:
            link, _ = server.accept()
    else:
        link = _connected((address, 7100))
    with link:
        sender = threading.Thread(target=link.sendall, args=(bytes(nbytes),))
        sender.start()
        room, have = bytearray(256 * KIB), link.recv_into(bytearray(1))
        begin = time.perf_counter()
        while have < nbytes:
            have += link.recv_into(room)
        rate = nbytes / (time.perf_counter() - begin)
        sender.join()
    return rate


def _connected(address: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
