"""Codecs: how the values of a gradient are written in fewer bytes, and what that loses. Those that
a sum's gradients travel in are a registry (sums/formats.py).

    gradient + residual -> encode -> (network) -> decode

With error feedback (Karimireddy et al. 2019) what one encoding loses is kept, and added to the next
gradient of the same elements (`encode_with_feedback`). A push to a server is a block's gradient,
compressed a chunk at a time or as one (`Compressor`, Smart-Infinity's SmartComp), or whole in 16
bits (`downcast_in_place`).

Flat arrays. Lossy: off by default (Rule 2). Does NOT know tensors, rounds or links, nor where
residuals rest (servers/residuals.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from roadtrain.chunks import ITEMSIZE, Chunk
from roadtrain.errors import ConfigError
from roadtrain.kernels.cast import NUMPY_OF, cast_in_place
from roadtrain.kernels.sum import accumulate, sums_of_squares
from roadtrain.kernels.topk import drop_not_finite, scatter, top_k
from roadtrain.options.lossy import TopK


class Codec:
    """One way to write n values, from NAME or NAME:ARGUMENT. A new one needs `nbytes`, `encode`
    and `decode`."""

    name = ""
    feedback = True

    def __init__(self, argument: str) -> None:
        """Raises ValueError for an argument it does not take."""
        if argument:
            raise ValueError("takes no argument")

    def nbytes(self, n: int) -> int:
        """Of n encoded values; not less for a larger n."""
        raise TypeError(f"the format {self.name} says no nbytes")

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        """values: float32 [n]. out: uint8 [nbytes(n)], all of it is sent. `seed`: other for
        every call."""
        raise TypeError(f"the format {self.name} has no encode")

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        """raw: uint8 [nbytes(n)], from the network: anything may stand in it, ValueError if it
        cannot be. out: float32 [n]."""
        raise TypeError(f"the format {self.name} has no decode")

    def take_out(self, raw: np.ndarray, residual: np.ndarray) -> None:
        """`residual` minus what `raw` says, in place: what this codec has not sent. A codec may
        do without memory for the decoded values."""
        sent = np.empty_like(residual)
        self.decode(raw, sent)
        with np.errstate(all="ignore"):
            residual -= sent


class TopKCodec(Codec):
    """topk:FRACTION: the largest by magnitude, as indices and values."""

    name = "topk"

    def __init__(self, argument: str | float, dtype: str = "fp32") -> None:
        """`dtype`: of the values that `encode` takes and writes."""
        self.keep, self.dtype = float(argument), dtype
        if not 0 < self.keep < 1:
            raise ValueError("keeps a fraction between 0 and 1")

    def nbytes(self, n: int) -> int:
        return min(n, max(1, round(self.keep * n))) * (4 + ITEMSIZE[self.dtype])

    def pairs(self, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The indices (uint32 [k]) and the values ([k]) that lie in `raw`."""
        k = raw.size // (4 + ITEMSIZE[self.dtype])
        return raw[: 4 * k].view(np.uint32), raw[4 * k :].view(NUMPY_OF[self.dtype])

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        indices, largest = self.pairs(out)
        top_k(values, self.dtype, indices.size, indices, largest)

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        indices, values = self.pairs(raw)
        if indices.size and int(indices.max()) >= out.size:
            raise ValueError(f"an index {int(indices.max())} of {out.size} values")
        scatter(np.sort(indices), values[np.argsort(indices, kind="stable")], out)

    def take_out(self, raw: np.ndarray, residual: np.ndarray) -> None:
        residual[self.pairs(raw)[0]] = 0


def encode_with_feedback(
    codec: Codec,
    values: np.ndarray,
    dtype: str,
    residual: np.ndarray | None,
    out: np.ndarray,
    seed: int = 0,
) -> None:
    """values: [n] of `dtype`. out: uint8, as many as `codec` writes. With a residual (float32 [n],
    changed in place) both are added first, and what is not sent stays there; 0 where that is not
    finite, as nothing could be added to it any more."""
    if residual is None:
        codec.encode(values, out, seed)
        return
    accumulate(residual, values, dtype)
    codec.encode(residual, out, seed)
    codec.take_out(out, residual)
    drop_not_finite(residual)


class Compressor:
    """Top-k of the blocks that one worker pushes to servers."""

    def __init__(self, options: TopK) -> None:
        self.keep, self.per_block = options.keep, options.per_block
        self.sent_bytes = 0

    def compress(
        self, chunks: Sequence[Chunk], view: memoryview, residual: np.ndarray | None
    ) -> Iterator[tuple[Chunk, Any, Any]]:
        """(chunk, (indices, values), sums of squares before compression) of a block's trainable
        `chunks`, whose gradient lies in the flat `view`. `residual`: float32, with the same element
        offsets, changed in place. Raises ConfigError for several dtypes where `per_block`."""
        for cut in [chunks] if self.per_block and chunks else [[c] for c in chunks]:
            yield from self._select(cut, view, residual)

    def _select(
        self, chunks: Sequence[Chunk], view: memoryview, residual: np.ndarray | None
    ) -> Iterator[tuple[Chunk, Any, Any]]:
        dtype, one = chunks[0].dtype, "one dtype among a block's trainable parameters"
        if any(c.dtype != dtype for c in chunks):
            raise ConfigError(f"top-k per block needs {one}")
        starts = [c.push_offset // ITEMSIZE[dtype] for c in chunks]
        n = starts[-1] + chunks[-1].numel - starts[0]
        grad = np.frombuffer(view, NUMPY_OF[dtype], n, chunks[0].push_offset)
        inside = [slice(at - starts[0], at - starts[0] + c.numel) for at, c in zip(starts, chunks)]
        # of the gradient alone, which `residual` may be added to
        sums = [sums_of_squares(grad[at], dtype, c.segments) for at, c in zip(inside, chunks)]
        codec = TopKCodec(self.keep, dtype if residual is None else "fp32")
        elements = sum(s.stop - s.start for c in chunks for s in c.spans)  # without the padding
        raw = np.empty(codec.nbytes(elements), np.uint8)
        kept = None if residual is None else residual[starts[0] : starts[0] + n]
        encode_with_feedback(codec, grad, dtype, kept, raw)
        self.sent_bytes += raw.nbytes
        indices, values = codec.pairs(raw)
        for chunk, at, of_chunk in zip(chunks, inside, sums):
            a, b = np.searchsorted(indices, (at.start, at.stop))
            yield chunk, (indices[a:b] - np.uint32(at.start), values[a:b]), of_chunk


def downcast_in_place(chunks: Sequence[Chunk], view: memoryview, dtype: str) -> list[str]:
    """What the gradient of each of `chunks` travels as ("": as it is). With a `dtype`, fp32 ones
    become that: each lies in the first half of its place in the flat `view` then."""
    to = [dtype if chunk.dtype == "fp32" else "" for chunk in chunks]
    for chunk, new in zip(chunks, to):
        if new:
            cast_in_place(view[chunk.push_offset :], chunk.numel, "fp32", new)
    return to
