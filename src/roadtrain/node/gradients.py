"""Gradients: what workers pushed for one server's chunks, until the update takes it.

A push is kept where it lies, copied, written to the spill file, or (top-k) a list of indices and values. With several
workers the sum is taken when it is asked for, into fp32 (Rule 1: hosts in order, the workers inside a host in order
first): for the norm, and for the update.

Assumes: one thread at a time for one chunk. Does NOT know steps or who waits.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roadtrain.flow import ops
from roadtrain.kernels.cast import NUMPY_OF, cast
from roadtrain.kernels.sum import accumulate, sum_k, sum_squares
from roadtrain.kernels.topk import scatter
from roadtrain.spec.chunks import ITEMSIZE, PAGE, Chunk
from roadtrain.store.buffers import Buffer, array_in
from roadtrain.store.file import FileTier
from roadtrain.units import round_up

SPILLED = "spilled"


class Gradients:
    """`scratch`: buffers of `scratch_bytes`, at least two; a sum, a spilled gradient and an expanded one take one.
    `local`: workers of a host; negative where each push is the fp32 sum of one."""

    def __init__(
        self, chunks: Mapping[int, Chunk], tier: FileTier | None, buffers: int, scratch_bytes: int, workers: int,
        local: int = 1,
    ) -> None:
        self.chunks, self.tier, self.alone, self.local = chunks, tier, workers == local == 1, local
        self.scratch = [Buffer(max(scratch_bytes, PAGE)) for _ in range(max(2 + (1 < local < workers), buffers))]
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for buffer in self.scratch:
            self._free.put(buffer)
        self._held: dict[int, dict[int, Any]] = {}  # chunk -> worker -> ndarray | SPILLED | [(indices, values)...]
        self._totals: dict[int, tuple[Buffer, np.ndarray]] = {}  # sums that were just taken, kept for the update

    def hold(self, push: ops.Push) -> tuple[Any, bool]:
        """(sums of squares of the worker's gradient so far, a segment each; whether the pushed memory is in use)."""
        chunk, held = self.chunks[push.chunk], self._held.setdefault(push.chunk, {})
        if isinstance(push.grad, tuple):
            if push.fresh:
                held[push.worker] = []
            held[push.worker].append(push.grad)
            sums = push.sums
            if not push.fresh:  # of the sum of what was sent: what was left out of several passes is unknown here
                scratch, dense = self._dense(chunk, held[push.worker])
                sums = self._sums(chunk, dense, "fp32")
                self._free.put(scratch)
            return sums, False
        return self._hold_dense(chunk, held, push)

    def _hold_dense(self, chunk: Chunk, held: dict[int, Any], push: ops.Push) -> tuple[Any, bool]:
        dtype = self._dtype(chunk)
        grad = np.frombuffer(push.grad, NUMPY_OF[dtype], chunk.numel)
        before, spilled = held.get(push.worker), False
        scratch, kept = None, False
        if not push.fresh and before is not None:
            if isinstance(before, str):
                scratch, before = self._dense(chunk, before, push.worker)
                spilled = True
            _add(before, grad, dtype)
            grad = before
        elif push.keep:
            held[push.worker], kept = grad, True
        elif self.tier is None:
            held[push.worker] = grad.copy()
        else:
            spilled = True
        sums = self._sums(chunk, grad, dtype) if self.alone else None
        if spilled:
            assert self.tier is not None
            self.tier.spill_write(chunk.id, grad.view(np.uint8).data, push.worker)
            held[push.worker] = SPILLED
        if scratch is not None:
            self._free.put(scratch)
        return sums, kept

    def holds(self, number: int) -> bool:
        return bool(self._held.get(number))

    def total_sums(self, number: int) -> Any:
        """Sums of squares of the sum over workers; the sum itself stays where there is room, for `take`."""
        chunk = self.chunks[number]
        scratch, total, dtype = self._total(chunk, self._held.get(number, {}))
        sums = self._sums(chunk, total, dtype)
        if scratch is not None and self._free.qsize() >= 2:
            self._totals[number] = (scratch, total)
        else:
            self.done(scratch)
        return sums

    def take(self, number: int) -> tuple[Buffer | None, np.ndarray, str]:
        """The gradient to update with and its dtype; it is forgotten here. Give the buffer back by `done`."""
        held = self._held.pop(number)
        if number in self._totals:
            return *self._totals.pop(number), "fp32"
        return self._total(self.chunks[number], held)

    def done(self, scratch: Buffer | None) -> None:
        if scratch is not None:
            self._free.put(scratch)

    def discard(self, number: int, worker: int | None) -> None:
        held = self._held.get(number, {})
        if number in self._totals:
            self.done(self._totals.pop(number)[0])
        for one in [*held] if worker is None else [worker]:
            held.pop(one, None)

    def close(self) -> None:
        self._held.clear()
        for buffer in self.scratch:
            buffer.close()

    def _dtype(self, chunk: Chunk) -> str:
        return "fp32" if self.local < 0 else chunk.dtype

    def _sums(self, chunk: Chunk, grad: np.ndarray, dtype: str) -> np.ndarray:
        return np.array([sum_squares(grad[a:b], dtype) for _, a, b in chunk.segments])

    def _total(self, chunk: Chunk, held: Mapping[int, Any]) -> tuple[Buffer | None, np.ndarray, str]:
        parts = [(worker, held[worker]) for worker in sorted(held)]
        if self.alone:
            worker, one = parts[0]
            if isinstance(one, np.ndarray):
                return None, one, chunk.dtype
            scratch, dense = self._dense(chunk, one, worker)
            return scratch, dense, "fp32" if dense.dtype == np.float32 else chunk.dtype
        scratch = self._free.get()
        total = array_in(scratch.view, "fp32", 0, chunk.numel)
        hosts = [list(host) for _, host in itertools.groupby(parts, lambda part: part[0] // max(self.local, 1))]
        if self.local <= 1 or len(hosts) < 2:
            self._add_up(chunk, total, parts)
            return scratch, total, "fp32"
        self._add_up(chunk, total, hosts[0])
        other = self._free.get()
        wide = array_in(other.view, "fp32", 0, chunk.numel)
        for host in hosts[1:]:
            self._add_up(chunk, wide, host)
            accumulate(total, wide, "fp32")
        self._free.put(other)
        return scratch, total, "fp32"

    def _add_up(self, chunk: Chunk, total: np.ndarray, parts: Sequence[tuple[int, Any]]) -> None:
        """total = the sum of `parts`, left to right in fp32."""
        dtype = self._dtype(chunk)
        if parts and all(isinstance(part, np.ndarray) for _, part in parts):
            sum_k(total, [part for _, part in parts], dtype)
            return
        total[:] = -0.0 if parts else 0.0  # -0.0 + x is x, for every x
        for worker, part in parts:
            if isinstance(part, np.ndarray):
                accumulate(total, part, dtype)
            else:
                other, dense = self._dense(chunk, part, worker)
                accumulate(total, dense, "fp32" if dense.dtype == np.float32 else dtype)
                self._free.put(other)

    def _dense(self, chunk: Chunk, part: Any, worker: int = 0) -> tuple[Buffer, np.ndarray]:
        """What is spilled or compressed, whole, in a scratch buffer: the first in the chunk's dtype, else fp32."""
        scratch = self._free.get()
        if isinstance(part, str):
            assert self.tier is not None
            dtype = self._dtype(chunk)
            self.tier.spill_read(chunk.id, scratch.view[: round_up(chunk.numel * ITEMSIZE[dtype], PAGE)], worker)
            return scratch, np.frombuffer(scratch.view, NUMPY_OF[dtype], chunk.numel)
        dense = array_in(scratch.view, "fp32", 0, chunk.numel)
        for i, (indices, values) in enumerate(part):
            wide = values
            if values.dtype != np.float32:
                wide = np.empty(values.size, np.float32)
                cast(values, chunk.dtype, wide, "fp32")
            if i == 0:
                scatter(indices, wide, dense)
            else:
                dense[indices] += wide
        return scratch, dense


def _add(acc: np.ndarray, grad: np.ndarray, dtype: str) -> None:
    """acc += grad in their own dtype, rounded to nearest even, as torch accumulates p.grad."""
    if dtype == "fp32":
        accumulate(acc, grad, "fp32")
        return
    wide = np.empty(acc.size, np.float32)
    cast(acc, dtype, wide, "fp32")
    accumulate(wide, grad, dtype)
    cast(wide, "fp32", acc, dtype)
