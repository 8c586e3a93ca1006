"""The workers of a run as torchrun starts them, for the files that are written instead of a launch
(write_slurm.py, write_kubernetes.py); and what both kinds of files share.

torchrun runs on each host with the host's place in the order of ranks, and meets the others at the
plan's address and port (static rendezvous), so ranks are the plan's. It starts its workers once:
torchruns that start workers again count by themselves, lose count of each other, and the starts
that they name differ. Whoever started the torchruns ends them all and starts them all again.
Does NOT write files.
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
SHUTDOWN_S = 100  # of the 120 s of a notice: torchrun kills workers that are not done by then


def first_worker(run: ResolvedRun) -> Process:
    """Return the worker of rank 0, whose words and files are those of all workers. torchrun says
    all that is in its environment. Raises ConfigError for what such files cannot do."""
    check_for_files(run)
    return run.workers(run.worker_hosts, 0).processes[0]


def torchrun_words(run: ResolvedRun, node_rank: str, workers: str, start: str) -> tuple[str, ...]:
    """Return what is behind the interpreter on one host; the words of a worker follow. start: the
    name of this start of the workers."""
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
    """Raises ConfigError."""
    if run.job.run.new_store:
        raise ConfigError(
            "run.new_store is true: the files begin the run again whenever it ends too early, and"
            " each time all that it has trained would be gone",
            hint="leave run.new_store out of the job, and remove the stores' directories by hand",
        )
    for host in hosts_of(run):
        if HOST_NAME.fullmatch(host) is None:
            raise ConfigError(
                f"the host {host!r} of the plan cannot be the name of a node",
                hint="1 to 63 letters, digits, `-`, `_` and `.` are possible: name the hosts of the"
                " cluster file as Slurm or Kubernetes names its nodes",
            )


def with_device(run: ResolvedRun) -> ResolvedRun:
    """Where the job leaves the device open and all its workers have accelerators, `cuda`: workers
    that see none end, instead of computing on processors (Rule 6)."""
    if run.job.run.device or len(gpus_of(run)) < len(run.worker_hosts):
        return run
    return replace(run, job=run.job.changed({"run.device": "cuda"}))


def gpus_of(run: ResolvedRun) -> dict[str, int]:
    """Accelerators that the workers of each host need, one each; a host that needs none is not in
    it. The job's device says it, else the plan's cluster."""
    workers = [run.host(name) for name in run.worker_hosts]
    if stated := run.job.run.device:
        return {one.name: one.workers for one in workers if stated.startswith("cuda")}
    cluster = run.plan_file.cluster
    devices = {kind.name: kind.device for kind in cluster.hosts} if cluster else {}
    kinds = {name for name, device in devices.items() if device and device.kind != "cpu"}
    return {one.name: one.workers for one in workers if one.kind in kinds}


def check_ours(out: Path, names: Iterable[str], mark: str) -> None:
    """Raises ConfigError where a file of `out` that would be replaced does not begin with `mark`,
    its first line or a line behind `#!`."""
    for path in (out / name for name in names):
        if path.exists() and not any(
            line.startswith(mark.encode()) for line in path.read_bytes().splitlines()[:2]
        ):
            raise ConfigError(
                f"{path} was not written by --write, and would be replaced",
                hint="--out names a directory of its own",
            )


def hosts_of(run: ResolvedRun) -> tuple[str, ...]:
    """That run anything, in the order of the plan."""
    used = {one.host for one in run.services()} | {*run.worker_hosts}
    return tuple(host.name for host in run.machines.hosts if host.name in used)


def files_of(run: ResolvedRun) -> tuple[HostFile, ...]:
    """Of all processes, each once."""
    processes = (*run.services(), *run.workers(run.worker_hosts, 0).processes)
    return tuple({file.path: file for one in processes for file in one.files}.values())


def notes_for_user(run: ResolvedRun) -> list[str]:
    """Devices that are not asked for, and what the supervisor of a launched run would do and
    nothing does here."""
    notes = []
    if run.plan_file.cluster is None and not run.job.run.device:
        notes.append(
            'the plan has no cluster, so no GPU is asked for: state run.device = "cuda" in the job'
        )
    if spares := [host.name for host in run.machines.spares]:
        notes.append(f"spare hosts are not used: {', '.join(spares)}")
    return [*notes, "a host that is lost is waited for: the run goes on when it is back"]
