"""What a run consists of: processes with their words, files and hosts. Plain values: an engine
carries them out (launch_engine.py), `launch --dry-run` and `--write` print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

THREADS = "OMP_NUM_THREADS"


class Role(StrEnum):
    """What a process of a run does."""

    WORKER = "worker"
    SERVER = "server"
    REDUCER = "reducer"
    SWITCH = "switch"


@dataclass(frozen=True)
class HostFile:
    """A file that stands on a host before its process starts."""

    path: str  # absolute
    content: str
    secret: bool = False  # mode 600


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    name: str  # unique in the run: "worker 0", "server spare0 0", "reducer spare1", "switch tor"
    role: Role
    host: str  # as the plan calls it
    words: tuple[str, ...]  # behind the interpreter: ("-m", "roadtrain.cli", "serve", ...)
    directory: str  # absolute: where it runs; made if it is not there
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[HostFile, ...] = ()
    ports: tuple[int, ...] = ()  # it listens at these, at its host's address


@dataclass(frozen=True)
class WorkerSet:
    """All workers of one attempt, by rank: they start together, and when one ends the others are
    ended too."""

    attempt: int  # from 0 on, another for each start of the workers
    processes: tuple[Process, ...]


def with_threads(workers: WorkerSet, threads: Mapping[str, int], users: str) -> WorkerSet:
    """Workers that say how many threads each computes with: as many as the user has set (`users`,
    or ""), else those of its host. What the job sets stays."""
    processes = []
    for process in workers.processes:
        if count := users or threads.get(process.host):
            environment = {THREADS: str(count), **process.environment}
            process = replace(process, environment=environment)
        processes.append(process)
    return replace(workers, processes=tuple(processes))
