"""RunHome: the directory in which a launched run is found by its name: ~/.roadtrain/runs/NAME.

launch.json   what was launched: engine, plan, job, when; how its supervisor is reached
plan.toml job.toml token (mode 600)
state.json    of the supervisor: each process, its host, state, restarts, since when
all.log       every line of every process, with its role and host
log/PROCESS.log
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunHome:
    path: Path

    @staticmethod
    def of(name: str) -> RunHome:
        """Raises ConfigError for a name that cannot be a file's."""
        raise NotImplementedError
