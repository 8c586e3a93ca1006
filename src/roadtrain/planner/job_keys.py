"""job_keys(): what a job must say so that it trains as a plan says, on the plan's machines.

A nested table of a job's keys. Only what the plan needs: what a job states besides (clipping,
dtype, learning rate) stays the job's. Does NOT read a job, nor say which of two contradicting
values wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roadtrain.config.plan_file import PlanFile


def job_keys(plan_file: PlanFile, addresses: Mapping[str, str]) -> dict[str, Any]:
    """addresses: of each host, by its name in the plan. Raises ConfigError for a plan without
    machines, and for one that nothing runs."""
    raise NotImplementedError
