"""Quantization to a few bits: one bit (Seide et al. 2014) and dithering (QSGD, Alistarh et al.
2017), packed.

One bit keeps the sign of each element, and one mean magnitude for all elements. Dithering rounds
each element at random to one of 2 L + 1 levels from -max |x| to max |x|; the expected result equals
the element. The random numbers are a hash of `seed` and the element's index, so they are the same
on every host (Rule 1). If any value is not finite, all decoded values are NaN.

Arrays must be contiguous: float32 [N] and uint8. Single-threaded, allocates nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roadtrain.kernels.cast import kernel


@kernel
def pack_signs(x: Any, bits: Any) -> Any:
    """Write the sign of element i to bit i mod 8 of byte i / 8 of `bits` (uint8 [(N + 7) / 8]).
    Returns the mean magnitude of all elements."""
    total = np.float64(0)
    for at in range(0, x.size, 8):
        byte = np.uint8(0)
        for i in range(at, min(at + 8, x.size)):
            total += np.float64(abs(x[i]))
            if x[i] >= 0:
                byte |= np.uint8(1 << (i - at))
        bits[at // 8] = byte
    return np.float32(total / max(x.size, 1))


@kernel
def unpack_signs(bits: Any, scale: Any, out: Any) -> Any:
    for i in range(out.size):
        out[i] = scale if bits[i // 8] >> (i % 8) & 1 else -scale


@kernel
def largest(x: Any) -> Any:
    """Return the largest magnitude of the elements of `x`, or NaN if any element is not finite."""
    most = np.float32(0)
    for i in range(x.size):
        if not np.isfinite(x[i]):
            return np.float32(np.nan)
        most = max(most, abs(x[i]))
    return most


@kernel
def pack_levels(x: Any, most: Any, width: Any, seed: Any, packed: Any) -> Any:
    """Round each element to a level from -L to L, where L is 2^(width - 1) - 1. Write level + L to
    `packed` in `width` (2, 4 or 8) bits. `most` is the largest magnitude."""
    top = np.float64((1 << (width - 1)) - 1)
    # In float64, because in float32 the quotient overflows if `most` is subnormal.
    scale = top / np.float64(most) if most > 0 else np.float64(0)
    each = 8 // width
    for at in range(0, x.size, each):
        byte = np.uint8(0)
        for i in range(at, min(at + each, x.size)):
            z = np.uint64(seed) + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            chance = np.float64(z >> np.uint64(40)) * 5.9604644775390625e-08  # 2^-24
            level = min(max(np.floor(x[i] * scale + chance), -top), top)
            byte |= np.uint8(np.int64(level + top) << ((i - at) * width))
        packed[at // each] = byte


@kernel
def unpack_levels(packed: Any, most: Any, width: Any, out: Any) -> Any:
    top = (1 << (width - 1)) - 1
    each, mask = 8 // width, (1 << width) - 1
    scale = np.float64(most) / top
    for i in range(out.size):
        out[i] = np.float32(((packed[i // each] >> ((i % each) * width) & mask) - top) * scale)
