"""Descriptions of a run's processes: arguments, files, hosts. Engines start processes from these
descriptions; `launch --dry-run` and `launch --write` print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

THREADS = "OMP_NUM_THREADS"


class Role(StrEnum):
    """The role of a process in a run."""

    WORKER = "worker"
    SERVER = "server"
    REDUCER = "reducer"
    SWITCH = "switch"


@dataclass(frozen=True)
class HostFile:
    """A file that an engine writes to a host before it starts a process on the host."""

    path: str  # absolute
    content: str
    secret: bool = False  # written with mode 600


@dataclass(frozen=True)
class Process:
    """A process of a run, to be started on a host."""

    name: str  # unique in the run: "worker 0", "server spare0 0", "reducer spare1", "switch tor"
    role: Role
    host: str  # the host's name in the plan
    words: tuple[str, ...]  # arguments of the interpreter: ("-m", "roadtrain.cli", "serve", ...)
    directory: str  # absolute working directory, which is created if it is missing
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[HostFile, ...] = ()
    ports: tuple[int, ...] = ()  # ports on which the process listens, at its host's address


@dataclass(frozen=True)
class WorkerSet:
    """The workers of one attempt to run, in the order of their ranks. They start together, and end
    together if one fails."""

    attempt: int  # number of this start of the workers; the first start has number 0
    processes: tuple[Process, ...]


def with_threads(workers: WorkerSet, threads: Mapping[str, int], users: str) -> WorkerSet:
    """Return the workers with OMP_NUM_THREADS in their environment, unless it is already set.
    `threads`: the number of threads per worker of each host. `users`: the user's own value, which
    has precedence, or ""."""
    processes = []
    for process in workers.processes:
        if count := users or threads.get(process.host):
            environment = {THREADS: str(count), **process.environment}
            process = replace(process, environment=environment)
        processes.append(process)
    return replace(workers, processes=tuple(processes))
