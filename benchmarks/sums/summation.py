"""Measure the summation service: n worker hosts sum a gradient with the help of k spare hosts over
emulated links. The service is compared with gloo's ring. The processor time is that of the sums,
without filling and checking the tensors.

The optimum is the shortest possible round, with 0.956 of the rate of each link, because TCP carries
only this share of whole Ethernet frames. Goodput is the bytes of a gradient, divided by the seconds
of a round. A round takes as long as its slowest worker, and the median of three rounds counts. An
earlier round, which allocates the buffers, counts neither as time nor as processor time.
Needs root. Does NOT emulate latency.

    --only ITEM,..
    4, 8     workers, with up to as many spare hosts, all links equal
    unequal  4 workers and 2 spare hosts on unequal links
    steps    whole DDP steps
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, time
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from benchmarks.common.children import run_children
from benchmarks.common.gloo import start_gloo
from benchmarks.common.report import Report, Row, cores
from benchmarks.common.rows import row
from benchmarks.sums import steps as summation_steps
from benchmarks.sums.lab import ONE_THREAD, PORT, TOKEN, hosts_of, lab, spare_hosts
from benchmarks.sums.pending_sums import PendingSums
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab import CARRIED, Network, network_available
from roadtrain.servers import frames as m
from roadtrain.sums.protocol.shares import busiest, optimum
from roadtrain.sums.sum_server import Reducers
from roadtrain.sums.worker_sums import SumOptions, WorkerSums
from roadtrain.transport.tcp import TcpOptions, listen

RATE = 50e6  # bytes/s of a link: 400 Mbit/s
NBYTES, ROUNDS, TIMEOUT_S = 256_000_000, 3, 180
GLOO = "gloo all-reduce"
LEAST_RATIOS = {(4, 0): 0.98, (4, 4): 1.4}  # (workers, spare hosts) -> goal against gloo


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
        rows.append(_unequal_links(nbytes, rounds))
    if "steps" in items:
        rows += summation_steps.rows(4, 4, quick)
    return Report("summation", rows)


def _seconds(workers: Sequence[float], spares: Sequence[float]) -> float:
    """Compute the seconds to sum one byte of a gradient with the best division of work, from the
    rates of the links in bytes/s.
    """
    return busiest(workers, spares, optimum(workers, spares))


def _equal_links(
    n: int, spares: Sequence[int], goal: float, nbytes: int, rounds: int
) -> Iterator[Row]:
    with lab([RATE] * n, [RATE] * max(spares)) as network:
        peer = _exchange(network, [RATE] * n, [], nbytes, rounds, "gloo")
        for k in spares:
            workers, helpers = [RATE] * n, [RATE] * k
            got = _exchange(network, workers, helpers, nbytes, rounds, "best")
            least = _seconds(workers, helpers) * nbytes / CARRIED
            case = f"{n} workers, {k} spare hosts, {8 * RATE / 1e6:g} Mbit/s, {nbytes / 1e6:g} MB"
            print(
                f"{case}: {got['seconds']:.2f} s, optimum {least:.2f}, gloo {peer['seconds']:.2f}",
                flush=True,
            )
            ratio, share = peer["seconds"] / got["seconds"], least / got["seconds"]
            ours, theirs = (nbytes / run["seconds"] / 1e6 for run in (got, peer))
            whole, met = f"{goal:.2f} of the optimum", share >= goal
            yield Row(case, "goodput", "MB/s", ours, theirs, GLOO, ratio, share, whole, met)
            bar = f"ratio >= {LEAST_RATIOS[n, k]:g}" if (n, k) in LEAST_RATIOS else None
            beside = (peer["seconds"], GLOO)
            yield row(case, "a round", "s", got["seconds"], beside, goal=bar, of_floor=share)
            metric = "processor time of all hosts, of all cores"
            beside = (peer["cpu"], GLOO)
            yield row(case, metric, "", got["cpu"], beside, goal="ratio >= 0.5")


def _unequal_links(nbytes: int, rounds: int) -> Row:
    """Measure a summation with unequal links: one of four worker hosts has a link of half the rate,
    and two spare hosts have links of a quarter.
    """
    workers, spares = [RATE, RATE, RATE, RATE / 2], [RATE / 4] * 2
    with lab(workers, spares) as network:
        got, equal = (
            _exchange(network, workers, spares, nbytes, rounds, how)["seconds"]
            for how in ("best", "equal")
        )
    as_if_equal = busiest(workers, spares, optimum([1.0] * 4, [1.0] * 2))
    least, floor = (share * nbytes / CARRIED for share in (_seconds(workers, spares), as_if_equal))
    case = (
        f"4 workers, one at half of {8 * RATE / 1e6:g} Mbit/s, 2 spare hosts at a quarter,"
        f" {nbytes / 1e6:g} MB"
    )
    print(
        f"{case}: {got:.2f} s, optimum {least:.2f}; shares as if equal {equal:.2f}, their floor"
        f" {floor:.2f}",
        flush=True,
    )
    peer, goal = "shares as if all links were equal", "within 1.07 x the optimum"
    met = got <= 1.07 * least
    return Row(case, "a round", "s", got, equal, peer, equal / got, least / got, goal, met)


def _exchange(
    network: Network,
    workers: Sequence[float],
    spares: Sequence[float],
    nbytes: int,
    rounds: int,
    how: str,
) -> dict[str, float]:
    """Run rounds of a summation in the lab. Returns {"seconds": median seconds of a round on the
    slowest worker, "cpu": share of all cores that the processes used together}.

    Args:
        workers: rate of the link of each worker host
        spares: rate of the link of each spare host that helps
        how: "best" for the best division of work, "equal" for the best division if all links were
            equal, "gloo" for gloo's ring
    """
    hosts = hosts_of(network, "w", len(workers))
    with (
        tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as home,
        spare_hosts(network, len(spares), f"{4 * nbytes}B", Path(home)) as servers,
    ):
        common = {
            "addresses": [host.address for host in hosts],
            "spares": [server.address for server in servers],
            "rates": [1.0] * (len(workers) + len(spares))
            if how == "equal"
            else [*workers, *spares],
            "nbytes": nbytes,
            "rounds": rounds,
        }
        each = [{"rank": rank, **common} for rank in range(len(workers))]
        processes = [psutil.Process(server.process.pid) for server in servers]
        function, within_s = gloo if how == "gloo" else summing, TIMEOUT_S + 20 * rounds
        envs = [ONE_THREAD] * len(hosts)
        with _sampled(processes) as samples:
            found = run_children(function, each, hosts=hosts, envs=envs, within_s=within_s)
    before = next(used for at, used in samples if at >= found[0]["began"])
    cpu = samples[-1][1] - before + sum(result["cpu"] for result in found)
    seconds = median(max(result["seconds"][i] for result in found) for i in range(rounds))
    return {"seconds": seconds, "cpu": cpu / (cores() * sum(found[0]["seconds"]))}


@contextmanager
def _sampled(processes: Sequence[psutil.Process]) -> Iterator[list[tuple[float, float]]]:
    """Record the processor seconds of processes every 0.1 s during the `with` block, and once at
    its end. Yields a list of (seconds since the epoch, processor seconds).
    """
    samples, ended = list[tuple[float, float]](), threading.Event()

    def sample() -> None:
        while not ended.wait(0.1):
            samples.append((time(), _processor_s(processes)))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
        samples.append((time(), _processor_s(processes)))


def _processor_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(used.user + used.system for used in times))


# on one host


def summing(
    rank: int,
    addresses: Sequence[str],
    spares: Sequence[str],
    rates: Sequence[float],
    nbytes: int,
    rounds: int,
) -> dict[str, Any]:
    n, reducers, options = len(addresses), Reducers(4 * nbytes), TcpOptions(token=TOKEN, retry_s=30)
    listener = listen((addresses[rank], PORT), reducers.accept, options, language=m.LANGUAGE)
    try:
        sites = [None if i == rank else (at, PORT) for i, at in enumerate(addresses)]
        sums = WorkerSums(
            rank,
            sites,
            rates[:n],
            tuple(zip(range(n, len(rates)), spares, rates[n:])),
            reducers.accept,
            SumOptions("bench", options, deadline_s=TIMEOUT_S),
        )
        try:
            return rounds_of(sums, rank, n, nbytes, rounds)
        finally:
            sums.close()
    finally:
        reducers.close(TIMEOUT_S)
        listener.close()


def rounds_of(
    sums: WorkerSums, own_rank: int, workers: int, nbytes: int, rounds: int
) -> dict[str, Any]:
    grad, out = (np.empty(nbytes // 4, np.float32) for _ in range(2))
    pending, seconds = PendingSums(sums), []
    barrier, cpu, began = [np.zeros(1, np.float32) for _ in range(2)], 0.0, 0.0
    for i in range(rounds + 1):
        began = time() if i == 1 else began
        grad[:] = np.float32(0.1) * (own_rank + 1 + i)
        for key, (what, result) in ((0, barrier), (1, (grad, out))):
            begin, used = perf_counter(), process_time()
            grads, total = (array.view(np.uint8).data for array in (what, result))
            pending.sum(key, grads, total, "fp32")
            pending.wait()
            cpu += (process_time() - used) * (i > 0)
        seconds.append(perf_counter() - begin)
        expected = np.float32(0)
        for rank in range(workers):
            expected += np.float32(0.1) * (rank + 1 + i)
        if not (out == expected).all():
            raise RoadtrainError(
                f"round {i}: elements of the sum are {out.min()} to {out.max()}, not {expected}"
            )
    return {"seconds": seconds[1:], "cpu": cpu, "began": began}


def gloo(
    rank: int, addresses: Sequence[str], nbytes: int, rounds: int, **_others: Any
) -> dict[str, Any]:
    start_gloo(rank, len(addresses), addresses[0])
    tensor, seconds, cpu, began = torch.zeros(nbytes // 4), [], 0.0, 0.0
    for i in range(rounds + 1):
        began, used = time() if i == 1 else began, process_time()
        dist.barrier()
        begin = perf_counter()
        dist.all_reduce(tensor)
        seconds.append(perf_counter() - begin)
        cpu += (process_time() - used) * (i > 0)
    dist.destroy_process_group()
    return {"seconds": seconds[1:], "cpu": cpu, "began": began}
