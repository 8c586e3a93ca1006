"""Which of a job's workers this process is, as torchrun says it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from roadtrain.errors import ConfigError


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
        """As torchrun says it. Raises ConfigError."""
        try:
            rank, workers = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
            local = int(environ.get("LOCAL_WORLD_SIZE", "1"))
            hosts = int(environ.get("GROUP_WORLD_SIZE", workers // max(local, 1)))
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE or LOCAL_WORLD_SIZE is no number: {error}"
            ) from error
        if not 0 <= rank < workers:
            raise ConfigError(
                f"RANK is {rank} and WORLD_SIZE {workers}", hint="start the workers with torchrun"
            )
        parts = [environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT")]
        alone = uuid.uuid4().hex if workers == 1 else ""
        session = ":".join([*parts, environ.get("MASTER_PORT", ""), alone])
        return WorkerGroup(rank, workers, session, local if local * hosts == workers else 1)

    def of_stage(self, stage: int, replica: int, width: int) -> WorkerGroup:
        """`self`: of all processes of a pipeline. Replica `replica` of the `width` that stage
        `stage` has, which are alone with their servers."""
        alone = uuid.uuid4().hex if width == 1 else ""
        return WorkerGroup(replica, width, f"{self.session}:stage {stage}:{alone}")
