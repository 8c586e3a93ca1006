"""Descriptions of a run's processes: arguments, files, hosts. Plain values: engines start them
(launch_engine.py), `launch --dry-run` and `--write` print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

THREADS = "OMP_NUM_THREADS"


class Role(StrEnum):
    """The role of a process."""

    WORKER = "worker"
    SERVER = "server"
    REDUCER = "reducer"
    SWITCH = "switch"


@dataclass(frozen=True)
class HostFile:
    """A file that is written to a host before its process starts."""

    path: str  # absolute
    content: str
    secret: bool = False  # written with mode 600


@dataclass(frozen=True)
class Process:
    """A process of a run, to be started on a host."""

    name: str  # unique in the run: "worker 0", "server spare0 0", "reducer spare1", "switch tor"
    role: Role
    host: str  # its name in the plan
    words: tuple[str, ...]  # arguments of the interpreter: ("-m", "roadtrain.cli", "serve", ...)
    directory: str  # absolute working directory, created if missing
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[HostFile, ...] = ()
    ports: tuple[int, ...] = ()  # ports on which it listens, at its host's address


@dataclass(frozen=True)
class WorkerSet:
    """The workers of an attempt, by rank. They start together, and when one fails the others are
    ended too."""

    attempt: int  # counts the starts of the workers, from 0
    processes: tuple[Process, ...]


def with_threads(workers: WorkerSet, threads: Mapping[str, int], users: str) -> WorkerSet:
    """Set OMP_NUM_THREADS of each worker: to `users`, the user's own value, or else to that of its
    host in `threads`. A value set by the job has precedence."""
    processes = []
    for process in workers.processes:
        if count := users or threads.get(process.host):
            environment = {THREADS: str(count), **process.environment}
            process = replace(process, environment=environment)
        processes.append(process)
    return replace(workers, processes=tuple(processes))
