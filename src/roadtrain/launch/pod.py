"""`python -m roadtrain.launch.pod WORDS...`: the entry point of a worker in a pod. All workers of a
start agree on an id for that start. Each worker's process then executes `roadtrain WORDS...`
(write_kubernetes.py).

Kubernetes restarts the pods of a run one by one, without a common counter. The start id is
therefore in the store of rank 0's torchrun: rank 0 writes a random id, and each rank reads the id
once. If a rank reads the same store a second time, the rank was restarted but rank 0 was not. The
start to which the store belongs is then over, so the rank exits. Kubernetes restarts the rank until
rank 0 is restarted too. Does NOT wait longer than WAIT_S.
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
    """Return the id of this start of the workers. The id is the same on all ranks and different for
    each start. Raises LostError if this start is over or rank 0 does not write the id in time."""
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
