"""Codecs, which encode gradients in fewer bytes and keep track of the encoding error.

    gradient + residual -> encode -> (network) -> decode

With error feedback (Karimireddy et al. 2019), the encoding error, called residual, is added to the
next gradient of the same elements. `Compressor` selects the largest gradients per chunk or per
block, like SmartComp in the Smart-Infinity paper. Codecs are lossy, so they are off by default
(Rule 2).

Works on flat arrays. sums/formats.py registers the codecs of sums, and servers/residuals.py stores
residuals.
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
    """A lossy encoding of n float32 values, chosen by users as NAME or NAME:ARGUMENT. Subclasses
    implement `nbytes`, `encode` and `decode`."""

    name = ""
    feedback = True

    def __init__(self, argument: str) -> None:
        """Parse the argument. Raises ValueError if it is invalid."""
        if argument:
            raise ValueError(f"the format {self.name} takes no argument")

    def nbytes(self, n: int) -> int:
        """Return the number of bytes that encode n values. Must not decrease when n grows."""
        raise TypeError(f"the codec class of format {self.name} does not implement nbytes")

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        """Encode `values`, float32 [n], into `out`, uint8 [nbytes(n)]. All bytes of `out` are sent.
        `seed` is a seed for random numbers, different in each call."""
        raise TypeError(f"the codec class of format {self.name} does not implement encode")

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        """Decode `raw`, uint8 [nbytes(n)], into `out`, float32 [n]. `raw` comes from the network
        and may hold any bytes. Raises ValueError if they are not a valid encoding."""
        raise TypeError(f"the codec class of format {self.name} does not implement decode")

    def take_out(self, raw: np.ndarray, residual: np.ndarray) -> None:
        """Subtract the values encoded in `raw` from `residual`, which then holds the encoding
        error."""
        sent = np.empty_like(residual)
        self.decode(raw, sent)
        with np.errstate(all="ignore"):
            residual -= sent


class TopKCodec(Codec):
    """The codec topk:FRACTION, which sends this fraction of the values, those of largest magnitude,
    with their indices."""

    name = "topk"

    def __init__(self, argument: str | float, dtype: str = "fp32") -> None:
        """Parse the fraction. `dtype` is the dtype of the values that `encode` reads and writes."""
        self.keep, self.dtype = float(argument), dtype
        if not 0 < self.keep < 1:
            raise ValueError("the format topk needs a fraction between 0 and 1 as argument")

    def nbytes(self, n: int) -> int:
        return min(n, max(1, round(self.keep * n))) * (4 + ITEMSIZE[self.dtype])

    def pairs(self, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the indices (uint32 [k]) and of the values ([k]) inside `raw`."""
        k = raw.size // (4 + ITEMSIZE[self.dtype])
        return raw[: 4 * k].view(np.uint32), raw[4 * k :].view(NUMPY_OF[self.dtype])

    def encode(self, values: np.ndarray, out: np.ndarray, seed: int) -> None:
        indices, largest = self.pairs(out)
        top_k(values, self.dtype, indices.size, indices, largest)

    def decode(self, raw: np.ndarray, out: np.ndarray) -> None:
        indices, values = self.pairs(raw)
        if indices.size and int(indices.max()) >= out.size:
            raise ValueError(f"index {int(indices.max())} is outside {out.size} values")
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
    """Encode `values`, [n] of `dtype`, into `out`, uint8 of the size that `codec` writes.

    `residual` is None, or float32 [n], which is added to `values` before encoding. After the call,
    it holds the encoding error, with 0 in place of inf and NaN.
    """
    if residual is None:
        codec.encode(values, out, seed)
        return
    accumulate(residual, values, dtype)
    codec.encode(residual, out, seed)
    codec.take_out(out, residual)
    drop_not_finite(residual)


class Compressor:
    """A top-k compressor of the gradients that one worker pushes to servers. `sent_bytes` counts
    the bytes of all compressed gradients so far."""

    def __init__(self, options: TopK) -> None:
        self.keep, self.per_block = options.keep, options.per_block
        self.sent_bytes = 0

    def compress(
        self, chunks: Sequence[Chunk], view: memoryview, residual: np.ndarray | None
    ) -> Iterator[tuple[Chunk, Any, Any]]:
        """Compress the gradient of a block's trainable `chunks`, which `view` holds as a flat
        array.

        For each chunk, yields (chunk, (indices, values), sums of squares), with one sum per segment
        of the uncompressed gradient. `residual` is None, or float32 with the same offsets as
        `view`; changed in place. Raises ConfigError if gradients are compressed per block and the
        dtypes of the chunks differ.
        """
        for cut in [chunks] if self.per_block and chunks else [[c] for c in chunks]:
            yield from self._select(cut, view, residual)

    def _select(
        self, chunks: Sequence[Chunk], view: memoryview, residual: np.ndarray | None
    ) -> Iterator[tuple[Chunk, Any, Any]]:
        dtype = chunks[0].dtype
        if any(c.dtype != dtype for c in chunks):
            raise ConfigError("top-k per block needs one dtype for a block's trainable parameters")
        starts = [c.push_offset // ITEMSIZE[dtype] for c in chunks]
        n = starts[-1] + chunks[-1].numel - starts[0]
        grad = np.frombuffer(view, NUMPY_OF[dtype], n, chunks[0].push_offset)
        inside = [slice(at - starts[0], at - starts[0] + c.numel) for at, c in zip(starts, chunks)]
        # sums of squares of the gradient alone, before `residual` is added
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
    """Convert the fp32 gradients of `chunks` to `dtype` in place, each to the first half of its
    range in the flat `view`. Returns the new dtype of each gradient, or "" for a gradient that is
    not converted. If `dtype` is "", nothing is converted."""
    to = [dtype if chunk.dtype == "fp32" else "" for chunk in chunks]
    for chunk, new in zip(chunks, to):
        if new:
            cast_in_place(view[chunk.push_offset :], chunk.numel, "fp32", new)
    return to
