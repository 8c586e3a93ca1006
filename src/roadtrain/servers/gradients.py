"""The gradients that workers pushed for one server's chunks, until the update, and the update of a
record with them. A gradient is kept in the memory where it arrived, copied, or written to the spill
file.

Only one thread at a time may work on a chunk. The caller must not add gradients of the next step
before the gradients of this step are taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from roadtrain.chunks import ITEMSIZE, PAGE, Chunk
from roadtrain.device.buffers import Buffer, array_in
from roadtrain.device.pool import BufferPool
from roadtrain.kernels.cast import cast, cast_in_place
from roadtrain.kernels.rule import Rule
from roadtrain.kernels.sum import accumulate, sum_in_order, sums_of_squares
from roadtrain.kernels.topk import scatter
from roadtrain.servers.protocol import messages
from roadtrain.storage.convert import MASTER, RecordView
from roadtrain.storage.file import FileTier
from roadtrain.units import round_up

Held = Mapping[int, Any]  # worker -> its gradient (see PushedGradients._held)
Gradients = Iterable[tuple[np.ndarray, str]]  # (values, dtype)


class PushedGradients:
    """The gradients of one server's chunks.

    They are summed in fp32, first over the workers of each host, then over the hosts (Rule 1).
    If a worker pushes several gradients of a chunk, these are summed in the chunk's dtype, even if
    the gradients were sent in a smaller dtype.

    Args:
        chunks: The server's chunks by number.
        tier: The files of the server, among them the spill file. None if there are no files.
        buffers: Number of scratch buffers. Each sum, spilled gradient and expanded sparse gradient
            takes a buffer.
        scratch_bytes: Size of a scratch buffer.
        workers: Number of workers, or of relays if workers push through relays.
        local: Number of workers per host. Negative if relays push the fp32 sum of each host.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        tier: FileTier | None,
        buffers: int,
        scratch_bytes: int,
        workers: int,
        local: int = 1,
    ) -> None:
        self.chunks, self.tier, self.alone, self.local = chunks, tier, workers == local == 1, local
        self._per_host = local if local > 1 else workers  # workers whose sum is computed first
        self._at_once = 2 + (1 < local < workers)  # scratch buffers needed for one sum
        self.scratch = BufferPool(max(self._at_once, buffers), scratch_bytes)
        # chunk -> worker -> the gradient that is held. It is (memory with room for the chunk's
        # dtype, dtype), or only the dtype if the gradient is in the spill file, or a list of
        # (indices, values) if the gradient is sparse.
        self._held: dict[int, dict[int, Any]] = {}
        # sums computed for the norm, cached for the update
        self._totals: dict[int, tuple[Buffer, np.ndarray]] = {}

    def hold(self, push: messages.Push) -> tuple[Any, bool]:
        """Add a pushed gradient to the earlier gradients of its worker.

        Returns a pair: the sum of squares of each segment of the worker's gradient, and whether
        `push.grad` stays in use.
        """
        chunk, held = self.chunks[push.chunk], self._held.setdefault(push.chunk, {})
        if not isinstance(push.grad, tuple):
            return self._hold_dense(chunk, held, push)
        if push.fresh:
            held[push.worker] = [push.grad]
            return push.sums, False
        held[push.worker].append(push.grad)
        scratch, dense, dtype = self._dense(chunk, held[push.worker], push.worker)
        # includes only the values that were sent, because the server does not know the others
        sums = sums_of_squares(dense, dtype, chunk.segments)
        self.done(scratch)
        return sums, False

    def spill(self, push: messages.Push, spill_slot: int) -> int:
        assert self.tier is not None
        self.tier.spill_write(push.chunk, push.sent, spill_slot)
        return len(push.sent)

    def _hold_dense(
        self, chunk: Chunk, held: dict[int, Any], push: messages.Push
    ) -> tuple[Any, bool]:
        own = "fp32" if self.local < 0 else chunk.dtype
        from_spill, memory, dtype = None, push.grad, push.dtype or own
        if push.spill_slot is not None:
            from_spill = self._spilled(chunk, push.spill_slot, dtype)
            memory = from_spill.view
        grad = array_in(memory, dtype, 0, chunk.numel)
        before = None if push.fresh else held.get(push.worker)
        scratch, kept, spilled = None, False, False
        if before is not None:
            scratch, total, of_total = self._dense(chunk, before, push.worker)
            memory = before[0] if scratch is None else scratch.view
            if of_total != own:
                total = cast_in_place(memory, chunk.numel, of_total, own)
            _add(total, own, grad, dtype)
            grad, dtype, spilled = total, own, scratch is not None
            held[push.worker] = memory, own
        elif push.keep:
            held[push.worker], kept = (memory, dtype), True
        elif self.tier is None:
            held[push.worker] = np.frombuffer(memory, np.uint8).copy().data, dtype
        else:
            spilled = True
        sums = sums_of_squares(grad, dtype, chunk.segments) if self.alone else None
        if spilled:
            assert self.tier is not None
            self.tier.spill_write(chunk.id, grad.view(np.uint8).data, push.worker)
            held[push.worker] = dtype
        self.done(scratch)
        self.done(from_spill)
        return sums, kept

    def holds(self, number: int) -> bool:
        return bool(self._held.get(number))

    def total_sums(self, number: int) -> Any:
        """Sum the gradients of all workers, and return the sum of squares of each segment."""
        chunk = self.chunks[number]
        scratch, total, dtype = self._total(chunk, self._held.get(number, {}))
        sums = sums_of_squares(total, dtype, chunk.segments)
        if scratch is not None and self.scratch.spare >= self._at_once:
            self._totals[number] = (scratch, total)
        else:
            self.done(scratch)
        return sums

    def take(self, number: int) -> tuple[Buffer | None, np.ndarray, str]:
        """Remove and return the gradient of a chunk, summed over all workers.

        Returns (scratch buffer or None, values, dtype). Pass the buffer to `done` after use.
        """
        held = self._held.pop(number)
        if number in self._totals:
            return *self._totals.pop(number), "fp32"
        return self._total(self.chunks[number], held)

    def done(self, scratch: Buffer | None) -> None:
        if scratch is not None:
            self.scratch.put(scratch)

    def discard(self, number: int, worker: int | None) -> None:
        held = self._held.get(number, {})
        if number in self._totals:
            self.done(self._totals.pop(number)[0])
        for sender in [*held] if worker is None else [worker]:
            held.pop(sender, None)

    def close(self) -> None:
        self._held.clear()
        for buffer in self.scratch.buffers:
            buffer.close()

    def _total(self, chunk: Chunk, held: Held) -> tuple[Buffer | None, np.ndarray, str]:
        if self.alone:
            worker, part = next(iter(held.items()))
            return self._dense(chunk, part, worker)
        scratch = self.scratch.get()
        total = array_in(scratch.view, "fp32", 0, chunk.numel)
        sum_in_order(total, self._of_hosts(chunk, held, total))
        return scratch, total, "fp32"

    def _of_hosts(self, chunk: Chunk, held: Held, total: np.ndarray) -> Gradients:
        """Yield the sum of the gradients of each host's workers. The first host's sum is computed
        in `total`.
        """
        hosts = itertools.groupby(sorted(held), lambda worker: worker // self._per_host)
        for i, (_, workers) in enumerate(hosts):
            scratch = self.scratch.get() if i else None
            into = total if scratch is None else array_in(scratch.view, "fp32", 0, chunk.numel)
            sum_in_order(into, self._of_workers(chunk, {w: held[w] for w in workers}))
            yield into, "fp32"
            self.done(scratch)

    def _of_workers(self, chunk: Chunk, held: Held) -> Gradients:
        """Return the workers' gradients: a list if all are in memory, otherwise an iterator that
        loads them.
        """
        if all(isinstance(part, tuple) for part in held.values()):
            return [*self._one_by_one(chunk, held)]
        return self._one_by_one(chunk, held)

    def _one_by_one(self, chunk: Chunk, held: Held) -> Gradients:
        for worker, part in held.items():
            scratch, dense, dtype = self._dense(chunk, part, worker)
            yield dense, dtype
            self.done(scratch)

    def _dense(self, chunk: Chunk, part: Any, worker: int) -> tuple[Buffer | None, np.ndarray, str]:
        """Return a worker's gradient as (scratch buffer, values, dtype).

        The buffer is None, unless it contains the values of a spilled or sparse gradient.
        """
        if isinstance(part, tuple):
            memory, dtype = part
            return None, array_in(memory, dtype, 0, chunk.numel), dtype
        if isinstance(part, str):
            scratch = self._spilled(chunk, worker, part)
            return scratch, array_in(scratch.view, part, 0, chunk.numel), part
        scratch = self.scratch.get()
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
        return scratch, dense, "fp32"

    def _spilled(self, chunk: Chunk, spill_slot: int, dtype: str) -> Buffer:
        assert self.tier is not None
        scratch = self.scratch.get()
        self.tier.spill_read(
            chunk.id, scratch.view[: round_up(chunk.numel * ITEMSIZE[dtype], PAGE)], spill_slot
        )
        return scratch


def _add(acc: np.ndarray, dtype: str, grad: np.ndarray, of_grad: str) -> None:
    """Add `grad` to `acc`, rounded to the dtype of `acc`, like sums in `p.grad` in torch."""
    if dtype == "fp32":
        accumulate(acc, grad, of_grad)
        return
    wide = np.empty(acc.size, np.float32)
    cast(acc, dtype, wide, "fp32")
    accumulate(wide, grad, of_grad)
    cast(wide, "fp32", acc, dtype)


def apply_rule(
    rule: Rule,
    record: RecordView,
    public: memoryview | None,
    grad: np.ndarray,
    dtype: str,
    apply_update: messages.ApplyUpdate,
) -> None:
    """Apply `rule` to every span of `record` that has a gradient. Padding between spans may change.
    If `public` is not None, the 16-bit copy of the new values is written to it.
    """
    chunk, rows, n = record.chunk, record.rows, record.chunk.numel
    p, arrays = record.array(MASTER), [record.array(what) for what in rule.arrays]
    copy = None if public is None else array_in(public, chunk.dtype, 0, n)
    first = 0
    while first < len(chunk.spans):
        last = first + 1
        while (
            last < len(chunk.spans)
            and apply_update.scales[last] == apply_update.scales[first]
            and np.array_equal(rows[last], rows[first])
        ):
            last += 1
        scale = apply_update.scales[first]
        start = 0 if first == 0 else chunk.spans[first].start
        stop = n if last == len(chunk.spans) else chunk.spans[last].start
        cut = slice(start, stop)
        if scale is not None:
            row = rows[first].copy()
            rule.apply(
                p[cut],
                grad[cut],
                dtype,
                [a[cut] for a in arrays],
                row,
                apply_update.hyper,
                scale,
                None if copy is None else copy[cut],
                chunk.dtype,
            )
            rows[first:last] = row
        elif copy is not None:
            cast(p[cut], "fp32", copy[cut], chunk.dtype)
        first = last
