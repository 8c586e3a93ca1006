"""Where this process runs: its place among those that torchrun has started, as the environment
says it, and the host that it shares with others.

Reads only. Does NOT meet the other processes.
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
    """The place of a rank, and the store at which all ranks meet."""

    rank: int
    world_size: int
    address: str  # of the store: a name or an address
    port: int
    agent: bool  # whether torchrun's agent has the store; else rank 0 does
    attempt: str  # how often this rank's agent has started it before


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Raises ConfigError where torchrun (or another program that starts ranks as it does) has not
    set the environment."""
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
class WorkerGroup:
    """Which worker this is. `session`: the same for all workers of one start, another after each
    restart. `local`: how many workers this host has, and each other; 1 where they have different
    numbers."""

    rank: int = 0
    workers: int = 1
    session: str = ""
    local: int = 1

    @staticmethod
    def of_environment(environ: Mapping[str, str] = os.environ) -> WorkerGroup:
        """A process that no torchrun has started is the only worker. Raises ConfigError."""
        (rank, workers), (_, local) = _rank_of(environ), local_rank_of(environ)
        hosts = _number(environ, "GROUP_WORLD_SIZE", workers // max(local, 1))
        parts = [environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT")]
        alone = uuid.uuid4().hex if workers == 1 else ""
        session = ":".join([*parts, environ.get("MASTER_PORT", ""), alone])
        return WorkerGroup(rank, workers, session, local if local * hosts == workers else 1)

    def of_stage(self, stage: int, replica: int, width: int) -> WorkerGroup:
        """`self`: of all processes of a pipeline. Replica `replica` of the `width` that stage
        `stage` has, which are alone with their servers."""
        alone = uuid.uuid4().hex if width == 1 else ""
        return WorkerGroup(replica, width, f"{self.session}:stage {stage}:{alone}")


def local_rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """The number of this process on its host, and how many there are. Raises ConfigError."""
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
        raise ConfigError(f"{name} is no number: {error}") from error


def host_identity() -> str:
    """The same for processes that share this host's memory and its network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
