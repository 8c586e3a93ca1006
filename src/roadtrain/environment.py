"""The place of this process among the ranks that torchrun started, read from the environment, and
the identity of the host that it runs on.

Reads only. Does NOT talk to the other processes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roadtrain.errors import ConfigError

LAUNCH_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The rank of this process, and the address of the rendezvous store of all ranks."""

    rank: int
    world_size: int
    address: str  # of the rendezvous store: a host name or an IP address
    port: int
    agent: bool  # whether torchrun's agent runs the store; otherwise rank 0 does
    attempt: str  # how many times this rank's agent has restarted it


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Read the variables that torchrun sets. Raises ConfigError if any of them is missing."""
    if missing := [name for name in LAUNCH_NAMES if not environ.get(name)]:
        raise ConfigError(
            f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set",
            hint="start ranks with torchrun",
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
    """The rank of this worker, and the size of its group.

    Attributes:
        session: A string that all workers of one start share; every restart has another one.
        local: Workers on each host; 1 if the hosts have different numbers of workers.
    """

    rank: int = 0
    workers: int = 1
    session: str = ""
    local: int = 1

    @staticmethod
    def of_environment(environ: Mapping[str, str] = os.environ) -> WorkerIdentity:
        """Read it from torchrun's variables; without them this process is the only worker.
        Raises ConfigError if they contradict each other."""
        (rank, workers), (_, local) = _rank_of(environ), local_rank_of(environ)
        hosts = _number(environ, "GROUP_WORLD_SIZE", workers // max(local, 1))
        parts = [environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT")]
        alone = uuid.uuid4().hex if workers == 1 else ""  # other lone workers have another session
        session = ":".join([*parts, environ.get("MASTER_PORT", ""), alone])
        return WorkerIdentity(rank, workers, session, local if local * hosts == workers else 1)

    def of_stage(self, stage: int, replica: int, width: int) -> WorkerIdentity:
        """Return the identity of replica `replica` of pipeline stage `stage`, which has `width`
        replicas. `self` is the identity among all processes of the pipeline; the replicas of a
        stage have their servers to themselves."""
        alone = uuid.uuid4().hex if width == 1 else ""
        return WorkerIdentity(replica, width, f"{self.session}:stage {stage}:{alone}")


def local_rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank of this process on its host, and the number of ranks there."""
    return _number(environ, "LOCAL_RANK", 0), _number(environ, "LOCAL_WORLD_SIZE", 1)


def _rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    rank, workers = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    if not 0 <= rank < workers:
        raise ConfigError(
            f"RANK is {rank} and WORLD_SIZE {workers}",
            hint="start the workers with torchrun; ranks begin with 0",
        )
    return rank, workers


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    try:
        return int(environ.get(name, default))
    except ValueError as error:
        raise ConfigError(f"{name} is not an integer: {error}") from error


def host_identity() -> str:
    """Return a string that is equal for processes which share this host's memory and network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
