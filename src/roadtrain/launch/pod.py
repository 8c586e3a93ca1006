"""`python -m roadtrain.launch.pod WORDS...`: what a worker does first in a pod. They agree on
the name of their start, then each is `roadtrain WORDS...` (write_kubernetes.py).

Kubernetes starts the pods of a run again one by one, and nobody counts for all. So a start is one
life of the store that rank 0's torchrun keeps: rank 0 draws its name, each rank reads it once. A
rank that comes to a store a second time has been started again while rank 0 has not: that start
is over, and the rank ends, to be started again. Does NOT wait longer than WAIT_S.
"""

from __future__ import annotations

import os
import secrets
import sys
from datetime import timedelta

import torch.distributed as dist

from roadtrain.environment import launch_of
from roadtrain.errors import LostError, RoadtrainError

WAIT_S = 120.0  # for rank 0's word, from when its torchrun is there on


def agreed_start(store: dist.Store, rank: int, wait_s: float = WAIT_S) -> str:
    """The same for all ranks of a start, another for each. Raises LostError where it is over, or
    rank 0 does not say it in time."""
    times = store.add(f"roadtrain/came/{rank}", 1)
    if times > 1:
        raise LostError(
            f"worker {rank} came {times} times to one start of the workers, which is over",
            hint="nothing: its pod is started again, until worker 0's is too",
        )
    if rank == 0:
        store.set("roadtrain/start", secrets.token_hex(8))
    try:
        return store.get("roadtrain/start").decode()
    except RuntimeError as error:
        raise LostError(
            f"worker {rank} waited {wait_s:.0f} s for worker 0 to name the start of the workers",
            hint="do worker 0's pod and its node run?",
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
