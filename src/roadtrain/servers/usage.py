"""The bytes in use beside their budgets, in the words of the "memory" of a line of metrics.jsonl.

Cheap enough for every step: no directory is listed, and the control group is read once.
"""

from __future__ import annotations

import functools
import mmap
import resource
from collections.abc import Iterable
from pathlib import Path

from roadtrain.storage.direct import free_nbytes
from roadtrain.storage.file import FileTier

Usage = dict[str, int | None]  # "bytes" in use; "budget", None if there is no limit
UNLIMITED = 1 << 60  # version 1 of control groups has numbers above this for "no limit"


def process_usage() -> Usage:
    """Return the resident memory of this process and the smallest limit that applies to it."""
    limits = (resource.getrlimit(resource.RLIMIT_DATA)[0], control_group_limit())
    return {"bytes": resident_nbytes(), "budget": smallest(limits)}


def disk_usage(tiers: Iterable[FileTier]) -> Usage:
    """Return the bytes that stores occupy; the budget adds the free space of their file systems."""
    used, free = 0, dict[int, int]()
    for tier in tiers:
        used += tier.disk_nbytes
        free[tier.directory.stat().st_dev] = free_nbytes(tier.directory)
    return {"bytes": used, "budget": used + sum(free.values())}


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE


def smallest(limits: Iterable[int | None]) -> int | None:
    return min((n for n in limits if n is not None and 0 <= n < UNLIMITED), default=None)


@functools.cache
def control_group_limit(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the smallest memory limit in bytes among this process's control group (version 1 or 2)
    and the groups above it; None if there is no limit."""
    limits = []
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = root / "memory", "memory.limit_in_bytes"
        if not controllers:
            top, name = root, "memory.max"
        group = top / path.lstrip("/")
        # in a container, the path may be that of the host, and only `top` exists
        for place in (top, group, *group.parents):
            if place.is_relative_to(top) and (place / name).is_file():
                text = (place / name).read_text().strip()
                limits.append(int(text) if text.isdecimal() else None)
    return smallest(limits)
