"""Start torch's process group over gloo, for peers that sum by it."""

from __future__ import annotations

import os
from datetime import timedelta

from torch import distributed

TIMEOUT = timedelta(seconds=300)


def start_gloo(
    rank: int, world: int, master: str, port: int = 29511, interface: str = "eth0"
) -> None:
    """Join the processes of a run, which communicate over one network interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{master}:{port}",
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
    )
