"""Sums of a worker that begin together, and a wait until all have ended."""

from __future__ import annotations

import threading
from typing import Any

from roadtrain.sums.worker_sums import WorkerSums

WAIT_S = 600.0


class PendingSums:
    def __init__(self, sums: WorkerSums) -> None:
        self.sums, self.ended = sums, list[threading.Event]()

    def sum(self, key: int, grad: memoryview, out: memoryview, dtype: str, **how: Any) -> None:
        """Begin a sum. `how`: further arguments of WorkerSums.sum."""
        self.ended.append(threading.Event())
        self.sums.sum(key, grad, out, dtype, self.ended[-1].set, **how)

    def wait(self) -> None:
        """Wait until all sums have ended. Raises the error of the first failed sum."""
        for event in self.ended:
            assert event.wait(WAIT_S)
        self.ended.clear()
        if self.sums.error is not None:
            raise self.sums.error
