"""`python -m roadtrain.launch.pod WORDS...`: the entry point of a worker in a Kubernetes pod. The
workers that start together agree on a start id. Then each process executes `roadtrain WORDS...`.

Kubernetes restarts the pods of a run one by one and has no common counter of restarts. So rank 0
writes a random start id to the TCPStore of its torchrun, and each rank reads the id once. A rank
that was restarted without rank 0 exits, and is restarted again, until rank 0 is restarted too.
"""

from __future__ import annotations

import os
import secrets
import sys
from datetime import timedelta

import torch.distributed as dist

from roadtrain.environment import launch_of
from roadtrain.errors import LostError, RoadtrainError

WAIT_S = 120.0  # timeout for rank 0 to write the id after its torchrun has started


def agreed_start(store: dist.Store, rank: int, wait_s: float = WAIT_S) -> str:
    """Return the start id: a text that is the same on all ranks and new whenever rank 0 restarts.
    Raises LostError if this rank was restarted without rank 0, or if rank 0 is not up within
    `wait_s` seconds."""
    times = store.add(f"roadtrain/came/{rank}", 1)
    if times > 1:
        raise LostError(
            f"worker {rank} was restarted, but worker 0 was not, so worker {rank} cannot join",
            hint="no action is needed: Kubernetes restarts this pod until worker 0's pod restarts",
        )
    if rank == 0:
        store.set("roadtrain/start", secrets.token_hex(8))
    try:
        return store.get("roadtrain/start").decode()
    except RuntimeError as error:
        raise LostError(
            f"worker {rank} waited {wait_s:.0f} s for worker 0 to start",
            hint="check that worker 0's pod and its node are running",
        ) from error


def main(words: list[str]) -> None:
    try:
        launch = launch_of(os.environ)
        waits = timedelta(seconds=WAIT_S)
        store = dist.TCPStore(
            launch.address, launch.port, is_master=False, timeout=waits, wait_for_workers=False
        )
        start = agreed_start(store, launch.rank)
    except RoadtrainError as error:
        print(f"roadtrain: {error}", file=sys.stderr)
        sys.exit(1)
    os.environ["TORCHELASTIC_RUN_ID"] += f":{start}"
    os.execv(sys.executable, [sys.executable, "-m", "roadtrain.cli", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
