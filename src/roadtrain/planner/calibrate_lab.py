"""Steps of a job on the cluster of a file, emulated on this machine: what `roadtrain calibrate
--lab` compares.

Each host that takes part is a network namespace with its card's rate; the worker's SSDs are
throttled loop devices (small files); hosts without devices run `roadtrain serve`, with the state in
memory. A worker is a process with its part of this machine's processors. Needs root. Does NOT
emulate devices, latency, or SSDs whose reads and writes share one rate: the cluster that comes back
says what the lab was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from roadtrain.config.cluster import Cluster, Host
from roadtrain.config.job import Job
from roadtrain.config.job_model import with_vocabulary
from roadtrain.errors import BudgetError, ConfigError, DeadlineError, RoadtrainError
from roadtrain.lab import (
    CARD_MOST,
    CARRIED,
    LabNic,
    LoopDevice,
    Network,
    Throttle,
    lab_available,
    network_available,
    sweep,
)
from roadtrain.planner.calibrate_steps import Measured
from roadtrain.planner.model_config import shape_of_config
from roadtrain.simulator.compute import Constants
from roadtrain.storage.rates import storage_rates
from roadtrain.training.build import build_config
from roadtrain.transport.address import write_token
from roadtrain.units import MIB, show_bytes, show_rate

EMULATED = Constants(efficiency=1.0, network=CARRIED, source="measured in the lab")
TIMEOUT_S, PORT = 900.0, 7000
Begin = Callable[..., subprocess.Popen[Any]]
# bytes a parameter: of both slots, of a worker; and of a process besides
STATE, WORKER, PROCESS = 32, 12, 400 * MIB


def steps_in_lab(cluster: Cluster, job: Job, steps: int) -> tuple[Cluster, Measured]:
    """What the lab was, and what its slowest worker found. `job.run.dir`: a directory for this
    alone. Raises ConfigError for what has no runtime in the lab, BudgetError for a model too large,
    before anything is made.
    """
    worker, server = hosts_of(cluster, job)
    home, many = Path(job.run.dir), worker.count
    config = build_config(with_vocabulary(job)).to_dict()
    params = shape_of_config(config, seq_len=job.data.seq_len).params
    need = params * (STATE + WORKER * many) + PROCESS * (many + (server.count if server else 0))
    if need > (free := psutil.virtual_memory().available):
        raise BudgetError(
            f"{params / 1e6:.0f} M parameters and {many} worker(s) in the lab take"
            f" {show_bytes(need)}, {show_bytes(free)} are free here",
            hint="a smaller model, or fewer hosts",
        )
    sweep()
    with ExitStack() as stack:
        # what is made is undone then, too
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        stack.callback(signal.signal, signal.SIGTERM, before)
        begins: list[Begin] = [subprocess.Popen]
        throttle = None
        if server is not None:
            cards = zip("ws", (worker, server), cluster.common([worker, server]))
            nics = {
                f"{kind}{i}": [LabNic(card.total)]
                for kind, host, card in cards
                for i in range(host.count)
            }
            network = stack.enter_context(Network(nics))
            where = stack.enter_context(servers(network, server.count, home))
            job = job.changed(
                {"servers.addresses": where, "servers.token_file": str(home / "token")}
            )
            begins = [network.hosts[f"w{i}"].run for i in range(many)]
        elif job.store.files:
            [ssd] = worker.ssds
            size = 2 * STATE * params // ssd.count + 128 * MIB
            made = (LoopDevice(home / f"ssd{i}", size) for i in range(ssd.count))
            devices = [stack.enter_context(device) for device in made]
            throttle = stack.enter_context(Throttle(devices, ssd.read, ssd.write))
            job = job.changed({"store.files": [str(device.mount / "store") for device in devices]})
        threads = max(1, len(os.sched_getaffinity(0)) // many)
        found = workers([(begin, job) for begin in begins], home, threads, steps, throttle)
    assert worker.device is not None
    device = worker.device.model_copy(update={"kind": "cpu"})
    ssds = tuple(ssd.model_copy(update={"mixed": 2.0, "depth": 1}) for ssd in worker.ssds)
    lab = worker.model_copy(update={"device": device, "ssds": ssds})
    hosts = tuple(lab if host is worker else host for host in cluster.hosts)
    return (
        cluster.model_copy(update={"name": f"{cluster.name} in the lab", "hosts": hosts}),
        max(found, key=lambda one: one.step_s),
    )


def hosts_of(cluster: Cluster, job: Job) -> tuple[Host, Host | None]:
    """The workers', and the servers' where the job has some. Raises ConfigError for what the
    lab cannot be."""
    store, addresses, worker = job.store, job.servers.addresses, cluster.workers[0]
    server = cluster.spares[0] if addresses and cluster.spares else None
    many = worker.count * worker.devices
    kinds = [len(host.ssds) for host in (worker, server) if host is not None]
    if why := network_available() or (lab_available() if store.files else None):
        raise ConfigError(f"no lab can be made here: {why}", hint="root on Linux, or without --lab")
    if (
        len(cluster.workers) != 1
        or worker.devices > 1
        or bool(addresses) != (server is not None)
        or (many > 1 and server is None)
    ):
        raise ConfigError(
            f"the job names {len(addresses)} server(s), {cluster.name} has"
            f" {len(cluster.workers)} kind(s) of hosts with devices, {many} device(s) in the first,"
            f" and {len(cluster.spares)} kind(s) without",
            hint=(
                "in the lab hosts have one device each and are of one kind: one alone, or any"
                " number with servers"
            ),
        )
    if (server is not None and server.ssds) or (store.files and len(worker.ssds) != 1):
        raise ConfigError(
            f"hosts of the job have {' and '.join(map(str, kinds))} kind(s) of SSDs",
            hint=(
                "in the lab a worker has those of one kind, and servers keep their state in memory"
            ),
        )
    cards = () if server is None else cluster.common([worker, server])
    rates = [(card.total, CARD_MOST) for card in cards]
    if store.files:
        (ssd,), real = worker.ssds, storage_rates(job.run.dir)
        rates += [(ssd.count * ssd.read, real.read), (ssd.count * ssd.write, real.write)]
    if beyond := next((pair for pair in rates if pair[0] > pair[1]), None):
        raise ConfigError(
            f"{show_rate(beyond[0])} cannot be emulated here, at most {show_rate(beyond[1])}",
            hint="slower cards or SSDs in the cluster file, or a run.dir on a faster device",
        )
    return worker, server


@contextmanager
def servers(network: Network, many: int, home: Path, *words: str) -> Iterator[list[str]]:
    """`roadtrain serve` on each of the hosts s0.., with its store in memory, its token in
    `home`: the addresses."""
    write_token(home / "token")
    with ExitStack() as stack:
        where = []
        for host in (network.hosts[f"s{i}"] for i in range(many)):
            store = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="roadtrain-calibrate-", dir="/dev/shm")
            )
            where.append(f"{host.address}:{PORT}")
            serve = [sys.executable, "-m", "roadtrain.cli", "serve", where[-1]]
            serve += ["--store", f"{store}/store", "--token-file", str(home / "token"), *words]
            process = host.run(serve, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield where


def workers(
    jobs: Sequence[tuple[Begin, Job]],
    home: Path,
    threads: int,
    steps: int,
    throttle: Throttle | None = None,
) -> list[Measured]:
    """What each worker found, by rank; `jobs`: how to start it, and what it trains. `throttle`:
    of all of them."""
    running: list[tuple[subprocess.Popen[Any], Path, Path]] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for rank, (begin, job) in enumerate(jobs):
            path, out, log = (home / f"worker{rank}.{end}" for end in ("toml", "json", "log"))
            path.write_text(job.to_toml())
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(jobs)), "MASTER_PORT": "1"}
            words = [sys.executable, "-m", "roadtrain.planner.calibrate_steps"]
            words += [str(path), str(threads), str(steps), str(out)]
            with log.open("w") as lines:
                own = begin(words, env=os.environ | ranks, stdout=lines, stderr=subprocess.STDOUT)
            running.append((own, out, log))
            if throttle is not None:
                throttle.enter_process(own.pid)
        while (codes := [process.poll() for process, _, _ in running]).count(0) < len(codes):
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                said = running[failed][2].read_text()[-2000:].strip()
                raise RoadtrainError(
                    f"worker {failed} ended with {codes[failed]}: {said or 'it said nothing'}"
                )
            if time.monotonic() > deadline:
                raise DeadlineError(f"workers have not done {steps} steps within {TIMEOUT_S:.0f} s")
            time.sleep(0.05)
    finally:
        for process, _, _ in running:
            process.kill()
            process.wait()
    return [msgspec.json.decode(out.read_bytes(), type=Measured) for _, out, _ in running]
