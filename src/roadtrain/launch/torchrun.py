"""Code that write_slurm.py and write_kubernetes.py share for `launch --write`: the command that
starts workers with torchrun, checks, and notes for the user. Does NOT write files.

torchrun runs on each host with a fixed node rank, so that ranks are those of the plan. torchrun
does not restart its workers, because the torchruns of different hosts count restarts independently.
Instead, the Slurm script or Kubernetes restarts all torchruns of the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from roadtrain.errors import ConfigError
from roadtrain.launch.processes import HostFile, Process
from roadtrain.launch.resolve import ResolvedRun

TORCHRUN = ("-m", "torch.distributed.run")
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
SHUTDOWN_S = 100  # time after which torchrun kills its workers; must be less than NOTICE_S, 120 s


def first_worker(run: ResolvedRun) -> Process:
    """Return the worker with rank 0, whose arguments and files all workers share. Raises
    ConfigError if files of `launch --write` cannot start the run."""
    check_for_files(run)
    return run.workers(run.worker_hosts, 0).processes[0]


def torchrun_words(run: ResolvedRun, node_rank: str, workers: str, start: str) -> tuple[str, ...]:
    """Return the arguments of the Python interpreter that start torchrun on a host, to be followed
    by those of the worker. `node_rank`: the rank of the host among the hosts with workers.
    `workers`: its number of workers. `start`: the id of this start of the workers."""
    return (
        *TORCHRUN,
        f"--nnodes={len(run.worker_hosts)}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={workers}",
        f"--master-addr={run.address(run.worker_hosts[0])}",
        f"--master-port={run.machines.rendezvous_port}",
        f"--rdzv-id={start}",
        "--max-restarts=0",
    )


def check_for_files(run: ResolvedRun) -> None:
    """Raise ConfigError if files of `launch --write` cannot start the run, because of run.new_store
    or an invalid host name."""
    if run.job.run.new_store:
        raise ConfigError(
            "run.new_store is true: the written files restart the run whenever it fails, and each"
            " restart would discard the training so far",
            hint="leave run.new_store out of the job, and remove the stores' directories by hand",
        )
    for host in hosts_of(run):
        if HOST_NAME.fullmatch(host) is None:
            raise ConfigError(
                f"the plan's host name {host!r} is not a valid node name",
                hint="name the hosts in the cluster file like the nodes of Slurm or Kubernetes: 1"
                " to 63 letters, digits, `-`, `_` and `.`",
            )


def with_device(run: ResolvedRun) -> ResolvedRun:
    """Return the run with run.device set to `cuda` in the job, unless it is set or some workers
    have no accelerators. A worker that sees no accelerator then fails, instead of silently
    computing on processors (Rule 6)."""
    if run.job.run.device or len(gpus_of(run)) < len(run.worker_hosts):
        return run
    return replace(run, job=run.job.changed({"run.device": "cuda"}))


def gpus_of(run: ResolvedRun) -> dict[str, int]:
    """Return the number of accelerators that each host needs (one per worker), by the host's name.
    Hosts that need none, according to the job's run.device or the plan's cluster, are omitted."""
    workers = [run.host(name) for name in run.worker_hosts]
    if stated := run.job.run.device:
        return {host.name: host.workers for host in workers if stated != "cpu"}
    cluster = run.plan_file.cluster
    devices = {kind.name: kind.device for kind in cluster.hosts} if cluster else {}
    kinds = {name for name, device in devices.items() if device and device.kind != "cpu"}
    return {host.name: host.workers for host in workers if host.kind in kinds}


def check_ours(out: Path, names: Iterable[str], mark: str) -> None:
    """Raise ConfigError if one of the files `names` in `out` was not written by `launch --write`.
    `mark`: a text at the beginning of the first or second line of its files."""
    for path in (out / name for name in names):
        if path.exists() and not any(
            line.startswith(mark.encode()) for line in path.read_bytes().splitlines()[:2]
        ):
            raise ConfigError(
                f"{path} exists and was not written by --write, so it is not replaced",
                hint="choose another directory for --out",
            )


def hosts_of(run: ResolvedRun) -> tuple[str, ...]:
    """Return the plan's hosts that run a process, in the plan's order."""
    used = {service.host for service in run.services()} | {*run.worker_hosts}
    return tuple(host.name for host in run.machines.hosts if host.name in used)


def files_of(run: ResolvedRun) -> tuple[HostFile, ...]:
    """Return the distinct files of all processes."""
    processes = (*run.services(), *run.workers(run.worker_hosts, 0).processes)
    return tuple({file.path: file for process in processes for file in process.files}.values())


def notes_for_user(run: ResolvedRun) -> list[str]:
    """Return notes for the user: whether no GPUs are requested, and which features of the plan are
    not used."""
    notes = []
    if run.plan_file.cluster is None and not run.job.run.device:
        notes.append(
            'the plan has no cluster, so no GPU is requested: set run.device = "cuda" in the job'
        )
    if spares := [host.name for host in run.machines.spares]:
        notes.append(f"spare hosts are not used: {', '.join(spares)}")
    return [*notes, "if a host is lost, the run waits until the host is back"]
