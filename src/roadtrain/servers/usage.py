"""The bytes in use beside their budgets, in the words of the "memory" of a line of metrics.jsonl.

Cheap enough for every step: no directory is listed, and the control group is read once.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable

import psutil

from roadtrain.environment import control_group_limit, smallest
from roadtrain.storage.direct import free_nbytes
from roadtrain.storage.file import FileTier

Usage = dict[str, int | None]  # "bytes" in use; "budget", None if there is no limit


def process_usage() -> Usage:
    """Return the resident memory of this process and the smallest limit that applies to it."""
    limits = (resource.getrlimit(resource.RLIMIT_DATA)[0], control_group_limit())
    return {"bytes": psutil.Process().memory_info().rss, "budget": smallest(limits)}


def disk_usage(tiers: Iterable[FileTier]) -> Usage:
    """Return the bytes that stores occupy; the budget adds the free space of their file systems."""
    used, free = 0, dict[int, int]()
    for tier in tiers:
        used += tier.disk_nbytes
        free[tier.directory.stat().st_dev] = free_nbytes(tier.directory)
    return {"bytes": used, "budget": used + sum(free.values())}
