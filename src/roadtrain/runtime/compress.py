"""Gradient compression on its way out: the largest k by magnitude, as indices and values
(Smart-Infinity's SmartComp).

`keep` is the fraction of elements kept; what is communicated counts indices too (keep 1 % of 4-byte
values = 2 %). With error feedback, what was not sent is remembered: the residual of block b is a
*twin* block that a server stores under the rule `replace`, so it is pulled, pushed, committed and
resumed like everything else (Rule 3).

Whole gradients of fp32 parameters may travel in 16 bits instead (`downcast`).

Assumes one dtype among the trainable runs of a block when `per_block`. Lossy: off by default (Rule
2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from roadtrain.chunks import ITEMSIZE, SEGMENT, Chunk, ChunkTable, ParamSpec
from roadtrain.device.buffers import array_in
from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import NUMPY_OF, cast
from roadtrain.kernels.rules import Rule
from roadtrain.kernels.sum import sum_squares
from roadtrain.kernels.topk import select_with_residual, top_k


class Replace(Rule):
    """The new value is what was pushed."""

    name = "replace"
    arrays: tuple[str, ...] = ()
    reads_state = False

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return ()

    def apply(
        self,
        p: Any,
        grad: Any,
        grad_dtype: str,
        arrays: Any,
        row: Any,
        hyper: Any,
        grad_scale: float,
        copy: Any,
        copy_dtype: str | None,
    ) -> None:
        p[:] = grad

    def reference(self, *args: Any) -> None:
        self.apply(*args)


def residual_blocks(table: ChunkTable, groups: int) -> list[tuple[str, list[ParamSpec]]]:
    """A block of fp32 residuals for every block that trains anything. Each trainable run becomes
    a run of the twin, with the same element offsets; group `groups + i` belongs to the i-th
    run."""
    out = []
    for block in table.blocks:
        specs = []
        for i, run in enumerate(r for r in block.runs if r.trainable):
            for span in run.spans:
                p = table.params[span.param]
                specs.append(ParamSpec(f"residual:{p.name}", p.shape, "fp32", True, groups + i))
        if specs:
            out.append((f"residual:{block.name}", specs))
    return out


class Compressor:
    """`twin`: block -> the block of its residuals, with error feedback."""

    def __init__(
        self, table: ChunkTable, keep: float, *, per_block: bool, error_feedback: bool
    ) -> None:
        if not 0 < keep < 1:
            raise ConfigError(f"top-k keeps a fraction between 0 and 1, not {keep}")
        self.keep, self.per_block = keep, per_block
        self.sent_bytes = 0
        names = {b.name: b.index for b in table.blocks if b.index}
        self.residual_block = (
            {
                b.index: names[f"residual:{b.name}"]
                for b in table.blocks
                if f"residual:{b.name}" in names
            }
            if error_feedback
            else {}
        )

    def compress(
        self, chunks: Sequence[Chunk], view: memoryview, residual: np.ndarray | None
    ) -> Iterator[tuple[Chunk, Any, Any]]:
        """(chunk, (indices, values), sums of squares before compression) of a block's trainable
        `chunks`. `residual`: fp32, with the same element offsets, changed in place."""
        for cut in [chunks] if self.per_block and chunks else [[c] for c in chunks]:
            yield from self._select(cut, view, residual)

    def _select(
        self, chunks: Sequence[Chunk], view: memoryview, residual: np.ndarray | None
    ) -> Iterator[tuple[Chunk, Any, Any]]:
        dtype = chunks[0].dtype
        if any(c.dtype != dtype for c in chunks):
            raise ConfigError(
                "top-k per block needs one dtype among a block's trainable parameters"
            )
        size = ITEMSIZE[dtype]
        first = chunks[0].push_offset // size
        n = chunks[-1].push_offset // size + chunks[-1].numel - first
        grad = np.frombuffer(view, NUMPY_OF[dtype], n, first * size)
        sums = [
            np.array([sum_squares(grad[at + a : at + b], dtype) for _, a, b in c.segments])
            for c in chunks
            for at in [c.push_offset // size - first]
        ]
        elements = sum(s.stop - s.start for c in chunks for s in c.spans)
        k = max(1, round(self.keep * elements))
        indices = np.empty(k, np.uint32)
        if residual is None:
            values: np.ndarray = np.empty(k, NUMPY_OF[dtype])
            top_k(grad, dtype, k, indices, values)
        else:
            values = np.empty(k, np.float32)
            select_with_residual(grad, dtype, residual[first : first + n], k, indices, values)
        self.sent_bytes += indices.nbytes + values.nbytes
        for chunk, of_chunk in zip(chunks, sums):
            at = chunk.push_offset // size - first
            a, b = np.searchsorted(indices, (at, at + chunk.numel))
            yield chunk, (indices[a:b] - np.uint32(at), values[a:b]), of_chunk


def downcast_in_place(chunks: Sequence[Chunk], view: memoryview, dtype: str) -> list[str]:
    """What the gradient of each of `chunks` travels as ("": as it is). With a `dtype`, fp32 ones
    become that: each lies in the first half of its place in the flat `view` then."""
    to = [dtype if chunk.dtype == "fp32" else "" for chunk in chunks]
    for chunk, new in zip(chunks, to):
        if new:
            recast(view[chunk.push_offset :], chunk.numel, "fp32", new)
    return to


def recast(view: memoryview, numel: int, old: str, new: str) -> np.ndarray:
    """The `numel` values at the start of `view`, which has room for both dtypes, in place;
    returns them. Piece by piece in the order in which none is overwritten before it was read."""
    src, dst = array_in(view, old, 0, numel), array_in(view, new, 0, numel)
    pieces = range(0, numel, SEGMENT)
    for at in pieces if ITEMSIZE[new] <= ITEMSIZE[old] else reversed(pieces):
        cast(src[at : at + SEGMENT].copy(), old, dst[at : at + SEGMENT], new)
    return dst
