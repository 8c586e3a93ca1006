"""HostSums: sums in two levels. First the workers of a host sum their tensors. Then the hosts add
up the sums of all hosts.

    worker -> near: the host's own reducers -> above: reducers of all hosts -> near -> worker

worker_places.py decides which of the two levels are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b

from roadtrain.device.buffers import Buffer
from roadtrain.sums.agreement import Agreement
from roadtrain.sums.worker_sums import WorkerSums


class CrossHostSums:
    """Adds this host's sums to the sums of other hosts. The host's reducer calls this object with
    each sum of the host.

    Attributes:
        how: Maps the key of each tensor to the (priority, format) of the tensor's sum between
            hosts. The entry of a tensor is set before the tensor is pushed.
    """

    def __init__(self, sums: WorkerSums) -> None:
        self._sums, self.how = sums, dict[int, tuple[int, str]]()
        self._outs: dict[tuple[int, int], Buffer] = {}
        self._lock = threading.Lock()  # so that no sum begins during `give_up`

    def __call__(
        self,
        where: tuple[int, int],
        dtype: str,
        total: memoryview,
        answer: Callable[[memoryview], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        with self._lock:
            if where[0] not in self.how:
                return  # the sum was abandoned
            priority, format = self.how[where[0]]
            out = self._outs.get(where)
            if out is None or out.nbytes < len(total):
                out = self._outs[where] = Buffer(len(total))
            view = out.view[: len(total)]

            def done() -> None:
                if self._sums.error is not None:
                    failed(self._sums.error)
                else:
                    answer(view)

            name = "{} {}".format(*where).encode()
            key = int.from_bytes(blake2b(name, digest_size=7).digest(), "little")
            self._sums.sum(key, total, view, dtype, done, priority=priority, format=format)

    def give_up(self) -> None:
        with self._lock:
            self.how.clear()
            self._outs.clear()
            self._sums.give_up()


@dataclass(frozen=True)
class HostSums:
    """The connection of one worker to the summation service, which sums the workers' tensors within
    the host, between hosts, or both."""

    near: WorkerSums  # sums this worker's tensors: inside the host, if there are two levels
    above: CrossHostSums | None  # sums with other hosts, if this worker does so in a second level
    agreement: Agreement
    ends: ExitStack  # closing it ends the summation
