"""Workers under torchrun, for `launch --write` (write_slurm.py, write_kubernetes.py), and other
code shared by the two.

torchrun runs on each host with a fixed node rank and a static rendezvous at the plan's address and
port, so ranks are those of the plan. It does not restart its workers: torchruns count restarts
independently, so their restart counts would diverge. Instead, the script that starts the torchruns
ends and restarts them all together. Does NOT write files.
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
SHUTDOWN_S = 100  # after which torchrun kills its workers; must be less than the 120 s of notice


def first_worker(run: ResolvedRun) -> Process:
    """Return the worker of rank 0, whose arguments and files are the same for all workers; torchrun
    sets their environment. Raises ConfigError if --write does not support the run."""
    check_for_files(run)
    return run.workers(run.worker_hosts, 0).processes[0]


def torchrun_words(run: ResolvedRun, node_rank: str, workers: str, start: str) -> tuple[str, ...]:
    """Return the interpreter's arguments up to those of the worker. start: id of this start of the
    workers."""
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
    """Raise ConfigError if --write does not support the run."""
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
    """Set run.device to `cuda` if the job leaves it open and all workers have accelerators, so that
    workers that see none fail instead of computing on processors (Rule 6)."""
    if run.job.run.device or len(gpus_of(run)) < len(run.worker_hosts):
        return run
    return replace(run, job=run.job.changed({"run.device": "cuda"}))


def gpus_of(run: ResolvedRun) -> dict[str, int]:
    """Return the number of accelerators that each host needs, one per worker; hosts that need none
    are omitted. Decided by the job's device or, if it is open, by the plan's cluster."""
    workers = [run.host(name) for name in run.worker_hosts]
    if stated := run.job.run.device:
        return {host.name: host.workers for host in workers if stated.startswith("cuda")}
    cluster = run.plan_file.cluster
    devices = {kind.name: kind.device for kind in cluster.hosts} if cluster else {}
    kinds = {name for name, device in devices.items() if device and device.kind != "cpu"}
    return {host.name: host.workers for host in workers if host.kind in kinds}


def check_ours(out: Path, names: Iterable[str], mark: str) -> None:
    """Raise ConfigError if a file in `out` that would be replaced was not written by us: neither of
    its first two lines starts with `mark`."""
    for path in (out / name for name in names):
        if path.exists() and not any(
            line.startswith(mark.encode()) for line in path.read_bytes().splitlines()[:2]
        ):
            raise ConfigError(
                f"{path} would be replaced, but was not written by --write",
                hint="choose another directory for --out",
            )


def hosts_of(run: ResolvedRun) -> tuple[str, ...]:
    """Return the plan's hosts with any process, in the plan's order."""
    used = {service.host for service in run.services()} | {*run.worker_hosts}
    return tuple(host.name for host in run.machines.hosts if host.name in used)


def files_of(run: ResolvedRun) -> tuple[HostFile, ...]:
    """Return the distinct files of all processes."""
    processes = (*run.services(), *run.workers(run.worker_hosts, 0).processes)
    return tuple({file.path: file for process in processes for file in process.files}.values())


def notes_for_user(run: ResolvedRun) -> list[str]:
    """Return notes on devices that are not requested, and on functions of a supervisor that a
    written run does not have."""
    notes = []
    if run.plan_file.cluster is None and not run.job.run.device:
        notes.append(
            'the plan has no cluster, so no GPU is requested: set run.device = "cuda" in the job'
        )
    if spares := [host.name for host in run.machines.spares]:
        notes.append(f"spare hosts are not used: {', '.join(spares)}")
    return [*notes, "if a host is lost, the run waits until it is back"]
