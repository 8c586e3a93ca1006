"""PlanFile: all of a plan.toml: how to train (`Plan`), on which machines (`Machines`), what the
planner promised (`Predicted`), and the cluster and the model that it was planned for.

The plan's keys stand at the top of the file, the rest in tables of their own. Does NOT know a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.machines import Machines, PlannedModel, Predicted
from roadtrain.config.plan import OTHER_TABLES, Plan, make_plan
from roadtrain.options.schema import as_tree, checked, read_toml


@dataclass(frozen=True)
class PlanFile:
    """`machines`: None for a plan that is simulated only."""

    plan: Plan
    machines: Machines | None = None
    predicted: Predicted | None = None
    cluster: Cluster | None = None
    model: PlannedModel | None = None

    def to_toml(self) -> str:
        """The file that this is read from."""
        tree = as_tree(self.plan)
        for name in ("machines", "predicted", "model"):
            if (table := getattr(self, name)) is not None:
                tree[name] = as_tree(table, exclude_defaults=True)
        if self.cluster is not None:
            # with what was filled in, and no more: so that `assumed` stays what it is
            tree["cluster"] = as_tree(self.cluster, exclude_unset=True, by_alias=True)
        return tomli_w.dumps(tree)


def make_plan_file(tree: Mapping[str, Any], where: str = "plan") -> PlanFile:
    """Raises ConfigError naming the key."""
    words = {key: given for key, given in tree.items() if key not in OTHER_TABLES}
    machines, predicted, cluster, model = (tree.get(name) for name in OTHER_TABLES)
    return PlanFile(
        make_plan(words, where),
        None if machines is None else checked(Machines, machines, f"{where}, [machines]"),
        None if predicted is None else checked(Predicted, predicted, f"{where}, [predicted]"),
        None if cluster is None else make_cluster(cluster, f"{where}, [cluster]"),
        None if model is None else checked(PlannedModel, model, f"{where}, [model]"),
    )


def load_plan_file(path: str | Path) -> PlanFile:
    """Raises ConfigError."""
    return make_plan_file(read_toml(path, "plan"), where=str(path))
