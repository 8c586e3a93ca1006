"""The rank of this process, from the environment variables that torchrun sets, the identity of this
host, the memory that it may use, and optional packages. Does NOT communicate with other
processes."""

from __future__ import annotations

import functools
import importlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil

from roadtrain.errors import ConfigError

UNLIMITED = 1 << 60  # version 1 of control groups has numbers above this for "no limit"
LAUNCH_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The rank of this process, and the address of the rendezvous store at which all ranks meet."""

    rank: int
    world_size: int
    address: str  # host name or IP address of the rendezvous store
    port: int  # port of the rendezvous store
    agent: bool  # whether torchrun's agent runs the store; otherwise rank 0 runs it
    attempt: str  # number of times that torchrun's agent has restarted this rank


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Read the environment variables that torchrun sets. Raises ConfigError if a variable is
    missing."""
    if missing := [name for name in LAUNCH_NAMES if not environ.get(name)]:
        raise ConfigError(
            f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set",
            hint="start the command with torchrun, which sets these environment variables",
        )
    return Launch(
        *_rank_of(environ),
        environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT"),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


@dataclass(frozen=True)
class WorkerIdentity:
    """The rank of this worker in its group of workers, and the size of the group.

    Attributes:
        session: A string that is the same for all workers of one start of a job, and differs after
            every restart.
        local: The number of workers on each host; 1 if the hosts have different numbers of workers.
    """

    rank: int = 0
    workers: int = 1
    session: str = ""
    local: int = 1

    @staticmethod
    def of_environment(environ: Mapping[str, str] = os.environ) -> WorkerIdentity:
        """Read the identity of this worker from torchrun's variables. Without these variables, this
        process is the only worker. Raises ConfigError if the variables contradict each other."""
        (rank, workers), (_, local) = _rank_of(environ), local_rank_of(environ)
        hosts = _number(environ, "GROUP_WORLD_SIZE", workers // max(local, 1))
        parts = [environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT")]
        alone = uuid.uuid4().hex if workers == 1 else ""  # distinguishes workers that are alone
        session = ":".join([*parts, environ.get("MASTER_PORT", ""), alone])
        return WorkerIdentity(rank, workers, session, local if local * hosts == workers else 1)

    def of_stage(self, stage: int, replica: int, width: int) -> WorkerIdentity:
        """Return the identity of this worker as replica `replica` of a pipeline stage with `width`
        replicas.

        Every stage has a session of its own, because its replicas share servers only with each
        other.
        """
        alone = uuid.uuid4().hex if width == 1 else ""
        return WorkerIdentity(replica, width, f"{self.session}:stage {stage}:{alone}")


def local_rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank of this process among the processes of this host, and their number."""
    return _number(environ, "LOCAL_RANK", 0), _number(environ, "LOCAL_WORLD_SIZE", 1)


def _rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    rank, workers = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    if not 0 <= rank < workers:
        raise ConfigError(
            f"RANK is {rank}, but must be at least 0 and below WORLD_SIZE, which is {workers}",
            hint="start the workers with torchrun, which sets both variables",
        )
    return rank, workers


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    try:
        return int(environ.get(name, default))
    except ValueError as error:
        raise ConfigError(f"{name} is not an integer: {error}") from error


def host_identity() -> str:
    """Return a string that is the same for all processes that share this host's memory and
    network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def smallest(limits: Iterable[int | None]) -> int | None:
    return min((n for n in limits if n is not None and 0 <= n < UNLIMITED), default=None)


@functools.cache
def control_group_limit(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the smallest memory limit in bytes among this process's control group (version 1 or 2)
    and the groups above it; None if there is no limit."""
    found = control_group_words("memory", "memory.limit_in_bytes", "memory.max", groups, root)
    return smallest(int(first) if first.isdecimal() else None for first, *_ in found)


def control_group_words(
    controller: str,
    version_1: str,
    version_2: str,
    groups: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> Iterator[list[str]]:
    """Yield the words of a limit's file for this process's control group and each group above it.
    `version_1` and `version_2`: the file's name in each version of control groups."""
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, name = (root / controller, version_1) if controllers else (root, version_2)
        group = top / path.lstrip("/")
        # in a container, the path may be that of the host, and only `top` exists
        for place in (top, group, *group.parents):
            if place.is_relative_to(top) and (place / name).is_file():
                yield (place / name).read_text().split()


def need(module: str, extra: str) -> ModuleType:
    """Import and return a module that needs an optional package. Raises a ConfigError that names
    the extra of roadtrain to install if the package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        if not cause.name or cause.name.startswith("roadtrain"):
            raise
        hint = f"pip install 'roadtrain[{extra}]'"
        raise ConfigError(f"{cause.name} is not installed", hint=hint) from cause


def free_memory() -> int:
    """Return the bytes of memory that this process may still use: what is available on this host,
    within the limit of its control group."""
    limit, used = control_group_limit(), psutil.Process().memory_info().rss
    free: int = psutil.virtual_memory().available
    return free if limit is None else max(0, min(free, limit - used))
