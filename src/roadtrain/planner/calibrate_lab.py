"""Run steps of a job on a cluster emulated on this machine, for `roadtrain calibrate --lab`.

Each host is a network namespace with the rate of the host's network card. The SSDs of a worker are
small files, used as throttled loop devices. Hosts without devices run `roadtrain serve` with the
state in memory. A worker is a process that uses a share of this machine's CPUs. Needs root. The lab
does not emulate devices, latency, or SSDs whose reads and writes share one rate.
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
StartWorker = Callable[..., subprocess.Popen[Any]]
# bytes of memory that the emulation needs: for the state (both slots) per parameter, for a worker
# per parameter, and for a process
STATE, WORKER, PROCESS = 32, 12, 400 * MIB


def steps_in_lab(cluster: Cluster, job: Job, steps: int) -> tuple[Cluster, Measured]:
    """Run steps of a job in the lab. Return the cluster as it was emulated, and the measurements of
    the slowest worker.

    Only this run may use the directory `job.run.dir`. Raises ConfigError if the job cannot run in
    the lab, and BudgetError if the model is too large.
    """
    worker, server = hosts_of(cluster, job)
    home, many = Path(job.run.dir), worker.count
    config = build_config(with_vocabulary(job)).to_dict()
    params = shape_of_config(config, seq_len=job.data.seq_len).params
    need = params * (STATE + WORKER * many) + PROCESS * (many + (server.count if server else 0))
    if need > (free := psutil.virtual_memory().available):
        raise BudgetError(
            f"{params / 1e6:.0f} M parameters and {many} worker(s) in the lab need"
            f" {show_bytes(need)} of memory, but {show_bytes(free)} are free",
            hint="use a smaller model, or fewer hosts",
        )
    sweep()
    with ExitStack() as stack:
        # SIGTERM raises KeyboardInterrupt, so that the lab is removed
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        stack.callback(signal.signal, signal.SIGTERM, before)
        starts: list[StartWorker] = [subprocess.Popen]
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
            starts = [network.hosts[f"w{i}"].run for i in range(many)]
        elif job.store.files:
            [ssd] = worker.ssds
            size = 2 * STATE * params // ssd.count + 128 * MIB
            made = (LoopDevice(home / f"ssd{i}", size) for i in range(ssd.count))
            devices = [stack.enter_context(device) for device in made]
            throttle = stack.enter_context(Throttle(devices, ssd.read, ssd.write))
            job = job.changed({"store.files": [str(device.mount / "store") for device in devices]})
        threads = max(1, len(os.sched_getaffinity(0)) // many)
        found = workers([(start, job) for start in starts], home, threads, steps, throttle)
    assert worker.device is not None
    device = worker.device.model_copy(update={"kind": "cpu"})
    ssds = tuple(ssd.model_copy(update={"mixed": 2.0, "depth": 1}) for ssd in worker.ssds)
    lab = worker.model_copy(update={"device": device, "ssds": ssds})
    hosts = tuple(lab if host is worker else host for host in cluster.hosts)
    return (
        cluster.model_copy(update={"name": f"{cluster.name} in the lab", "hosts": hosts}),
        max(found, key=lambda measured: measured.step_s),
    )


def hosts_of(cluster: Cluster, job: Job) -> tuple[Host, Host | None]:
    """Return the kind of the hosts with workers, and the kind of the hosts with servers (None if
    the job does not use servers). Raises ConfigError if the lab cannot emulate the job's hosts."""
    store, addresses, worker = job.store, job.servers.addresses, cluster.workers[0]
    server = cluster.spares[0] if addresses and cluster.spares else None
    many = worker.count * worker.devices
    kinds = [len(host.ssds) for host in (worker, server) if host is not None]
    if why := network_available() or (lab_available() if store.files else None):
        raise ConfigError(
            f"no lab can be created here: {why}", hint="run as root on Linux, or omit --lab"
        )
    if (
        len(cluster.workers) != 1
        or worker.devices > 1
        or bool(addresses) != (server is not None)
        or (many > 1 and server is None)
    ):
        raise ConfigError(
            f"the lab cannot emulate a job with {len(addresses)} server(s) on {cluster.name}, which"
            f" has {len(cluster.workers)} kind(s) of hosts with devices ({many} device(s) of the"
            f" first kind) and {len(cluster.spares)} kind(s) without devices",
            hint="the lab emulates one kind of hosts with one device each: a single host if the job"
            " has no servers, else any number",
        )
    if (server is not None and server.ssds) or (store.files and len(worker.ssds) != 1):
        raise ConfigError(
            f"the lab cannot emulate {kinds[0]} kind(s) of SSDs in worker hosts and"
            f" {sum(kinds[1:])} kind(s) of SSDs in server hosts",
            hint="a worker with a store on files needs 1 kind of SSDs, and a server must have none",
        )
    cards = () if server is None else cluster.common([worker, server])
    rates = [(card.total, CARD_MOST) for card in cards]
    if store.files:
        (ssd,), real = worker.ssds, storage_rates(job.run.dir)
        rates += [(ssd.count * ssd.read, real.read), (ssd.count * ssd.write, real.write)]
    if beyond := next((pair for pair in rates if pair[0] > pair[1]), None):
        raise ConfigError(
            f"a card or SSD with {show_rate(beyond[0])} cannot be emulated on this machine: the"
            f" maximum is {show_rate(beyond[1])}",
            hint="use slower cards or SSDs in the cluster file, or a run.dir on a faster device",
        )
    return worker, server


@contextmanager
def servers(network: Network, many: int, home: Path, *words: str) -> Iterator[list[str]]:
    """Within the `with` statement, run `roadtrain serve` on the lab's hosts s0, s1, ..., with
    stores in memory. Yield the addresses of the servers. The token for these servers is in the file
    `token` in `home`. `words`: more arguments for `roadtrain serve`."""
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
    jobs: Sequence[tuple[StartWorker, Job]],
    home: Path,
    threads: int,
    steps: int,
    throttle: Throttle | None = None,
) -> list[Measured]:
    """Run the workers and return their measurements in the order of their ranks.

    Args:
        jobs: For each rank, a function that starts the worker's process, and the worker's job.
        home: The directory for the workers' files.
        threads: The number of threads per worker.
        steps: The number of steps to measure.
        throttle: The I/O limit that all workers share.
    """
    running: list[tuple[subprocess.Popen[Any], Path, Path]] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for rank, (start, job) in enumerate(jobs):
            path, out, log = (home / f"worker{rank}.{end}" for end in ("toml", "json", "log"))
            path.write_text(job.to_toml())
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(jobs)), "MASTER_PORT": "1"}
            words = [sys.executable, "-m", "roadtrain.planner.calibrate_steps"]
            words += [str(path), str(threads), str(steps), str(out)]
            with log.open("w") as lines:
                own = start(words, env=os.environ | ranks, stdout=lines, stderr=subprocess.STDOUT)
            running.append((own, out, log))
            if throttle is not None:
                throttle.enter_process(own.pid)
        while (codes := [process.poll() for process, _, _ in running]).count(0) < len(codes):
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                output = running[failed][2].read_text()[-2000:].strip()
                raise RoadtrainError(
                    f"worker {failed} exited with code {codes[failed]}: {output or '(no output)'}"
                )
            if time.monotonic() > deadline:
                raise DeadlineError(f"workers did not finish {steps} steps in {TIMEOUT_S:.0f} s")
            time.sleep(0.05)
    finally:
        for process, _, _ in running:
            process.kill()
            process.wait()
    return [msgspec.json.decode(out.read_bytes(), type=Measured) for _, out, _ in running]
