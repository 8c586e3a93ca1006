"""PlanFile: all of a plan.toml: how to train (`Plan`), on which machines (`Machines`), what the
planner promised (`Predicted`), and the cluster that it was planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roadtrain.config.cluster import Cluster
from roadtrain.config.machines import Machines, Predicted
from roadtrain.config.names import Report
from roadtrain.config.plan import Plan
from roadtrain.config.schema import read_toml

PARTS = ("machines", "predicted", "cluster")


@dataclass(frozen=True)
class PlanFile:
    """`machines`: None for a plan that is simulated only."""

    plan: Plan
    machines: Machines | None = None
    predicted: Predicted | None = None
    cluster: Cluster | None = None

    def to_toml(self) -> str:
        raise NotImplementedError


def make_plan_file(
    tree: Mapping[str, Any], report: Report = print, where: str = "plan"
) -> PlanFile:
    """Raises ConfigError naming the key."""
    raise NotImplementedError


def load_plan_file(path: str | Path) -> PlanFile:
    """Raises ConfigError."""
    return make_plan_file(read_toml(path, "plan"), where=str(path))
