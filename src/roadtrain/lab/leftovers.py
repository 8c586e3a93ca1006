"""Removal of the directories, networks and control groups that labs of dead processes have left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from roadtrain.lab.control_groups import hierarchy, undo_group
from roadtrain.lab.network import undo_network
from roadtrain.lab.resource import folders
from roadtrain.lab.storage import undo_loop

UNDO: dict[str, Callable[[Path], None]] = {
    "loop": undo_loop,
    "net": undo_network,
    "up": shutil.rmtree,
}
CONTROLLERS = ("blkio", "cpu")


def sweep() -> list[str]:
    """Remove everything that labs of dead processes have left. Return the paths of the removed
    directories and control groups, for printing."""
    homes = [(path, kind) for path, kind, _, alive in folders() if not alive]
    roots = {root for name in CONTROLLERS if (root := hierarchy(name))}
    groups = [path for root in roots for path, _, _, alive in folders(root) if not alive]
    # networks are removed first, since processes on their hosts keep storage busy
    for path, kind in sorted(homes, key=lambda home: home[1] != "net"):
        UNDO[kind](path)
    for group in groups:
        undo_group(group, group.parent)
    return [str(path) for path in [home for home, _ in homes] + groups]
