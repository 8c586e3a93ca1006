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

    python -m benchmarks.servers.scaling --probe ADDRESS --nbytes N [--listen] --json OUT
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common.report import Report, Row, cores
from benchmarks.servers.cluster import WARM_UP, Cluster
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab import CARRIED, network_available
from roadtrain.units import KIB

COUNTS = (1, 2, 4, 8)
RATE, PLACING_RATE = 25e6 / 8, 4e9 / 8  # bytes a second
LAYERS, WIDTH, INNER, SEQ, CHUNK = 4, 256, 704, 16, 1 << 16
STEPS, FSDP_STEPS = WARM_UP + 3, WARM_UP + 1
FEW = "34MiB"  # a budget that keeps half of the blocks from forward to backward
GOAL = 1.10


def run(quick: bool = False) -> Report:
    if (why := network_available()) is not None:
        raise ConfigError(f"the cluster cannot be emulated on this machine: {why}")
    counts, layers, steps, fsdp_steps = (
        ((1, 2), 3, WARM_UP + 1, WARM_UP + 1) if quick else (COUNTS, LAYERS, STEPS, FSDP_STEPS)
    )
    words = [
        str(word)
        for pair in (
            ("--layers", layers),
            ("--width", WIDTH),
            ("--inner", INNER),
            ("--seq", SEQ),
            ("--chunk", CHUNK),
        )
        for word in pair
    ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        cluster = Cluster(Path(name), max(counts), RATE, PLACING_RATE)
        with cluster.network:
            rows.append(bare(cluster, 1 if quick else 4))
            for count in counts:
                cluster.workers = count
                peer = cluster.fsdp(fsdp_steps, *words) if count > 1 else None
                few = [] if count != 2 else [(1, FEW)] if quick else [(0, FEW), (1, FEW)]
                for staleness, budget in ((0, ""), (1, ""), *few):
                    more = (
                        "--staleness",
                        str(staleness),
                        *(("--budget", budget) if budget else ()),
                    )
                    got = cluster.ours("s", steps, *words, *more)
                    rows += compare(count, staleness, budget, got, peer)
                    print(
                        f"{count} worker(s), staleness"
                        f" {staleness}{f', budget {budget}' * bool(budget)}: {seconds_of(got):.2f}"
                        " s a step",
                        flush=True,
                    )
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


def seconds_of(results: Sequence[dict[str, Any]]) -> float:
    """Return the mean seconds of a step on the slowest worker, without the first two steps."""
    return max(fmean(result["seconds"][WARM_UP:]) for result in results)


def compare(
    count: int,
    staleness: int,
    budget: str,
    got: Sequence[dict[str, Any]],
    peer: Sequence[dict[str, Any]] | None,
) -> list[Row]:
    first = got[0]
    total = 2 * first["parameters"]
    kept = kept_bytes(total, first["blocks"], first["kept_blocks"], first["block_bytes"])
    floor = floor_bytes(total, kept, count * 2 * CHUNK, staleness) / (CARRIED * RATE)
    ours, theirs = seconds_of(got), None if peer is None else seconds_of(peer)
    how = (
        f"{min(first['kept_blocks'], first['blocks'])} of {first['blocks']} blocks kept from"
        " forward to backward"
    )
    case = (
        f"network, {count} worker(s) and {count} server(s), {first['parameters'] / 1e6:.1f} M"
        f" parameters, {8 * RATE / 1e6:g} Mbit/s, staleness {staleness},"
        f" {how}{f', budget {budget}' * bool(budget)}"
    )
    busy = sum(result["cpu"] / len(result["seconds"]) for result in got) / (cores() * ours)
    rows = [
        Row(
            case,
            "step",
            "s",
            ours,
            peer=theirs,
            peer_name=None if peer is None else "FSDP2, bf16",
            ratio=None if theirs is None else theirs / ours,
            of_floor=floor / ours,
            goal=None if budget else f"ours <= {GOAL:.2f} x {floor:.2f}",
            met=None if budget else ours <= GOAL * floor,
        ),
        Row(case, "processor time of the workers, of all cores", "", busy),
    ]
    for way, metric in (("received", "pulled"), ("sent", "pushed")):
        mine = fmean(fmean(result[way][WARM_UP:]) for result in got) / total
        other = (
            None if peer is None else fmean(fmean(result[way][WARM_UP:]) for result in peer) / total
        )
        rows.append(
            Row(
                case,
                f"{metric} by a worker a step",
                "S",
                mine,
                peer=other,
                peer_name=None if peer is None else f"FSDP2, {way}",
            )
        )
    return rows


# the bare socket


def bare(cluster: Cluster, seconds: float) -> Row:
    """Measure the slower direction of a bare connection between two hosts that sends in both
    directions at once.
    """
    cluster.set_rate(RATE)
    hosts = [cluster.network.hosts[name] for name in ("w0", "s0")]
    outs = [cluster.home / f"bare{i}.json" for i in range(2)]
    processes: list[subprocess.Popen[Any]] = []
    for host, out, more in zip(hosts, outs, (["--listen"], [])):
        processes.append(
            host.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.servers.scaling",
                    "--probe",
                    hosts[0].address,
                    "--nbytes",
                    str(int(RATE * seconds)),
                    *more,
                    "--json",
                    str(out),
                ]
            )
        )
    if any(process.wait(60 + 10 * seconds) for process in processes):
        raise RoadtrainError("the measurement of the bare socket failed")
    rate = min(json.loads(out.read_text())["rate"] for out in outs)
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


def probe(address: str, nbytes: int, listens: bool) -> dict[str, float]:
    """Send and receive `nbytes` bytes at the same time. Returns {"rate": bytes/s of the arriving
    data}.
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
    return {"rate": rate}


def _connected(address: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--probe", required=True, help="the listener's address")
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--listen", action="store_true")
    parser.add_argument("--json", required=True, help="file for the result")
    args = parser.parse_args(argv)
    Path(args.json).write_text(json.dumps(probe(args.probe, args.nbytes, args.listen)))


if __name__ == "__main__":
    main(sys.argv[1:])
