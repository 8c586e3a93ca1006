"""Measure the summation service: n worker hosts sum a gradient with the help of k spare hosts over
emulated links. The service is compared with gloo's ring. The processor time is that of the sums,
without filling and checking the tensors.

The optimum is the shortest possible round, with 0.956 of the rate of each link, because TCP carries
only this share of whole Ethernet frames. Goodput is the bytes of a gradient, divided by the seconds
of a round. A round takes as long as its slowest worker, and the median of three rounds counts.
Needs root. Does NOT emulate latency.

    --only ITEM,..
    4, 8     workers, with up to as many spare hosts, all links equal
    unequal  4 workers and 2 spare hosts on unequal links
    steps    whole DDP steps

    python -m benchmarks.sums.summation --rank 0 --workers 4 --addresses A,B,.. --rates R,R,..
    --nbytes N --json OUT
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.report import Report, Row, cores
from benchmarks.sums import steps as summation_steps
from benchmarks.sums.pending_sums import PendingSums
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab import CARRIED, LabNic, Network, network_available
from roadtrain.servers import frames as m
from roadtrain.sums.protocol.shares import busiest, optimum
from roadtrain.sums.sum_server import Reducers
from roadtrain.sums.worker_sums import SumOptions, WorkerSums
from roadtrain.transport.tcp import TcpOptions, listen

RATE = 50e6  # bytes/s of a link: 400 Mbit/s
NBYTES, ROUNDS, PORT, TIMEOUT_S = 256_000_000, 3, 7300, 180
TOKEN = b"only for this measurement"


ITEMS = ("4", "8", "unequal", "steps")


def run(quick: bool = False, only: Sequence[str] = ()) -> Report:
    if (why := network_available()) is not None:
        raise ConfigError(f"the hosts cannot be emulated on this machine: {why}")
    nbytes, rounds = (32_000_000, 1) if quick else (NBYTES, ROUNDS)
    items = only or (("4", "unequal", "steps") if quick else ITEMS)
    rows: list[Row] = []
    if "4" in items:
        rows += _equal_links(4, (0, 4) if quick else (0, 1, 2, 3, 4), 0.95, nbytes, rounds)
    if "8" in items:
        rows += _equal_links(8, (0, 4, 8), 0.90, nbytes, rounds)
    if "unequal" in items:
        rows += _unequal_links(nbytes, rounds)
    if "steps" in items:
        rows += summation_steps.rows(4, 4, quick)
    return Report("summation", rows)


def _seconds(workers: Sequence[float], spares: Sequence[float]) -> float:
    """Compute the seconds to sum one byte of a gradient with the best division of work, from the
    rates of the links in bytes/s.
    """
    return busiest(workers, spares, optimum(workers, spares))


def _equal_links(n: int, spares: Sequence[int], goal: float, nbytes: int, rounds: int) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name:
        network = _network([RATE] * n, [RATE] * max(spares))
        with network:
            peer = _exchange(Path(name), network, n, 0, [RATE] * n, nbytes, rounds, "gloo")
            for k in spares:
                rates = [RATE] * (n + k)
                got = _exchange(Path(name), network, n, k, rates, nbytes, rounds, "best")
                least = _seconds(rates[:n], rates[n:]) * nbytes / CARRIED
                case = (
                    f"{n} workers, {k} spare hosts, {8 * RATE / 1e6:g} Mbit/s, {nbytes / 1e6:g} MB"
                )
                ratio = peer["seconds"] / got["seconds"]
                least_ratio = {(4, 0): 0.98, (4, 4): 1.4}.get((n, k))
                rows += [
                    Row(
                        case,
                        "goodput",
                        "MB/s",
                        nbytes / got["seconds"] / 1e6,
                        nbytes / peer["seconds"] / 1e6,
                        "gloo all-reduce",
                        ratio,
                        least / got["seconds"],
                        f"{goal:.2f} of the optimum",
                        least / got["seconds"] >= goal,
                    ),
                    Row(
                        case,
                        "a round",
                        "s",
                        got["seconds"],
                        peer["seconds"],
                        "gloo all-reduce",
                        ratio,
                        least / got["seconds"],
                        None if least_ratio is None else f"ratio >= {least_ratio}",
                        None if least_ratio is None else ratio >= least_ratio,
                    ),
                    Row(
                        case,
                        "processor time of all hosts, of all cores",
                        "",
                        got["cpu"],
                        peer["cpu"],
                        "gloo all-reduce",
                        None,
                        None,
                        None,
                        None,
                    ),
                ]
                print(
                    f"{case}: {got['seconds']:.2f} s, optimum {least:.2f}, gloo"
                    f" {peer['seconds']:.2f}",
                    flush=True,
                )
    return rows


def _unequal_links(nbytes: int, rounds: int) -> list[Row]:
    """Measure a summation with unequal links: one of four worker hosts has a link of half the rate,
    and two spare hosts have links of a quarter.
    """
    workers, spares = [RATE, RATE, RATE, RATE / 2], [RATE / 4] * 2
    with (
        tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as name,
        _network(workers, spares) as network,
    ):
        got, equal = (
            _exchange(Path(name), network, 4, 2, [*workers, *spares], nbytes, rounds, how)
            for how in ("best", "equal")
        )
    seconds = [
        shares * nbytes / CARRIED
        for shares in (
            _seconds(workers, spares),
            busiest(workers, spares, optimum([1.0] * 4, [1.0] * 2)),
        )
    ]
    case = (
        f"4 workers, one at half of {8 * RATE / 1e6:g} Mbit/s, 2 spare hosts at a quarter,"
        f" {nbytes / 1e6:g} MB"
    )
    print(
        f"{case}: {got['seconds']:.2f} s, optimum {seconds[0]:.2f}; shares as if equal"
        f" {equal['seconds']:.2f}, their floor {seconds[1]:.2f}",
        flush=True,
    )
    return [
        Row(
            case,
            "a round",
            "s",
            got["seconds"],
            equal["seconds"],
            "shares as if all links were equal",
            equal["seconds"] / got["seconds"],
            seconds[0] / got["seconds"],
            "within 1.07 x the optimum",
            got["seconds"] <= 1.07 * seconds[0],
        )
    ]


def _network(workers: Sequence[float], spares: Sequence[float]) -> Network:
    rates = {f"w{i}": rate for i, rate in enumerate(workers)} | {
        f"s{i}": rate for i, rate in enumerate(spares)
    }
    return Network({name: [LabNic(rate)] for name, rate in rates.items()})


def _exchange(
    home: Path,
    network: Network,
    n: int,
    k: int,
    rates: Sequence[float],
    nbytes: int,
    rounds: int,
    how: str,
) -> dict[str, float]:
    """Run rounds of a summation in the lab. Returns {"seconds": median seconds of a round on the
    slowest worker, "cpu": share of all cores that the processes used together}.

    Args:
        n: number of workers
        k: number of spare hosts
        how: "best" for the best division of work, "equal" for the best division if all links were
            equal, "gloo" for gloo's ring
    """
    names = [*(f"w{i}" for i in range(n)), *(f"s{i}" for i in range(k))]
    addresses = ",".join(network.hosts[name].address for name in names)
    running = []
    with ExitStack() as stack:
        for i, name in enumerate(names):
            out = home / f"{name}.json"
            words = [
                "--rank",
                str(i),
                "--workers",
                str(n),
                "--addresses",
                addresses,
                "--how",
                how,
                "--rates",
                ",".join(map(str, rates)),
                "--nbytes",
                str(nbytes),
                "--rounds",
                str(rounds),
                "--json",
                str(out),
            ]
            process = network.hosts[name].run(
                [sys.executable, "-m", "benchmarks.sums.summation", *words],
                stdin=subprocess.PIPE,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            running.append((process, out))
        for process, _ in running[:n]:
            if process.wait(TIMEOUT_S + 20 * rounds):
                raise RoadtrainError(f"a worker ended with exit code {process.returncode}")
        for process, _ in running[n:]:
            process.communicate(b"", timeout=TIMEOUT_S)
        found = [json.loads(out.read_text()) for _, out in running]
    workers = found[:n]
    seconds = median(max(worker["seconds"][i] for worker in workers) for i in range(rounds))
    whole = sum(workers[0]["seconds"]) + workers[0]["first"]
    return {"seconds": seconds, "cpu": sum(process["cpu"] for process in found) / (cores() * whole)}


# on one host


def host(args: argparse.Namespace) -> dict[str, Any]:
    addresses, rates = args.addresses.split(","), [float(rate) for rate in args.rates.split(",")]
    if args.how == "gloo":
        return gloo(args, addresses)
    reducers, options = Reducers(4 * args.nbytes), TcpOptions(token=TOKEN, retry_s=30)
    listener = listen((addresses[args.rank], PORT), reducers.accept, options, language=m.LANGUAGE)
    n, cpu = args.workers, process_time()
    try:
        if args.rank >= n:
            sys.stdin.read()  # until the parent closes the pipe
            return {"cpu": process_time() - cpu}
        like = [1.0] * len(rates) if args.how == "equal" else rates
        sites = [
            None if i == args.rank else (address, PORT) for i, address in enumerate(addresses[:n])
        ]
        spares = tuple((i, f"{addresses[i]}:{PORT}", like[i]) for i in range(n, len(like)))
        sums = WorkerSums(
            args.rank,
            sites,
            like[:n],
            spares,
            reducers.accept,
            SumOptions("bench", options, deadline_s=TIMEOUT_S),
        )
        try:
            return rounds_of(sums, args)
        finally:
            sums.close()
    finally:
        reducers.close(TIMEOUT_S)
        listener.close()


def rounds_of(sums: WorkerSums, args: argparse.Namespace) -> dict[str, Any]:
    elements, seconds = args.nbytes // 4, []
    grad, out = (np.empty(elements, np.float32) for _ in range(2))
    pending = PendingSums(sums)
    barrier, cpu = [np.zeros(1, np.float32) for _ in range(2)], 0.0
    for i in range(args.rounds + 1):
        grad[:] = np.float32(0.1) * (args.rank + 1 + i)
        for key, (what, result) in ((0, barrier), (1, (grad, out))):
            begin, used = perf_counter(), process_time()
            grads, total = (array.view(np.uint8).data for array in (what, result))
            pending.sum(key, grads, total, "fp32")
            pending.wait()
            cpu += process_time() - used
        seconds.append(perf_counter() - begin)
        expected = np.float32(0)
        for rank in range(args.workers):
            expected += np.float32(0.1) * (rank + 1 + i)
        if not (out == expected).all():
            raise RoadtrainError(
                f"round {i}: elements of the sum are {out.min()} to {out.max()}, not {expected}"
            )
    return {"seconds": seconds[1:], "first": seconds[0], "cpu": cpu}


def gloo(args: argparse.Namespace, addresses: Sequence[str]) -> dict[str, Any]:
    dist.init_process_group(
        "gloo", init_method=f"tcp://{addresses[0]}:29533", rank=args.rank, world_size=args.workers
    )
    tensor, seconds, cpu = torch.zeros(args.nbytes // 4), [], process_time()
    for _ in range(args.rounds + 1):
        dist.barrier()
        begin = perf_counter()
        dist.all_reduce(tensor)
        seconds.append(perf_counter() - begin)
    used = process_time() - cpu
    dist.destroy_process_group()
    return {"seconds": seconds[1:], "first": seconds[0], "cpu": used}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, kind in (
        ("rank", int),
        ("workers", int),
        ("addresses", str),
        ("rates", str),
        ("nbytes", int),
        ("rounds", int),
        ("how", str),
        ("json", str),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    args = parser.parse_args(argv)
    Path(args.json).write_text(json.dumps(host(args)))


if __name__ == "__main__":
    main(sys.argv[1:])
